"""The process group that torch.distributed sees: every call of c10d, mapped to a collective or a message over shared memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Store  # type: ignore[attr-defined]

from paceline.comm.shm.collectives import Collectives
from paceline.comm.shm.mailbox import Inbox, Outbox, Request, receive_from_any
from paceline.comm.shm.profile import start
from paceline.comm.shm.progress import Lane, Operation, Peer, Progress, Steps
from paceline.comm.shm.reduction import Op, Reduction
from paceline.comm.shm.rounds import Rounds
from paceline.comm.shm.segment import Handle, create
from paceline.comm.shm.sparse import all_reduce_sparse
from paceline.comm.shm.work import DONE, ShmWork
from paceline.errors import ClusterError, SyncError

_log = logging.getLogger(__name__)

Options = Any  # torch's options of a collective; each kind is a class of its own


class ShmProcessGroup(dist.ProcessGroup):
    """A process group over memory that the processes of one host share. CPU tensors of any dtype, contiguous or not.

    Made by `torch.distributed`, once `paceline.comm.shm` is imported: `dist.init_process_group("shm")`, `dist.new_group(backend="shm")`.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # not the form with a store, which makes it a group of torch's own  # type: ignore[call-arg]
        self._name, self._description = name, "undefined"
        self._timeout_s = timeout.total_seconds()
        self._progress = _Shared.get(size)
        self._rounds = Rounds(store, rank, size, self._progress, self._timeout_s)
        self._collectives = Collectives(self._rounds)
        self._lane = Lane()
        self._sending: dict[int, tuple[Outbox, Lane]] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._closed = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor of zeros in shared memory, of which every rank gets one; all must ask for it at the same time.

        Reductions of it, or of contiguous parts of it that are at the same place on all ranks, move each byte once.
        It lives until `release`, or the end of the group. None on every rank where one of them is refused the memory.
        """
        own = None
        try:
            own = create(max(64, -(-numel * dtype.itemsize // 64) * 64), "tensor")
        except ClusterError as error:
            _log.warning("%s", error)
        try:
            mine = torch.frombuffer(bytearray((own.handle.to_bytes() if own else b"").ljust(256)), dtype=torch.uint8)
            handles = [torch.empty_like(mine) for _ in range(self.size())]
            self.allgather([handles], [mine]).wait()
            found = [bytes(handle.tolist()).strip() for handle in handles]
            if own is None or not all(found):
                return None
            arena = self._rounds.add_arena(own, [Handle.from_bytes(handle) for handle in found])
            self.barrier().wait()  # all have mapped it
        finally:
            if own is not None:
                own.close_door()
        return arena.segments[self.rank()].bytes[: numel * dtype.itemsize].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Let go of the shared memory that a tensor from `empty` lies in; it ends when all ranks have, and no view is left."""
        if self._closed:
            return
        number, _ = self._rounds.place_of(tensor, tensor.nbytes)
        self._rounds.arenas.pop(number, None)
        self._collectives.forget(number)

    # Collectives

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Options = None) -> dist.Work:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return self._start("all_reduce", lambda: self._all_reduce(tensors, op), opts, tensors, list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Options = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def _all_reduce(self, tensors: Sequence[Tensor], op: Op) -> Steps:
        for tensor in tensors:
            if tensor.is_sparse:
                yield from all_reduce_sparse(self._collectives, tensor, op)
                continue
            flat = _flat(tensor)
            yield from self._collectives.all_reduce(flat, Reduction.of(op, tensor.dtype, self._collectives.size))
            _put_back(flat, tensor)

    def reduce(self, tensors: Sequence[Tensor], opts: Options) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            for tensor in tensors:
                flat = _flat(tensor)
                yield from self._collectives.reduce(flat, Reduction.of(opts.reduceOp, tensor.dtype, self.size()), opts.rootRank)
                if self.rank() == opts.rootRank:
                    _put_back(flat, tensor)

        return self._start("reduce", steps, opts, tensors, list(tensors))

    def broadcast(self, tensors: Sequence[Tensor], opts: Options) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            for tensor in tensors:
                flat = _flat(tensor)
                yield from self._collectives.broadcast(flat, opts.rootRank)
                if self.rank() != opts.rootRank:
                    _put_back(flat, tensor)

        return self._start("broadcast", steps, opts, tensors, list(tensors))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options = None) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            for targets, tensor in zip(outputs, inputs, strict=True):
                _check_count("all_gather", len(targets), self.size())
                _check_sizes("all_gather", targets, tensor)
                flats = [_flat(target) for target in targets]
                yield from self._collectives.all_gather(flats, _flat(tensor))
                _put_all_back(flats, targets)

        return self._start("all_gather", steps, opts, inputs, [list(targets) for targets in outputs])

    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options = None) -> dist.Work:
        by_input = list(zip(*outputs, strict=True))
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Options = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None) -> dist.Work:
        def steps() -> Steps:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = _flat(output)
                _check_count("all_gather", flat.numel(), self.size() * tensor.numel())
                yield from self._collectives.all_gather(flat.chunk(self.size()) if flat.numel() else [flat] * self.size(), _flat(tensor))
                _put_back(flat, output)

        return self._start("all_gather", steps, opts, inputs, list(outputs))

    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            targets = outputs[0] if self.rank() == opts.rootRank else []
            _check_sizes("gather", targets, inputs[0])
            flats = [_flat(target) for target in targets]
            yield from self._collectives.gather(flats, _flat(inputs[0]), opts.rootRank)
            _put_all_back(flats, targets)

        return self._start("gather", steps, opts, inputs, [list(targets) for targets in outputs])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Options) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            sources = inputs[0] if self.rank() == opts.rootRank else []
            _check_sizes("scatter", sources, outputs[0])
            flat = _flat(outputs[0])
            yield from self._collectives.scatter(flat, [_flat(source) for source in sources], opts.rootRank)
            _put_back(flat, outputs[0])

        return self._start("scatter", steps, opts, chain(*inputs), list(outputs))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Options = None) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            for output, sources in zip(outputs, inputs, strict=True):
                yield from self._reduce_scatter(output, [_flat(source) for source in sources], opts)

        return self._start("reduce_scatter", steps, opts, chain(*inputs), list(outputs))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Options = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None) -> dist.Work:
        def steps() -> Steps:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = _flat(tensor)
                _check_count("reduce_scatter", flat.numel(), self.size() * output.numel())
                yield from self._reduce_scatter(output, flat.chunk(self.size()) if flat.numel() else [flat] * self.size(), opts)

        return self._start("reduce_scatter", steps, opts, inputs, list(outputs))

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], opts: Options) -> Steps:
        _check_count("reduce_scatter", len(sources), self.size())
        _check_sizes("reduce_scatter", sources, output)
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        flat = _flat(output)
        yield from self._collectives.reduce_scatter(flat, sources, Reduction.of(op, output.dtype, self.size()))
        _put_back(flat, output)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None) -> dist.Work:
        def steps() -> Steps:
            flats = [_flat(output) for output in outputs]
            yield from self._collectives.all_to_all(flats, [_flat(tensor) for tensor in inputs])
            _put_all_back(flats, outputs)

        return self._start("all_to_all", steps, opts, inputs, list(outputs))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Options = None
    ) -> dist.Work:
        def steps() -> Steps:
            flat, source = _flat(output), _flat(tensor)
            targets, sources = _rows(flat, output, output_sizes, self.size()), _rows(source, tensor, input_sizes, self.size())
            yield from self._collectives.all_to_all(targets, sources)
            _put_back(flat, output)

        return self._start("all_to_all", steps, opts, [tensor], [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Options = None) -> dist.Work:
        return self._start("barrier", lambda: self._collectives.barrier(), opts, [], [])

    # Messages

    def send(self, tensors: Sequence[Tensor], receiver: int, tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        outbox, lane = self._sending.get(receiver) or self._sending.setdefault(receiver, (Outbox(self._rounds, receiver), Lane()))
        return self._launch(lane, "send", f"send to rank {receiver}", outbox.send(_flat(tensor), tag), outbox.waits_for, [tensor])

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        inbox, flat = self._inbox(sender), _flat(tensor)

        def steps() -> Steps:
            request = Request(tag, flat.view(torch.uint8))
            inbox.request(request)  # here, where no other thread is at the inbox
            yield from inbox.receive(request)
            _put_back(flat, tensor)
            return sender

        return self._launch(Lane(), "recv", f"receive from rank {sender}", steps(), inbox.waits_for, [tensor])

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        inboxes, flat = [self._inbox(r) for r in range(self.size()) if r != self.rank()], _flat(tensor)

        def steps() -> Steps:
            sender = yield from receive_from_any(inboxes, Request(tag, flat.view(torch.uint8)))
            _put_back(flat, tensor)
            return sender

        def waits_for() -> list[Peer]:  # one that lives can still send
            silent = [peer for inbox in inboxes for peer in inbox.waits_for()]
            return silent if len(silent) == len(inboxes) and all(peer.is_gone() for peer in silent) else []

        return self._launch(Lane(), "recvAnySource", "receive from any rank", steps(), waits_for, [tensor])

    def _inbox(self, sender: int) -> Inbox:
        return self._inboxes.get(sender) or self._inboxes.setdefault(sender, Inbox(self._rounds, sender))

    # How they are run

    def _start(self, what: str, steps: Callable[[], Steps], opts: Options, inputs: Iterable[Tensor], result: list[Any]) -> dist.Work:
        self._check_open()
        waits = getattr(opts, "asyncOp", True)
        timeout = getattr(opts, "timeout", None)
        deadline_s = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else self._timeout_s
        operation = Operation(what, steps(), deadline_s, self._rounds.missing)
        start(self._progress, self._lane, operation, self.getBackendName(), what, inputs)
        if waits:
            return ShmWork(self._progress, operation, result)
        self._progress.wait(operation)
        return DONE

    def _launch(
        self, lane: Lane, title: str, what: str, steps: Steps, waits_for: Callable[[], list[Peer]], result: list[Tensor]
    ) -> dist.Work:
        operation = Operation(what, steps, self._timeout_s, waits_for)
        start(self._progress, lane, operation, self.getBackendName(), title, result)
        return ShmWork(self._progress, operation, result)

    def _check_open(self) -> None:
        if self._closed:
            raise SyncError("this process group was destroyed")

    # What torch asks of a group

    def shutdown(self) -> None:
        """Let go of the shared memory."""
        if not self._closed:
            self._closed = True
            # torch's own caches may keep this object for as long as the process lives.
            del self._collectives, self._rounds, self._progress
            self._sending.clear()
            self._inboxes.clear()
            _Shared.release()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """The longest that a collective or message may take from now on."""
        self._timeout_s = timeout.total_seconds()

    def getBackendName(self) -> str:
        return "shm"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description


class _Shared:
    """The one `Progress` of this process, from its first group to its last."""

    lock = threading.Lock()
    progress: Progress | None = None
    users = 0

    @classmethod
    def get(cls, ranks: int) -> Progress:
        with cls.lock:
            if cls.progress is None:
                cls.progress = Progress()
            cls.users += 1
            cls.progress.expect(ranks)
            return cls.progress

    @classmethod
    def release(cls) -> None:
        with cls.lock:
            cls.users -= 1
            if cls.users == 0 and cls.progress is not None:
                cls.progress.close()
                cls.progress = None


def _flat(tensor: Tensor) -> Tensor:
    """All of it in one dimension: the tensor's own memory where that is contiguous, else a copy."""
    if tensor.device.type != "cpu":
        raise ValueError(f"the backend shm moves tensors of the CPU; this one is on {tensor.device}. For GPUs there is nccl.")
    flat = tensor.detach().contiguous()
    # Not `reshape`, whose result may have gaps, nor `view`, which keeps the stride of a single element.
    return flat.as_strided((flat.numel(),), (1,))


def _put_back(flat: Tensor, tensor: Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _put_all_back(flats: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for flat, tensor in zip(flats, tensors, strict=True):
        _put_back(flat, tensor)


def _rows(flat: Tensor, tensor: Tensor, counts: Sequence[int], ranks: int) -> list[Tensor]:
    """A flat tensor cut by rows of dim 0 for each rank; equally where no counts are given."""
    if not counts:
        _check_divides(tensor, ranks)
        return list(flat.chunk(ranks)) if flat.numel() else [flat] * ranks
    if sum(counts) != tensor.shape[0]:
        raise ValueError(f"all_to_all: the sizes {list(counts)} are of {sum(counts)} rows, but the tensor has {tensor.shape[0]}")
    row = flat.numel() // max(1, tensor.shape[0])
    return list(flat.split([count * row for count in counts]))


def _check_divides(tensor: Tensor, ranks: int) -> None:
    if tensor.dim() and tensor.shape[0] % ranks:
        raise ValueError(f"all_to_all: {tensor.shape[0]} rows cannot be dealt evenly to {ranks} ranks; give the sizes")


def _check_sizes(what: str, of_ranks: Sequence[Tensor], own: Tensor) -> None:
    for rank, tensor in enumerate(of_ranks):
        if tensor.numel() * tensor.element_size() != own.numel() * own.element_size():
            sizes = " and ".join(f"{t.numel()} {t.dtype}".replace("torch.", "") for t in (own, tensor))
            raise ValueError(f"{what}: this rank's tensor and that for rank {rank} must have the same size, not {sizes}")


def _check_count(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"{what} needs {wanted} for this group, but got {found}")
