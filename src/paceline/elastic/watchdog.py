"""Watchdog: the ranks that hang, by what the status board has shown of them.

It has no clock of its own. A rank that computes keeps the others waiting for as long as they are in `sync` of its step;
where ranks are replaced, the limit of that follows from the run's own steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from paceline.wire.status import RankStatus

LEAST_S, FACTOR = 10.0, 20.0  # limit of computing that others wait for: so many times the slowest recent step
FIRST_STEPS = 5  # of a process, which may take longer
FIRST_DEADLINES = 4.0  # limit of computing that nobody waits for, before the first step has ended
# What a rank did nothing for beyond that between two looks was the machine's: it slept, or swapped.
LOOK_S = 1.0
_LOOKS = 600  # that count as recent
_OWN_ERROR_S = 5.0  # beyond the deadline: the error of the transport itself, which knows more, comes first
_IN_STEP = ("data", "compute", "sync", "optimizer")


@dataclass
class _Seen:
    """History of one process, as it was seen.

    Attributes:
        last: its newest step.
        steps: that it has taken since it was first seen.
        step_s: of its present step so far, without evaluations and checkpoints.
        doing: step and phase at the last look.
        idle_s: since its last mark, at the last look.
        still_s: the same, without what was the machine's.
        waited_s: for how long of that others have waited for it.
    """

    pid: int
    generation: int
    last: int
    doing: tuple[int, str]
    idle_s: float
    still_s: float
    steps: int = 0
    step_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class Watchdog:
    """Tells which ranks hang.

    Args:
        deadline_s: the longest that a rank may keep others waiting, or do nothing in another phase than computing.
        start_deadline_s: the longest that a start may take.
        follows_steps: ranks are replaced and compile nothing, so that computing may have a limit of its own.
    """

    deadline_s: float
    start_deadline_s: float
    follows_steps: bool = False
    _ranks: dict[int, _Seen] = field(default_factory=dict)
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    _looked_s: float | None = None
    _suspect: int = -1  # a step which a rank was taken for hung in: it may be a slow one

    def look(
        self, alive: Sequence[RankStatus], idle_s: Mapping[int, float], now_s: float, paging: Set[int] = frozenset()
    ) -> list[RankStatus]:
        """Ranks that hang; all, if they only wait for one another.

        Args:
            alive: the ranks that take part.
            idle_s: of each, as far as is known.
            paging: ranks that wait for a disk or for memory, and are only slow.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        self._ranks = {status.rank: self._seen(status, idle_s[status.rank]) for status in alive}
        self._note_steps(alive, passed_s)
        for status in alive:
            self._note_wait(status, alive, idle_s[status.rank], paging=status.rank in paging)
        late = [status for status in alive if self._is_late(status)]
        if len(late) == len(alive) and all(status.phase == "sync" for status in late):
            limit_s = self.deadline_s + _OWN_ERROR_S
            return late if all(self._ranks[status.rank].still_s > limit_s for status in late) else []
        hung = [status for status in late if status.phase != "sync"]
        self._suspect = max([self._suspect, *(status.step for status in hung)])
        return hung

    def _seen(self, status: RankStatus, idle_s: float) -> _Seen:
        seen = self._ranks.get(status.rank)
        began = seen is not None and seen.doing[1] == "starting" != status.phase
        if seen is None or began or seen.pid != status.pid or status.step < seen.last - 1:
            doing = status.step, status.phase
            return _Seen(status.pid, status.generation, status.step, doing, idle_s, idle_s)
        if seen.generation != status.generation:
            # until its next step it meets others, takes over their state, and may show what it did before
            seen.generation, seen.steps, seen.waited_s = status.generation, min(seen.steps, FIRST_STEPS - 1), 0.0
            seen.step_s = float("-inf")  # which is no time of a step
        return seen

    def _note_steps(self, alive: Sequence[RankStatus], passed_s: float) -> None:
        took_s = 0.0
        for status in alive:
            seen = self._ranks[status.rank]
            if status.phase in _IN_STEP:
                seen.step_s += passed_s
            if (steps := status.step - seen.last) > 0:
                took_s = max(took_s, seen.step_s / steps)
                seen.last, seen.steps, seen.step_s = status.step, seen.steps + steps, 0.0
        if took_s:
            self._step_s.append(took_s)

    def _note_wait(self, status: RankStatus, alive: Sequence[RankStatus], idle_s: float, *, paging: bool) -> None:
        seen, doing = self._ranks[status.rank], (status.step, status.phase)
        # behind a cut link it does not grow, and it shrinks where a word from another host came late
        more_s, seen.idle_s = min(max(idle_s - seen.idle_s, 0.0), LOOK_S), idle_s
        if doing != seen.doing:
            seen.doing, seen.still_s, seen.waited_s = doing, idle_s, 0.0
            return
        waits = any(other.phase == "sync" and other.step >= status.step for other in alive if other is not status)
        if waits and not paging:
            seen.waited_s += more_s
        seen.still_s = min(seen.still_s + more_s, idle_s)
        seen.waited_s = min(seen.waited_s, idle_s)

    def _is_late(self, status: RankStatus) -> bool:
        seen = self._ranks[status.rank]
        if status.phase == "starting":
            return seen.still_s > self.start_deadline_s
        if status.phase != "compute" or not self.follows_steps:
            return seen.still_s > self.deadline_s
        return seen.waited_s > self._waited_limit_s(seen, status.step) or (
            seen.still_s - seen.waited_s > self._alone_limit_s()
        )

    def _waited_limit_s(self, seen: _Seen, step: int) -> float:
        known = min(seen.steps, len(self._step_s)) >= FIRST_STEPS and step != self._suspect
        return min(max(LEAST_S, FACTOR * max(self._step_s)), self.deadline_s) if known else self.deadline_s

    def _alone_limit_s(self) -> float:
        if not self._step_s:
            return max(self.start_deadline_s, FIRST_DEADLINES * self.deadline_s)
        return max(self.deadline_s, FACTOR * max(self._step_s))
