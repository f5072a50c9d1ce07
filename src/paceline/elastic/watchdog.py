"""Watchdog: detection of hung ranks from the status board.

The watchdog reads no clock: callers pass the current time. A computing rank keeps other ranks waiting while these are
in phase `sync` of the same step. If ranks are replaced, the limit of this wait is derived from the duration of earlier
steps of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from paceline.wire.status import RankStatus

# limit of computing while other ranks wait: minimum in seconds, and multiple of the slowest recent step
LEAST_S, FACTOR = 10.0, 20.0
FIRST_STEPS = 5  # number of first steps of a process, which may take longer
FIRST_DEADLINES = 4.0  # limit of computing in the first step while no rank waits, as a multiple of the deadline
# If more idle time passes between two polls, the excess is attributed to the machine, which slept or swapped.
LOOK_S = 1.0
_LOOKS = 600  # number of steps that count as recent
_OWN_ERROR_S = 5.0  # seconds after the deadline, so that the more specific error of the transport is raised first
_IN_STEP = ("data", "compute", "sync", "optimizer")


@dataclass
class _Seen:
    """Observed history of one process.

    Attributes:
        last: number of the newest step.
        steps: number of steps since the process was first seen.
        step_s: duration of the current step so far, without evaluations and checkpoints.
        doing: step and phase at the last poll.
        idle_s: time from the last mark to the last poll.
        still_s: idle time without pauses of the machine.
        waited_s: part of the idle time in which other ranks waited for this process.
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
    """Detector of hung ranks.

    Args:
        deadline_s: longest time that a rank may stay in one phase without progress.
        start_deadline_s: longest time that a rank may take to start.
        follows_steps: True to derive the limits of computing from earlier steps. Ranks must be replaceable, and must
            not compile code.
    """

    deadline_s: float
    start_deadline_s: float
    follows_steps: bool = False
    _ranks: dict[int, _Seen] = field(default_factory=dict)
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    _looked_s: float | None = None
    _suspect: int = -1  # step in which a rank was assumed to hang, although the step may only be slow

    def look(
        self, alive: Sequence[RankStatus], idle_s: Mapping[int, float], now_s: float, paging: Set[int] = frozenset()
    ) -> list[RankStatus]:
        """Return the hung ranks, or all ranks if they only wait for one another.

        Args:
            alive: ranks that take part.
            idle_s: idle time of each rank in seconds.
            paging: ranks that are slow because they wait for a disk or for memory.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        idle_s = {status.rank: self._idle_s(status, idle_s[status.rank], passed_s) for status in alive}
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

    def _idle_s(self, status: RankStatus, idle_s: float, passed_s: float) -> float:
        """Return the idle time of a rank. A rank that has changed its phase since the last poll was active since then.

        The words of a mark are not written at once, so that a new phase may be read with the time of the phase before.
        """
        seen = self._ranks.get(status.rank)
        if seen is None or seen.pid != status.pid or seen.doing == (status.step, status.phase):
            return idle_s
        return min(idle_s, passed_s)

    def _seen(self, status: RankStatus, idle_s: float) -> _Seen:
        seen = self._ranks.get(status.rank)
        began = seen is not None and seen.doing[1] == "starting" != status.phase
        if seen is None or began or seen.pid != status.pid or status.step < seen.last - 1:
            doing = status.step, status.phase
            return _Seen(status.pid, status.generation, status.step, doing, idle_s, idle_s)
        if seen.generation != status.generation:
            # until the next step, the rank meets other ranks and receives their state, and its slot may show old values
            seen.generation, seen.steps, seen.waited_s = status.generation, min(seen.steps, FIRST_STEPS - 1), 0.0
            seen.step_s = float("-inf")  # the time until then does not belong to a step
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
        # behind a cut link the idle time does not grow, and after a late message from another host it shrinks
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
