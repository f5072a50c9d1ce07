"""How fast ranks add tensors up: the time of an all-reduce by size, and its bandwidths as nccl-tests define them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.comm.backend import joined
from paceline.comm.group import Group

SIZES = (2**10, 2**20, 2**24)
_BUDGET_S = 0.25  # per size
_REPEATS = (5, 200)  # at least, at most


@dataclass(frozen=True)
class Speed:
    """An all-reduce of `size_bytes` (fp32, a sum) over `ranks` ranks: `time_s` is the slowest rank's median, after a warm-up."""

    transport: str
    ranks: int
    size_bytes: int
    time_s: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes reduced per second: size / time."""
        return self.size_bytes / self.time_s

    @property
    def bus_bandwidth(self) -> float:
        """What each link has to carry at least, per second: size / time * 2 (n - 1) / n. It can be held against the hardware's rate."""
        return self.algorithm_bandwidth * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Speeds:
    """What the ranks of one launch measured. `note` says why a faster transport was not among them; None where none was missing."""

    speeds: list[Speed]
    note: str | None = None

    @classmethod
    def load(cls, file: Path) -> Speeds:
        """Read what `run_rank` wrote."""
        values = json.loads(file.read_text())
        return cls([Speed(**speed) for speed in values["speeds"]], values["note"])


def run_rank(arguments: list[str]) -> None:
    """Measure every transport that the ranks of this launch have, side by side; rank 0 writes the `Speeds` to the file `arguments[0]`."""
    with joined(deadline_s=60) as group, _beside(group) as others:
        speeds = [measure(each, size) for size in SIZES for each in (*others, group)]
        if group.rank == 0:
            Path(arguments[0]).write_text(json.dumps(asdict(Speeds(speeds, group.transport_note))))
        group.barrier()


def measure(group: Group, size_bytes: int) -> Speed:
    """Time all-reduces of a tensor of `group.empty`. Every rank of the group calls this, and gets the same."""
    tensor = group.empty(size_bytes // 4, torch.float32)
    for _ in range(2):  # the first meets untouched memory, and connections that are still to be made
        one_s = _times_s(group, tensor, 1)
    least, most = _REPEATS
    repeats = min(max(least, int(_BUDGET_S / _slowest(group, one_s))), most)  # as many on every rank
    return Speed(group.transport, group.size, size_bytes, _slowest(group, _times_s(group, tensor, repeats)))


def _times_s(group: Group, tensor: torch.Tensor, repeats: int) -> Sequence[float]:
    wait = torch.cuda.synchronize if group.device.type == "cuda" else lambda: None
    times_s = []
    group.barrier()
    for _ in range(repeats):
        started = time.perf_counter()
        group.all_reduce(tensor)
        wait()
        times_s.append(time.perf_counter() - started)
    return times_s


def _slowest(group: Group, times_s: Sequence[float]) -> float:
    median = torch.tensor([statistics.median(times_s)], dtype=torch.float64, device=group.device)
    group.all_reduce(median, "max")
    return float(median.item())


@contextmanager
def _beside(group: Group) -> Iterator[list[Group]]:
    """The same ranks over gloo, where they talk over shared memory."""
    if group.transport != "shm":
        yield []
        return
    other = Group(group.rank, group.size, dist.new_group(backend="gloo"), deadline_s=group.deadline_s, hosts=group.hosts)
    try:
        yield [other]
    finally:
        other.backend = None  # as `leave` does: whoever holds it keeps its threads alive
