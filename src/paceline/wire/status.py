"""Status board, where ranks publish their phase and the launcher announces generations.

The board is a file in memory. A mark costs three 8-byte stores, so ranks may mark every phase of every step. A
generation begins when a rank is lost or joins, and waits for ranks of an earlier generation end.
`elastic/membership.py` decides on generations; in a rank, it registers a check with `watch_generation` that shows if a
generation is over. Nothing here imports torch.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from paceline.errors import ClusterError, SyncError
from paceline.rank_environment import RankEnvironment, is_our_rank

Phase = Literal["starting", "data", "compute", "sync", "optimizer", "checkpoint", "evaluate", "done", "joining"]
PHASES: tuple[Phase, ...] = get_args(Phase)

_CODES = {phase: code for code, phase in enumerate(PHASES)}
_SLOT_BYTES = 64  # one cache line per slot, so that ranks do not slow each other's marks
_PID, _ATTEMPT, _PHASE, _STEP, _CHANGED, _GENERATION = range(6)  # 8-byte fields of a slot
_CURRENT, _WANTED = range(2)  # fields of the last slot, which is the launcher's


@dataclass(frozen=True)
class RankStatus:
    """State of one rank, as shown in its slot.

    Attributes:
        phase: `joining` is a replacement that waits to join.
        changed_ns: time of the last mark by CLOCK_MONOTONIC, which all processes of a machine share.
        generation: generation in which the rank takes part.
    """

    rank: int
    pid: int
    attempt: int
    phase: Phase
    step: int
    changed_ns: int
    generation: int = 0

    def idle_s(self, now_ns: int) -> float:
        """Seconds since the last mark."""
        return (now_ns - self.changed_ns) / 1e9


class StatusBoard:
    """Shared memory map with one fixed slot per rank, and one of the launcher.

    The launcher calls `create`, `read` and `announce`; a rank calls `of_this_rank`, `mark` and `enter`.
    """

    def __init__(self, memory: mmap.mmap, rank: int = 0) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")  # aligned 8-byte stores are atomic
        first = rank * _SLOT_BYTES // 8
        self._slot = self._words[first : first + _SLOT_BYTES // 8]
        self._launchers = self._words[len(self._words) - _SLOT_BYTES // 8 :]

    @classmethod
    def create(cls, path: Path, ranks: int, attempt: int = 0) -> StatusBoard:
        """Create the file for `ranks` ranks, readable by its owner only; all are `starting`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, (ranks + 1) * _SLOT_BYTES)
            board = cls(mmap.mmap(fd, (ranks + 1) * _SLOT_BYTES))
        finally:
            os.close(fd)
        for first in range(0, ranks * _SLOT_BYTES // 8, _SLOT_BYTES // 8):
            board._words[first + _ATTEMPT] = attempt
            board._words[first + _CHANGED] = time.monotonic_ns()
        return board

    @classmethod
    def at(cls, path: Path) -> StatusBoard:
        """Open a board of another process, for reading."""
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    @classmethod
    def of_this_rank(cls) -> StatusBoard:
        """Open this rank's slot of the launcher's board; without such a launcher, a private board."""
        environment = RankEnvironment.from_env() if is_our_rank() else None
        if environment is None or environment.status_file is None:
            return cls(mmap.mmap(-1, 2 * _SLOT_BYTES))
        with open(environment.status_file, "r+b") as file:
            board = cls(mmap.mmap(file.fileno(), 0), rank=environment.rank)
        board._slot[_PID] = os.getpid()
        return board

    def mark(self, phase: Phase, step: int) -> None:
        """Publish that this rank is now in `phase` of `step`. Takes well under a microsecond."""
        slot = self._slot
        slot[_PHASE] = _CODES[phase]
        slot[_STEP] = step
        slot[_CHANGED] = time.monotonic_ns()

    def put(self, rank: int, pid: int, phase: Phase, step: int, changed_ns: int, generation: int = 0) -> None:
        """Publish the received state of a rank on another host."""
        first = rank * _SLOT_BYTES // 8
        slot = self._words[first : first + _SLOT_BYTES // 8]
        slot[_PID], slot[_PHASE], slot[_STEP] = pid, _CODES[phase], step
        slot[_CHANGED], slot[_GENERATION] = changed_ns, generation

    def enter(self, generation: int) -> None:
        """Publish that this rank takes part in a generation."""
        self._slot[_GENERATION] = generation

    def announce(self, current: int, wanted: int) -> None:
        """Announce the current generation, and the one that begins after a step."""
        self._launchers[_WANTED] = wanted
        self._launchers[_CURRENT] = current

    @property
    def current_generation(self) -> int:
        """Newest generation that has begun; ranks of other generations leave at once."""
        return self._launchers[_CURRENT]

    @property
    def wanted_generation(self) -> int:
        """Generation to begin after a step; the current one if no process joins."""
        return self._launchers[_WANTED]

    def read(self) -> list[RankStatus]:
        """Read phase and step of every rank, in rank order."""
        words = self._settled()
        width = _SLOT_BYTES // 8
        slots = [words[first : first + width] for first in range(0, len(words) - width, width)]
        return [
            RankStatus(rank, s[_PID], s[_ATTEMPT], PHASES[s[_PHASE]], s[_STEP], s[_CHANGED], s[_GENERATION])
            for rank, s in enumerate(slots)
        ]

    def close(self) -> None:
        """Unmap the memory. The file stays; its creator removes it."""
        self._slot.release()
        self._launchers.release()
        self._words.release()
        self._memory.close()

    def _settled(self) -> list[int]:
        """Read all words until two readings are equal, so that phase and step are consistent."""
        words = self._words.tolist()
        for _ in range(10):  # ranks that mark faster than this loop are alive anyway
            words, before = self._words.tolist(), words
            if words == before:
                break
        return words


_LOOK_S = 0.002
# time between a rank's detection of a dead peer and the launcher's announcement of the next generation
_ANNOUNCED_WITHIN_S = 2.0
_WAITED = "_paceline_waited"  # attribute of an error after a wait without an announcement

_is_over: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Generation:
    """Generation of a run.

    `members` are the numbers of its processes, ascending; a member's rank is its place among them.
    """

    number: int
    members: tuple[int, ...]

    def rank_of(self, member: int) -> int:
        """Return the rank of a process in this generation's group."""
        return self.members.index(member)


def next_number(current: int, wanted: int, own: int) -> int | None:
    """Return the number of the generation to enter after generation `own`, or None.

    Members enter a wanted generation after they have decided together to leave the current one. A joining process
    enters it once all members are there and it is current; until then the members may end the run.
    """
    newest = current if own < 0 else max(current, wanted)
    return newest if newest > own else None


class GenerationOver(SyncError):
    """Raised if a wait is interrupted because the ranks meet again in the next generation."""


@contextmanager
def watch_generation(is_over: Callable[[], bool]) -> Iterator[None]:
    """Context in which waits for other ranks end with `GenerationOver` once `is_over` is true."""
    global _is_over
    before, _is_over = _is_over, is_over
    try:
        yield
    finally:
        _is_over = before


def generations_are_watched() -> bool:
    """True if this process takes part in a run whose generations may end."""
    return _is_over is not None


def generation_is_over() -> bool:
    """True if this generation is over, so that waits for its ranks must end."""
    return _is_over is not None and _is_over()


def ends_generation(error: BaseException) -> bool:
    """True if the only cause of an error is the end of the generation.

    A lost peer may be noticed before the end of the generation is announced, so this waits briefly for the
    announcement.
    """
    if isinstance(error, GenerationOver):
        return True
    if _is_over is None or not _is_of_other_ranks(error) or getattr(error, _WAITED, False):
        return False
    until = time.monotonic() + _ANNOUNCED_WITHIN_S
    while not _is_over():
        if time.monotonic() > until:
            setattr(error, _WAITED, True)
            return False
        time.sleep(_LOOK_S)
    return True


def _is_of_other_ranks(error: BaseException) -> bool:
    """True for errors of waits for other ranks, or of access to their memory.

    These are paceline's errors, and torch's `DistError`.
    """
    return isinstance(error, (SyncError, ClusterError)) or any(
        kind.__name__ == "DistError" for kind in type(error).__mro__
    )
