"""Status board on which ranks publish their phase, and the launcher announces generations.

The board is a file in shared memory. A mark takes only three 8-byte stores, so ranks can mark every phase of every
step. A new generation begins when a rank is lost or joins. Waits for ranks of an earlier generation then end.
`elastic/membership.py` decides when a generation begins. In a rank, `watch_generation` registers a function that
returns whether the generation is over. This module does not import torch.
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

from paceline.errors import ClusterError, SyncError, device_fault
from paceline.rank_environment import RankEnvironment, is_our_rank
from paceline.shared_words import acquiring, publish

Phase = Literal["starting", "data", "compute", "sync", "optimizer", "checkpoint", "evaluate", "done", "joining"]
PHASES: tuple[Phase, ...] = get_args(Phase)

_CODES = {phase: code for code, phase in enumerate(PHASES)}
_SLOT_BYTES = 64  # one cache line per slot, so that the marks of ranks do not slow one another down
_PID, _ATTEMPT, _PHASE, _STEP, _CHANGED, _GENERATION = range(6)  # 8-byte fields of a slot
_CURRENT, _WANTED = range(2)  # fields of the last slot, which belongs to the launcher


@dataclass(frozen=True)
class RankStatus:
    """State of one rank, as published in its slot.

    Attributes:
        phase: what the rank is doing. A replacement that waits to join is in phase `joining`.
        changed_ns: time of the last mark in nanoseconds of CLOCK_MONOTONIC, which is the same for all processes of a
            machine.
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
        """Return the seconds since the last mark."""
        return (now_ns - self.changed_ns) / 1e9


