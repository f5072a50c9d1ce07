"""Growth of a long run's own processes: memory, descriptors, threads and files."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_EVERY_S = 1.0
_LEAST_SAMPLES = 60  # shorter runs mostly start and end
_MORE = 1.1


class Sizes(NamedTuple):
    """Sums over a command and its processes, but for ranks, which come and go."""

    memory_mb: float
    descriptors: float
    threads: float
    files: float


_SPARE = Sizes(memory_mb=16, descriptors=8, threads=4, files=8)  # of what grows and shrinks with what is under way


class Growth:
    """Samples the sizes of a command under way.

    Args:
        temporary: folder in which its files are counted.
    """

    def __init__(self, command: int, temporary: Path) -> None:
        self.command, self.temporary = command, temporary
        self.samples: list[Sizes] = []
        self._due = 0.0

    def sample(self) -> None:
        """Take a sample where one is due."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _EVERY_S
            with suppress(psutil.Error, OSError):  # the command has just ended
                self.samples.append(_sizes(psutil.Process(self.command), self.temporary))


def grown(samples: Sequence[Sizes]) -> list[str]:
    """Sizes that are larger in a run's last quarter than in its second, in words."""
    if len(samples) < _LEAST_SAMPLES:
        return []
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    words = []
    for name, before, after, spare in zip(Sizes._fields, _medians(early), _medians(late), _SPARE, strict=True):
        if after > _MORE * before + spare:
            words.append(f"{name.replace('_', ' ')} of the command grew from {before:g} to {after:g}")
    return words


def _medians(samples: Sequence[Sizes]) -> Sizes:
    return Sizes(*(statistics.median(column) for column in zip(*samples, strict=True)))


def _sizes(command: psutil.Process, temporary: Path) -> Sizes:
    memory_mb, descriptors, threads = 0.0, 0, 0
    for process in (command, *command.children(recursive=True)):
        with suppress(psutil.Error, IndexError):
            if not process.cmdline()[0].startswith("paceline rank "):
                memory_mb += process.memory_info().rss / 1e6
                descriptors += process.num_fds()
                threads += process.num_threads()
    return Sizes(round(memory_mb, 1), descriptors, threads, sum(1 for _ in temporary.rglob("*")))
