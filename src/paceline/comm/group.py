"""A group of ranks and its collectives: every wait has a deadline, and a failed one names the ranks that are missing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.shm import ShmProcessGroup
from paceline.errors import SyncError

Op = Literal["sum", "mean", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class Group:
    """Some ranks that talk to each other. A group of one rank costs nothing: its collectives return at once.

    Args:
        rank: this rank's place in the group.
        size: ranks in the group.
        backend: torch's process group; None for a group of one.
        store: the rendezvous' key-value store, asked only after a failure, to tell who is missing.
        deadline_s: the longest that a collective may wait.
        hosts: the host index of each rank.
        transport_note: why a faster transport was not taken; None where there is none faster.
    """

    rank: int = 0
    size: int = 1
    backend: dist.ProcessGroup | None = None
    store: Store | None = None
    deadline_s: float = 300.0
    hosts: tuple[int, ...] = (0,)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    transport_note: str | None = None
    bytes_reduced: int = 0  # payload handed to all-reduces so far
    _failures: int = 0

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks sit on more than one host."""
        return len(set(self.hosts)) > 1

    @property
    def transport(self) -> str:
        """What the bytes go over: `shm`, `gloo`, `nccl`, …; `none` in a group of one."""
        return "none" if self.size == 1 else dist.get_backend(self.backend)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros on the group's device, which all ranks must ask for at the same time.

        Where the transport is shared memory it lies there, so that an all-reduce of it moves each byte once; it lives until `release`.
        """
        if isinstance(self.backend, ShmProcessGroup) and self.size > 1:
            with self._named("the start of a shared tensor"):
                shared = self.backend.empty(numel, dtype)
            if shared is not None:
                return shared
            self.transport_note = (
                f"there is no shared memory for a tensor of {numel * dtype.itemsize} bytes; it is copied through smaller parts"
            )
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def release(self, tensor: Tensor) -> None:
        """Let go of a tensor from `empty`."""
        if isinstance(self.backend, ShmProcessGroup):
            self.backend.release(tensor)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Replace `tensor` on every rank by the sum, mean or maximum over the ranks, the same bits everywhere.

        Raises:
            SyncError: a rank is gone, or did not come within the deadline.
        """
        if self.size == 1:
            return
        self.bytes_reduced += tensor.nbytes
        started = time.monotonic()
        try:
            self._reduce(tensor, op, waits=True).wait()
        except RuntimeError as error:
            raise self._explain("all-reduce", time.monotonic() - started, error) from error
        if op == "mean":
            tensor.div_(self.size)

    def start_all_reduce(self, tensor: Tensor, op: Op = "sum") -> Pending:
        """Begin an all-reduce (sum or maximum) and return at once; `wait()` on the result before `tensor` is read."""
        self.bytes_reduced += tensor.nbytes
        return Pending(self, self._reduce(tensor, op, waits=False))

    def _reduce(self, tensor: Tensor, op: Op, *, waits: bool) -> dist.Work:
        """As `dist.all_reduce`, without the checks and the log around it: once a step, with cold caches, they cost as much as the sum."""
        assert self.backend is not None
        return self.backend.allreduce([tensor], _options(op, waits))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Replace `tensor` on every rank by that of rank `root` of the group."""
        if self.size > 1:
            with self._named("broadcast"):
                dist.broadcast(tensor, group_src=root, group=self.backend)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The `rows` of every rank, in rank order. Rank r holds `counts[r]` rows; only dim 0 may differ.

        This rank's own entry is `rows` itself, so gradients flow through it and through no other.
        """
        if self.size == 1:
            return [rows]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in counts]
        with self._named("all-gather"):
            dist.all_gather(parts, padded, group=self.backend)
        gathered = [part[:count] for part, count in zip(parts, counts, strict=True)]
        gathered[self.rank] = rows
        return gathered

    def all_to_all(self, received: Tensor, rows: Tensor, receives: Sequence[int] | None = None, sends: Sequence[int] | None = None) -> None:
        """Rank r gets the next `sends[r]` of this rank's `rows`; what comes from it are the next `receives[r]` of `received`.

        Without numbers, equal shares. Raises SyncError as `all_reduce`.
        """
        with self._named("all-to-all"):
            dist.all_to_all_single(received, rows, receives and list(receives), sends and list(sends), group=self.backend)

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON), in rank order. Nothing is pickled."""
        if self.size == 1:
            return [value]
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        self.all_reduce(lengths)
        return [json.loads(bytes(part.cpu().tolist())) for part in self.gather_rows(data, lengths.tolist())]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_reduce(torch.zeros(1, device=self.device))

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # torch raises DistBackendError and plain RuntimeError for lost peers and time-outs
            raise self._explain(what, time.monotonic() - started, error) from error

    def _explain(self, what: str, waited_s: float, error: RuntimeError) -> SyncError:
        missing = self._missing_ranks()
        if missing is None:
            who = "some rank did not come, or a connection failed"
        else:
            who = f"ranks {missing} did not come" if missing else "every rank came, but a connection failed"
        first_line = str(error).splitlines()[0].partition(". This is typically")[0] if str(error) else type(error).__name__
        return SyncError(
            f"rank {self.rank} waited {waited_s:.1f} s in {what} and {who} (deadline {self.deadline_s:g} s). Look for the first error of "
            f"those ranks; if they are only slow, raise deadline_s. Transport: {first_line}"
        )

    def _missing_ranks(self, patience_s: float = 2.0) -> list[int] | None:
        """The ranks that do not report the same failure within `patience_s`; None where there is no store to ask."""
        if self.store is None:
            return None
        self._failures += 1
        key = f"waiting/{self._failures}/"
        missing = [r for r in range(self.size) if r != self.rank]
        try:
            self.store.set(f"{key}{self.rank}", "here")
            until = time.monotonic() + patience_s
            while missing and time.monotonic() < until:
                missing = [r for r in missing if not self.store.check([f"{key}{r}"])]
                time.sleep(0.05)
        except RuntimeError:  # the store went down with the rank that served it
            return [0] if self.rank else []
        return missing


@cache
def _options(op: Op, waits: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = _OPS[op], not waits  # type: ignore[assignment]  # torch converts it
    return options


@dataclass
class Pending:
    """A collective under way."""

    group: Group
    work: dist.Work

    def wait(self) -> None:
        """Return when the result is there (on CUDA: when the current stream is ordered behind it).

        Raises:
            SyncError: a rank is gone, or did not come within the group's deadline.
        """
        with self.group._named("all-reduce"):
            self.work.wait()