class StatusBoard:
    """Shared memory map with one fixed slot per rank and one slot for the launcher.

    The launcher calls `create`, `read` and `announce`. A rank calls `of_this_rank`, `mark` and `enter`.
    """

    def __init__(self, memory: mmap.mmap, rank: int = 0) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("q")  # aligned 8-byte stores are atomic
        first = rank * _SLOT_BYTES // 8
        self._slot = self._words[first : first + _SLOT_BYTES // 8]
        self._launchers = self._words[len(self._words) - _SLOT_BYTES // 8 :]

    @classmethod
    def create(cls, path: Path, ranks: int, attempt: int = 0) -> StatusBoard:
        """Create the file for `ranks` ranks, which are all in phase `starting`. Only its owner can read the file."""
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
        """Open this rank's slot on the launcher's board. Without a launcher of paceline, make a private board."""
        environment = RankEnvironment.from_env() if is_our_rank() else None
        if environment is None or environment.status_file is None:
            return cls(mmap.mmap(-1, 2 * _SLOT_BYTES))
        with open(environment.status_file, "r+b") as file:
            board = cls(mmap.mmap(file.fileno(), 0), rank=environment.rank)
        board._slot[_PID] = os.getpid()
        return board

    def mark(self, phase: Phase, step: int) -> None:
        """Publish that this rank is now in `phase` of `step`. The call takes well under a microsecond.

        The words of a mark announce no other data, so `read` may see the words in any order. The time comes first: a
        new phase with the old time would look like a rank that has made no progress for long.
        """
        slot = self._slot
        slot[_CHANGED] = time.monotonic_ns()
        slot[_PHASE] = _CODES[phase]
        slot[_STEP] = step

    def put(self, rank: int, pid: int, phase: Phase, step: int, changed_ns: int, generation: int = 0) -> None:
        """Publish the state of a rank on another host, as received from that host."""
        first = rank * _SLOT_BYTES // 8
        slot = self._words[first : first + _SLOT_BYTES // 8]
        slot[_CHANGED] = changed_ns
        slot[_PID], slot[_PHASE], slot[_STEP], slot[_GENERATION] = pid, _CODES[phase], step, generation

    def enter(self, generation: int) -> None:
        """Publish that this rank takes part in a generation."""
        self._slot[_GENERATION] = generation

    def announce(self, current: int, wanted: int) -> None:
        """Announce the current generation, and the generation that should begin after a step."""
        publish(self._launchers, _WANTED, wanted)
        publish(self._launchers, _CURRENT, current)

    @property
    @acquiring
    def current_generation(self) -> int:
        """Number of the newest generation that has begun. Ranks of earlier generations abort their step."""
        return self._launchers[_CURRENT]

    @property
    @acquiring
    def wanted_generation(self) -> int:
        """Number of the generation to begin after a step; the current one if nothing changes."""
        return self._launchers[_WANTED]

    def read(self) -> list[RankStatus]:
        """Read the status of every rank, in rank order."""
        words = self._settled()
        width = _SLOT_BYTES // 8
        slots = [words[first : first + width] for first in range(0, len(words) - width, width)]
        return [
            RankStatus(rank, s[_PID], s[_ATTEMPT], PHASES[s[_PHASE]], s[_STEP], s[_CHANGED], s[_GENERATION])
            for rank, s in enumerate(slots)
        ]

    def close(self) -> None:
        """Unmap the memory. The creator of the file removes the file."""
        self._slot.release()
        self._launchers.release()
        self._words.release()
        self._memory.close()

    def _settled(self) -> list[int]:
        """Read all slots until two readings are equal, so that the values are consistent."""
        words = self._words.tolist()
        for _ in range(10):  # if ranks mark faster than this loop reads, they are certainly alive
            words, before = self._words.tolist(), words
            if words == before:
                break
        return words


_LOOK_S = 0.002
# longest time from a rank's detection of a dead peer to the launcher's announcement of the next generation
_ANNOUNCED_WITHIN_S = 2.0
_WAITED = "_paceline_waited"  # attribute of an error for which a wait has ended without an announcement

_is_over: Callable[[], bool] | None = None
_aborted = False  # True once the collectives of this generation were aborted on the accelerator


@dataclass(frozen=True)
class Generation:
    """Generation of a run: the processes that train together.

    `members` are the numbers of its processes in ascending order. The rank of a process is its index in `members`.
    """

    number: int
    members: tuple[int, ...]

    def rank_of(self, member: int) -> int:
        """Return the rank of a process in this generation."""
        return self.members.index(member)


def next_number(current: int, wanted: int, own: int) -> int | None:
    """Return the number of the generation to enter after generation `own`, or None.

    Members enter a wanted generation once they have agreed to leave the current generation. A joining process enters
    the generation once all members have entered and it is the current generation. Until then, the members may end the
    run.
    """
    newest = current if own < 0 else max(current, wanted)
    return newest if newest > own else None


class GenerationOver(SyncError):
    """Raised if a wait is interrupted because the next generation begins."""


@contextmanager
def watch_generation(is_over: Callable[[], bool]) -> Iterator[None]:
    """Make waits for other ranks raise `GenerationOver` inside the context, once `is_over` returns true."""
    global _is_over
    before, _is_over = _is_over, is_over
    try:
        yield
    finally:
        _is_over = before


def generations_are_watched() -> bool:
    """Return True if this process takes part in a run whose generations may end."""
    return _is_over is not None


def generation_is_over() -> bool:
    """Return True if this process's generation is over, so that waits must end."""
    return _is_over is not None and _is_over()


def note_abort(aborted: bool) -> None:
    """Record whether this process has aborted the collectives of its generation on an accelerator."""
    global _aborted
    _aborted = aborted


def was_aborted() -> bool:
    """Return True if results of this generation's collectives on an accelerator may be undefined."""
    return _aborted


def refuse_aborted() -> None:
    """Raise `GenerationOver` if a result that was read from an accelerator may be undefined."""
    if _aborted:
        raise interrupted()


def interrupted() -> GenerationOver:
    """Return the error for work that the end of the generation has interrupted."""
    return GenerationOver("ranks.generation_over", "this rank's work was interrupted, because the generation is over")


def ends_generation(error: BaseException) -> bool:
    """Return True if an error was caused only by the end of the generation.

    A rank may notice a lost peer before the end of the generation is announced. The function therefore waits briefly
    for the announcement. After collectives were aborted on an accelerator, their undefined results may cause any
    error, so only a failure of the device itself counts as another cause.
    """
    if isinstance(error, GenerationOver) or (_aborted and isinstance(error, Exception) and not device_fault(error)):
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
    """Return True for errors in waits for other ranks or access to their memory.

    These are errors of paceline, and `DistError` of torch.
    """
    return isinstance(error, (SyncError, ClusterError)) or any(
        kind.__name__ == "DistError" for kind in type(error).__mro__
    )
