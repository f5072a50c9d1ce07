"""Limits of a loader: the speed of the disk, and of decoding on all cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from paceline.data.samples import RequestedSamples
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.job.samples import DataSets
from paceline.run.data_view import loader_alone
from paceline.stats import Interval, median_interval
from paceline.storage.url import is_url
from paceline_lab.loading.loader_speed import ROUNDS

_MOST_FILES = 100_000  # largest number of files that are measured
_BLOCK = 1 << 20
_MOST_BYTES = 256 << 20  # largest number of bytes that a round reads
_FROM_DISK = 0.9  # a measurement counts as one of the disk if at least this share of the bytes came from the disk


@dataclass(frozen=True)
class DiskLimit:
    """Speed of reading the job's files sequentially.

    Attributes:
        bytes_per_s: bytes per second; None if the speed was not measured.
        cached: whether the bytes came from the page cache, because the system did not evict them.
        about: description of the files, or the reason for not measuring.
        file_bytes, mapped: size of all files, and whether this process maps one of them into its memory.
    """

    bytes_per_s: Interval | None
    about: str
    cached: bool = False
    file_bytes: int = 0
    mapped: bool = False


@dataclass(frozen=True)
class DecoderLimit:
    """Speed of one process that reads samples from the page cache and collates them.

    Attributes:
        samples_per_s: samples per second of one process; None if the speed was not measured.
        why: reason for not measuring.
    """

    samples_per_s: Interval | None
    why: str = ""


def disk_limit(job: Job, seconds: float) -> DiskLimit:
    """Measure sequential reads of the job's files, bypassing the page cache if possible."""
    sources = list(_sources(job.data))
    local = [source for source in sources if not is_url(source)]
    files = list(islice((file for source in local for file in _files_of(Path(source))), _MOST_FILES))
    if not files:
        if sources and not local:
            return DiskLimit(None, "the files are at a URL")
        return DiskLimit(None, "this data names no files")
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    rates, from_disk, read_all = [], 0, 0
    for number in range(ROUNDS):
        # each round begins at another file, so that it does not read files that the previous round has cached
        first = number * len(files) // ROUNDS
        read, taken, disk = _read(files[first:] + files[:first], seconds / ROUNDS)
        if read and taken:
            rates.append(read / taken)
            from_disk, read_all = from_disk + disk, read_all + read
    if not rates:
        return DiskLimit(None, "the files are empty")
    cached = from_disk < _FROM_DISK * read_all
    about = f"{len(files):,} file{'s' if len(files) > 1 else ''}"
    return DiskLimit(median_interval(rates), about, cached, total, _is_mapped(files))


def decoder_limit(job: Job, data: DataSets, seconds: float) -> DecoderLimit:
    """Measure how fast one thread reads the same batches again and again."""
    loader = loader_alone(job, data)
    partition = loader.partition
    if not isinstance(partition, Partition):
        return DecoderLimit(None, "a stream cannot be read twice")
    reader, threads = RequestedSamples(data.train, None, 0, job.seed), torch.get_num_threads()
    reader.begin_epoch(0)
    torch.set_num_threads(1)  # as in a loader process
    try:
        known, until = [], time.perf_counter() + seconds / (ROUNDS + 1)
        for step, indices in enumerate(partition.batches(0)):
            reader.read(indices, (0, step))
            known.append((indices, (0, step)))
            if time.perf_counter() > until:
                break
        rates = []
        for _ in range(ROUNDS):
            samples, started = 0, time.perf_counter()
            while time.perf_counter() < started + seconds / (ROUNDS + 1):
                for indices, at in known:
                    reader.read(indices, at)
                    samples += len(indices)
            rates.append(samples / (time.perf_counter() - started))
    finally:
        torch.set_num_threads(threads)
        loader.close()
    return DecoderLimit(median_interval(rates))


def _sources(spec: Any) -> Iterator[str]:
    """Yield the paths and URLs of the training data, including those of a mixture's sources."""
    for source in getattr(spec, "sources", {}).values():
        yield from _sources(source)
    paths = getattr(spec, "path", None)
    if paths is not None:
        yield from map(str, paths if isinstance(paths, (tuple, list)) else (paths,))


def _files_of(path: Path) -> Iterator[Path]:
    """Yield the files of a path, folder or glob; hidden files of folders are skipped."""
    if path.is_file():
        yield path
    elif path.is_dir():
        for place, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(place) / name for name in sorted(names) if not name.startswith("."))
    else:
        for found in sorted(glob(str(path), recursive=True)):
            if Path(found) != path:
                yield from _files_of(Path(found))


def _read(files: Sequence[Path], seconds: float) -> tuple[int, float, int]:
    """Read files until time is up; return bytes, seconds, and bytes from the disk."""
    buffer = bytearray(_BLOCK)
    read, taken, before = 0, 0.0, _disk_bytes()
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            with suppress(OSError):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            while (count := opened.readinto(buffer)) and taken + time.perf_counter() - started < seconds:
                read += count
                if read >= _MOST_BYTES:
                    break
            taken += time.perf_counter() - started
        if taken >= seconds or read >= _MOST_BYTES:
            break
    return read, taken, _disk_bytes() - before


def _disk_bytes() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes"):
                return int(line.split(": ")[1])
    return 0


def _is_mapped(files: Sequence[Path]) -> bool:
    names = {str(file.resolve()) for file in files}
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        return any(line.split(maxsplit=5)[5] in names for line in maps if len(line.split(maxsplit=5)) == 6)
    return False
