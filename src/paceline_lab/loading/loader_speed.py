"""Measurement of a job's loader without a model, for several numbers of loader processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline.data.loader import Loader
from paceline.job.batch import rows
from paceline.job.job import Job
from paceline.job.samples import DataSets, in_users_data
from paceline.run.data_view import columns_of, loader_alone
from paceline.run.token_view import TokenCounts
from paceline.stats import Interval, median_interval

ROUNDS = 5  # rounds of each setting; rounds of different settings take turns
_LEAST_BATCHES = 3  # smallest number of batches of a round, even if they take longer than the round should
_COUNTED_BATCHES = 4  # batches in which tokens are counted


@dataclass(frozen=True)
class Round:
    """One round of a setting.

    Attributes:
        seconds, batches, samples: duration of the round, and number of batches and samples read.
        decoded_bytes: size of the batches' tensors.
        read_bytes, disk_bytes: bytes that the reading processes got from `read` calls, and from the disk; None if the
            kernel does not count them.
        waiting: share of time that a consumer with the given step time waits; None without a step time.
    """

    seconds: float
    batches: int
    samples: int
    decoded_bytes: int
    read_bytes: int | None
    disk_bytes: int | None
    waiting: float | None = None


@dataclass
class LoaderSpeed:
    """Measured speed of the loader with one number of loader processes.

    Attributes:
        tokens: mean number of tokens of a sample, without padding; None if the samples have no tokens.
    """

    num_workers: int
    tokens: float | None = None
    rounds: list[Round] = field(default_factory=list)

    @property
    def samples_per_s(self) -> Interval:
        """Samples per second."""
        return median_interval([one.samples / one.seconds for one in self.rounds])

    @property
    def decoded_per_s(self) -> Interval:
        """Bytes of tensors per second."""
        return median_interval([one.decoded_bytes / one.seconds for one in self.rounds])

    @property
    def batch_s(self) -> Interval:
        """Seconds for a batch: the shortest step for which the loader is fast enough."""
        return median_interval([one.seconds / one.batches for one in self.rounds])

    @property
    def read_per_s(self) -> Interval | None:
        """Bytes per second that were read from files; None if unknown."""
        read = [one.read_bytes / one.seconds for one in self.rounds if one.read_bytes is not None]
        return median_interval(read) if read else None

    @property
    def read_per_sample(self) -> float | None:
        """Bytes that were read from files for each sample; None if unknown."""
        known = [one for one in self.rounds if one.read_bytes is not None]
        # memory-mapped files are not read by calls, and count only if they come from the disk
        read = sum(max(one.read_bytes or 0, one.disk_bytes or 0) for one in known)
        return read / sum(one.samples for one in known) if known else None

    @property
    def disk_share(self) -> float | None:
        """Share of the read bytes that came from the disk; None if nothing was read."""
        known = [one for one in self.rounds if one.read_bytes is not None]
        read = sum(one.read_bytes or 0 for one in known)
        return min(1.0, sum(one.disk_bytes or 0 for one in known) / read) if read else None

    @property
    def waiting(self) -> Interval | None:
        """Share of time that a consumer with the given step time waits."""
        shares = [one.waiting for one in self.rounds if one.waiting is not None]
        return median_interval(shares) if shares else None


def measure_loader(
    job: Job,
    data: DataSets,
    workers: Sequence[int],
    *,
    seconds: float,
    step_s: float | None = None,
    say: Callable[[str], object] = str,
) -> list[LoaderSpeed]:
    """Measure the loader of a single rank, which reads whole global batches.

    Args:
        workers: numbers of loader processes to measure.
        seconds: duration of each measurement of a setting, in all rounds together.
        step_s: step time in seconds of a simulated consumer whose waiting time is also measured.
        say: function that is called with the name of each phase.

    Raises:
        DataError: a sample cannot be read.
    """
    with ExitStack() as stack:
        loaders = [stack.enter_context(_Reading(job, data, count)) for count in workers]
        for number in range(ROUNDS):
            for one in loaders:
                processes = f"{one.speed.num_workers} loader processes"
                say(f"measuring {processes}, round {number + 1} of {ROUNDS}")
                one.measure(seconds / ROUNDS, step_s)
        return [one.speed for one in loaders]


class _Reading:
    """A loader that is read over endless epochs, and its reading processes."""

    def __init__(self, job: Job, data: DataSets, num_workers: int) -> None:
        spec = job.data.model_copy(update={"num_workers": num_workers})
        self.speed = LoaderSpeed(num_workers)
        self._loader = loader_alone(job.model_copy(update={"data": spec}), data)
        self._batches = _endless(self._loader)
        self._tokenizer = getattr(in_users_data(data.train, [])[0], "tokenizer", None)
        self._processes = [os.getpid()]

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()

    def measure(self, seconds: float, step_s: float | None) -> None:
        if not self.speed.rounds:
            self._begin()
        # skip batches that were read ahead while other settings were measured
        for _ in range(self._loader.workers.ahead + 1):
            next(self._batches)
        before, started = _io_of(self._processes), time.perf_counter()
        batches = samples = decoded = 0
        while batches < _LEAST_BATCHES or time.perf_counter() < started + seconds:
            batch = next(self._batches)
            batches, samples, decoded = batches + 1, samples + rows(batch), decoded + _bytes_of(batch)
        taken = time.perf_counter() - started
        after = _io_of(self._processes)
        read, disk = (None, None) if before is None or after is None else (after[0] - before[0], after[1] - before[1])
        waiting = None if step_s is None else self._waiting(seconds, step_s)
        self.speed.rounds.append(Round(taken, batches, samples, decoded, read, disk, waiting))

    def _begin(self) -> None:
        before = {process.pid for process in multiprocessing.active_children()}
        tokens, samples = TokenCounts(), 0
        for batch in islice(self._batches, _COUNTED_BATCHES):
            tokens.add(columns_of(batch), self._tokenizer)
            samples += rows(batch)
        if tokens.positions:
            self.speed.tokens = (tokens.positions - tokens.padding) / samples
        started = [process.pid for process in multiprocessing.active_children() if process.pid not in before]
        self._processes = [pid for pid in started if pid is not None] or self._processes

    def _waiting(self, seconds: float, step_s: float) -> float:
        waited, started, steps = 0.0, time.perf_counter(), 0
        while steps < _LEAST_BATCHES or time.perf_counter() < started + seconds:
            asked = time.perf_counter()
            next(self._batches)
            waited += time.perf_counter() - asked
            time.sleep(step_s)
            steps += 1
        return waited / (time.perf_counter() - started)


class _Io(NamedTuple):
    """Bytes that processes have got from `read` calls, and from the disk."""

    read: int
    disk: int


def _io_of(processes: Sequence[int]) -> _Io | None:
    """Return the sums of the processes' counters; None if the kernel does not show them."""
    read = disk = 0
    with suppress(OSError, KeyError, ValueError):
        for process in processes:
            lines = Path(f"/proc/{process}/io").read_text().splitlines()
            counters = dict(line.split(": ") for line in lines)
            read, disk = read + int(counters["rchar"]), disk + int(counters["read_bytes"])
        return _Io(read, disk)
    return None


def _bytes_of(batch: Any) -> int:
    return sum(column.nbytes for column in columns_of(batch).values() if isinstance(column, Tensor))


def _endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader
