"""The benchmark compares loops that do the same work."""

from __future__ import annotations

import pytest

import overhead
from paceline.elastic.forkserver import ALLOCATOR


@pytest.mark.slow
def test_our_loop_and_the_plain_one_take_the_same_steps() -> None:
    with overhead.Side("plain", {}) as plain, overhead.Side("paceline", ALLOCATOR) as ours:
        assert ours.ask("losses") == pytest.approx(plain.ask("losses"), rel=1e-5)
        assert ours.ask("block") > 0
