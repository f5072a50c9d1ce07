"""The benchmark compares loops that do the same work."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.slow
def test_our_loop_and_the_plain_one_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    overhead = importlib.import_module("overhead")
    with overhead.Side("plain", {}) as plain, overhead.Side("paceline", overhead.ALLOCATOR) as ours:
        assert ours.ask("losses") == pytest.approx(plain.ask("losses"), rel=1e-5)
        assert ours.ask("block") > 0
