"""Growth of a long run: memory, processes, descriptors, threads and files over its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

_EVERY_S = 2.0
_LEAST_SAMPLES = 30  # shorter runs mostly start and end
_MORE = 1.1
_NOT_YET = frozenset(("starting", "joining"))


class Sizes(NamedTuple):
    """Sums over a command and its processes at one time, ranks among them.

    `memory_mb` counts a page that processes share once.
    """

    memory_mb: float
    processes: float
    descriptors: float
    threads: float
    files: float


_SPARE = Sizes(memory_mb=16, processes=1, descriptors=8, threads=4, files=8)  # of what comes and goes all the time


@dataclass(frozen=True)
class Course:
    """Course of one size over a run.

    Attributes:
        early: median of its second quarter; caches fill in the first.
        late: median of its last quarter.
        per_minute: slope of a straight line through all but the first quarter.
    """

    name: str
    early: float
    late: float
    per_minute: float

    @property
    def grows(self) -> bool:
        """True where it is larger late than early, beyond what comes and goes."""
        spare: float = getattr(_SPARE, self.name)
        return self.late > _MORE * self.early + spare

    def __str__(self) -> str:
        name = self.name.removesuffix("_mb")
        unit = " MB" if name != self.name else ""
        return f"{name} from {self.early:g} to {self.late:g}{unit}, {self.per_minute:+.3g} a minute"


class Growth:
    """Samples the sizes of a command under way, while all its ranks train.

    What a lost rank or host takes with it and brings again is no growth.

    Args:
        temporary: folder in which its files are counted.
    """

    def __init__(self, command: int, ranks: int, temporary: Path) -> None:
        self.command, self.ranks, self.temporary = command, ranks, temporary
        self.samples: list[tuple[float, Sizes]] = []  # each with its monotonic time
        self._due, self._step = 0.0, 0

    def sample(self, step: int, phases: Callable[[], Set[str]]) -> None:
        """Take a sample where one is due.

        Args:
            step: newest one that the run has taken.
            phases: says in which its ranks are.
        """
        now = time.monotonic()
        if now >= self._due and step > self._step and not phases() & _NOT_YET:
            self._due, self._step = now + _EVERY_S, step
            with suppress(psutil.Error, OSError, IndexError):  # one has just ended, and a sum without it tells nothing
                if (sizes := self._sizes()) is not None:
                    self.samples.append((now, sizes))

    def _sizes(self) -> Sizes | None:
        command = psutil.Process(self.command)
        processes = [command, *command.children(recursive=True)]
        alive = [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]
        if sum(process.cmdline()[0].startswith("paceline rank ") for process in alive) != self.ranks:
            return None
        return Sizes(
            memory_mb=round(sum(process.memory_full_info().pss for process in alive) / 1e6, 1),
            processes=len(processes),
            descriptors=sum(process.num_fds() for process in alive),
            threads=sum(process.num_threads() for process in alive),
            files=sum(1 for _ in self.temporary.rglob("*")),
        )


def courses(samples: Sequence[tuple[float, Sizes]]) -> list[Course]:
    """Course of each size; none of a run that was too short to tell."""
    if len(samples) < _LEAST_SAMPLES:
        return []
    quarter = len(samples) // 4
    minutes = [time / 60 for time, _ in samples[quarter:]]
    found = []
    for number, name in enumerate(Sizes._fields):
        sizes = [sample[number] for _, sample in samples]
        slope = statistics.linear_regression(minutes, sizes[quarter:]).slope
        early, late = statistics.median(sizes[quarter : 2 * quarter]), statistics.median(sizes[-quarter:])
        found.append(Course(name, early, late, round(slope, 4)))
    return found
