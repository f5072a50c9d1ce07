"""Last good state of a run in memory, taken at little cost."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from paceline.comm import Group
from paceline.engine.engine import Engine
from paceline.planning.cost.constants import STATE_SHARE
from paceline.run.record.recorder import StepInfo
from paceline.state.rank_state import RankState

FEWEST, MOST = 10, 1000  # steps between two states


class LastGood:
    """Keeps the newest good state of this rank, and goes back to it.

    All ranks take states after the same steps: how many lie between two is agreed on from what the last one cost on the
    slowest rank.

    Args:
        every_steps: steps between two states; None: chosen so that they cost no more than `STATE_SHARE`.
    """

    def __init__(self, engine: Engine, group: Group, every_steps: int | None) -> None:
        self.engine, self.group, self.every_steps = engine, group, every_steps
        self.state: RankState | None = None
        self._next = 0
        self._step_s: list[float] = []
        self._untried = False  # no step since the newest rewind was good

    def after_step(self, info: StepInfo, values: Callable[[], dict[str, Any]]) -> bool:
        """Note a step, and take a state where one is due; True if so."""
        if info.result.problem is not None:
            return False
        self._untried = False
        if info.result.timing is not None:
            self._step_s.append(info.result.timing.step_s)
        if info.result.step < self._next:
            return False
        self.take(values())
        return True

    def take(self, values: dict[str, Any]) -> None:
        """Take a state now; every rank calls it."""
        began = time.perf_counter()
        self.state = RankState.of(self.engine, values).copied(self.state)
        self._next = self.state.step + (self.every_steps or self._worth_it(time.perf_counter() - began))
        self._step_s.clear()

    def newest(self, since: int) -> RankState | None:
        """The state to go back to: of step `since` or later.

        One from which the very next step failed again is not good, and dropped.
        """
        if self._untried:
            self.state, self._next = None, 0
        return self.state if self.state is not None and self.state.step >= since else None

    def restore(self, state: RankState) -> dict[str, Any]:
        """Go back to a state; returns the loop's values."""
        self._untried = True
        self._step_s.clear()
        return state.restore(self.engine)

    def _worth_it(self, copy_s: float) -> int:
        """Steps after which another state costs little, equal on all ranks."""
        step_s = statistics.median(self._step_s) if self._step_s else math.inf
        cost: float = max(copy / max(step, 1e-6) for copy, step in self.group.gather_json([copy_s, step_s]))
        return min(max(math.ceil(cost / STATE_SHARE), FEWEST), MOST)
