"""The benchmark compares loops that do the same work."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import overhead


@pytest.mark.slow
def test_all_loops_take_the_same_steps(tmp_path: Path) -> None:
    sides = [overhead.Side(kind, "small") for kind in ("plain", "train", "own")]
    with ExitStack() as running:
        served = [running.enter_context(side.start(tmp_path)) for side in sides]
        plain, *others = (ranks.ask(["losses", 40])[0] for ranks in served)
        for losses in others:
            assert losses == pytest.approx(plain, rel=1e-5)
        assert served[1].ask(["steps", 5])[0] > 0
