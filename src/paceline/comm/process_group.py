"""Base class of paceline's process groups, which maps c10d's calls to a transport's collectives."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import _profiler_enabled, _record_function_with_args_enter, _record_function_with_args_exit
from torch.distributed import BarrierOptions, ReduceOp

from paceline.comm.operation import DONE, Awaited, DrivenWork, Driver, Operation, OperationQueue, Steps
from paceline.errors import SyncError
from paceline.job.spec import load_object
from paceline.planning.sync_info import TRANSPORTS

Options = Any  # torch's options of a collective; each kind of collective has a separate class
MessageSteps = tuple[OperationQueue, Steps, Callable[[], Sequence[Awaited]]]
LAST_WORD_S = 1.0  # time for a failure notice to reach the other ranks


def abort_all(last_word_s: float = LAST_WORD_S) -> None:
    """End all groups of this process, after this rank has failed.

    The call does not wait for other ranks, which may be gone. Pending messages to other ranks get `last_word_s`
    seconds.
    """
    until = time.monotonic() + last_word_s
    for group in list(_open):
        group.end_within(max(0.0, until - time.monotonic()))


_open: weakref.WeakSet[DrivenProcessGroup] = weakref.WeakSet()


class DrivenProcessGroup(dist.ProcessGroup):
    """Process group whose collectives are generators that a `Driver` advances.

    The group supports CPU tensors of any dtype, contiguous or not.

    A transport's subclass adds the steps of messages, `getBackendName` and `shutdown`.
    """

    def __init__(
        self, rank: int, size: int, timeout: timedelta, name: str, progress: Driver, collectives: Collectives
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # not the form with a store, which makes it a group of torch's own
        self._name, self._description = name, "undefined"
        self._timeout_s = timeout.total_seconds()
        self._progress, self._collectives = progress, collectives
        self._operations = OperationQueue()
        self._closed = False
        self.entered = 0  # number of collectives that this rank has entered
        _open.add(self)

    # Collectives

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Options = None) -> dist.Work:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return self._start("all_reduce", self._all_reduce(tensors, op), opts, tensors, list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Options = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def _all_reduce(self, tensors: Sequence[Tensor], op: Op) -> Steps:
        for tensor in tensors:
            if tensor.is_sparse:
                yield from all_reduce_sparse(self._collectives, tensor, op)
                continue
            flat = flattened(tensor)
            yield from self._collectives.all_reduce(flat, Reduction.of(op, tensor.dtype, self._collectives.size))
            put_back(flat, tensor)

    def reduce(self, tensors: Sequence[Tensor], opts: Options) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            for tensor in tensors:
                flat = flattened(tensor)
                yield from self._collectives.reduce(
                    flat, Reduction.of(opts.reduceOp, tensor.dtype, self.size()), opts.rootRank
                )
                if self.rank() == opts.rootRank:
                    put_back(flat, tensor)

        return self._start("reduce", steps(), opts, tensors, list(tensors))

    def broadcast(self, tensors: Sequence[Tensor], opts: Options) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            for tensor in tensors:
                flat = flattened(tensor)
                yield from self._collectives.broadcast(flat, opts.rootRank)
                if self.rank() != opts.rootRank:
                    put_back(flat, tensor)

        return self._start("broadcast", steps(), opts, tensors, list(tensors))

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options = None
    ) -> dist.Work:
        def steps() -> Steps:
            for targets, tensor in zip(outputs, inputs, strict=True):
                _check_count("all_gather", len(targets), self.size())
                _check_sizes("all_gather", targets, tensor)
                flats = [flattened(target) for target in targets]
                yield from self._collectives.all_gather(flats, flattened(tensor))
                _put_all_back(flats, targets)

        return self._start("all_gather", steps(), opts, inputs, [list(targets) for targets in outputs])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options = None
    ) -> dist.Work:
        by_input = list(zip(*outputs, strict=True))
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Options = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> dist.Work:
        def steps() -> Steps:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = flattened(output)
                _check_count("all_gather", flat.numel(), self.size() * tensor.numel())
                yield from self._collectives.all_gather(
                    flat.chunk(self.size()) if flat.numel() else [flat] * self.size(), flattened(tensor)
                )
                put_back(flat, output)

        return self._start("all_gather", steps(), opts, inputs, list(outputs))

    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            targets = outputs[0] if self.rank() == opts.rootRank else []
            _check_sizes("gather", targets, inputs[0])
            flats = [flattened(target) for target in targets]
            yield from self._collectives.gather(flats, flattened(inputs[0]), opts.rootRank)
            _put_all_back(flats, targets)

        return self._start("gather", steps(), opts, inputs, [list(targets) for targets in outputs])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Options) -> dist.Work:  # type: ignore[override]
        def steps() -> Steps:
            sources = inputs[0] if self.rank() == opts.rootRank else []
            _check_sizes("scatter", sources, outputs[0])
            flat = flattened(outputs[0])
            yield from self._collectives.scatter(flat, [flattened(source) for source in sources], opts.rootRank)
            put_back(flat, outputs[0])

        return self._start("scatter", steps(), opts, chain(*inputs), list(outputs))

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Options = None
    ) -> dist.Work:
        def steps() -> Steps:
            for output, sources in zip(outputs, inputs, strict=True):
                yield from self._reduce_scatter(output, [flattened(source) for source in sources], opts)

        return self._start("reduce_scatter", steps(), opts, chain(*inputs), list(outputs))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Options = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> dist.Work:
        def steps() -> Steps:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = flattened(tensor)
                _check_count("reduce_scatter", flat.numel(), self.size() * output.numel())
                yield from self._reduce_scatter(
                    output, flat.chunk(self.size()) if flat.numel() else [flat] * self.size(), opts
                )

        return self._start("reduce_scatter", steps(), opts, inputs, list(outputs))

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _reduce_scatter(self, output: Tensor, sources: Sequence[Tensor], opts: Options) -> Steps:
        _check_count("reduce_scatter", len(sources), self.size())
        _check_sizes("reduce_scatter", sources, output)
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        flat = flattened(output)
        yield from self._collectives.reduce_scatter(flat, sources, Reduction.of(op, output.dtype, self.size()))
        put_back(flat, output)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None) -> dist.Work:
        def steps() -> Steps:
            flats = [flattened(output) for output in outputs]
            yield from self._collectives.all_to_all(flats, [flattened(tensor) for tensor in inputs])
            _put_all_back(flats, outputs)

        return self._start("all_to_all", steps(), opts, inputs, list(outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Options = None,
    ) -> dist.Work:
        def steps() -> Steps:
            flat, source = flattened(output), flattened(tensor)
            targets, sources = (
                _rows(flat, output, output_sizes, self.size()),
                _rows(source, tensor, input_sizes, self.size()),
            )
            yield from self._collectives.all_to_all(targets, sources)
            put_back(flat, output)

        return self._start("all_to_all", steps(), opts, [tensor], [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Options = None) -> dist.Work:
        self._check_open()
        return self._start("barrier", self._collectives.barrier(), opts, [], [])

    # Messages

    def send(self, tensors: Sequence[Tensor], receiver: int, tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        queue, steps, waits_for = self._sending(receiver, flattened(tensor), tag)
        return self._launch(queue, "send", f"send to rank {receiver}", steps, waits_for, tensor)

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int) -> dist.Work:
        return self._receive("recv", f"rank {sender}", tensors, sender, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        return self._receive("recvAnySource", "any rank", tensors, None, tag)

    def _receive(self, title: str, whom: str, tensors: Sequence[Tensor], sender: int | None, tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        flat = flattened(tensor)
        queue, receiving, waits_for = self._receiving(sender, flat, tag)

        def steps() -> Steps:
            source = yield from receiving
            put_back(flat, tensor)
            return source

        return self._launch(queue, title, f"receive from {whom}", steps(), waits_for, tensor)

    def _sending(self, receiver: int, flat: Tensor, tag: int) -> MessageSteps:
        """Return a queue, steps that send a flat tensor, and a function for awaited peers."""
        raise NotImplementedError

    def _receiving(self, sender: int | None, flat: Tensor, tag: int) -> MessageSteps:
        """Return a queue, steps that receive a tensor, and a function for awaited peers.

        The steps return the sender. `sender=None` receives from any rank.
        """
        raise NotImplementedError

    # Execution

    def _start(self, what: str, steps: Steps, opts: Options, inputs: Iterable[Tensor], result: list[Any]) -> dist.Work:
        """Start a collective, and wait for it if torch's options require it."""
        self._check_open()
        timeout = getattr(opts, "timeout", None)
        deadline_s = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else self._timeout_s
        self.entered += 1
        waits_for = self._collectives.waits_for
        operation = Operation(what, steps, deadline_s, waits_for, self, self.entered, result)
        self._begin(self._operations, operation, what, inputs)
        if getattr(opts, "asyncOp", True):
            return DrivenWork(self._progress, operation, result)
        self._progress.wait(operation)
        return DONE

    def _launch(
        self,
        queue: OperationQueue,
        title: str,
        what: str,
        steps: Steps,
        waits_for: Callable[[], Sequence[Awaited]],
        tensor: Tensor,
    ) -> dist.Work:
        operation = Operation(what, steps, self._timeout_s, waits_for, self, 0, [tensor])
        self._begin(queue, operation, title, [tensor])
        return DrivenWork(self._progress, operation, [tensor])

    def _begin(self, queue: OperationQueue, operation: Operation, title: str, tensors: Iterable[Tensor]) -> None:
        """Start an operation, and record the tensors' shapes in this thread's profiler."""
        if not _profiler_enabled():
            self._progress.start(queue, operation)
            return
        event = _record_function_with_args_enter(f"{self.getBackendName()}:{title}", *tensors)
        self._progress.start(queue, operation)
        # the event ends with the operation, not with this call
        self._progress.call_when_done(operation, lambda: _record_function_with_args_exit(event))

    def end_within(self, seconds: float) -> None:
        """End the group of a failed rank; pending messages to other ranks get `seconds`."""
        self.abort()

    def _check_open(self) -> None:
        if self._closed:
            raise SyncError("ranks.group_destroyed", "this process group was destroyed")

    # Interface that torch requires

    # torch asks a group for a device's backend, and the backend for its features. This group is also the backend.
    supports_coalescing = supports_reconfigure = supports_shrinking = supports_splitting = False
    supports_time_estimate = supports_window = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    _get_backend = get_backend

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False, because torch allocates the tensors that it sends."""
        return False

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        options = BarrierOptions()
        options.timeout, options.asyncOp = timeout, False
        self.barrier(options)

    def name(self) -> str:
        return self.getBackendName()

    def getBackendName(self) -> str:
        raise NotImplementedError("each transport has a name")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description


def flattened(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a contiguous tensor, or a 1-D copy of another tensor."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"this backend moves tensors of the CPU; this one is on {tensor.device}. "
            "Accelerators have a library of their own."
        )
    flat = tensor.detach().contiguous()
    # Not `reshape`, whose result may have gaps, nor `view`, which keeps the stride of a single element.
    return flat.as_strided((flat.numel(),), (1,))


def put_back(flat: Tensor, tensor: Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _put_all_back(flats: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for flat, tensor in zip(flats, tensors, strict=True):
        put_back(flat, tensor)


def _rows(flat: Tensor, tensor: Tensor, counts: Sequence[int], ranks: int) -> list[Tensor]:
    """Split a flat tensor into rows for each rank; evenly if there are no counts."""
    if not counts:
        _check_divides(tensor, ranks)
        return list(flat.chunk(ranks)) if flat.numel() else [flat] * ranks
    if sum(counts) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all: the sizes {list(counts)} add up to {sum(counts)} rows, but the tensor has {tensor.shape[0]}"
        )
    row = flat.numel() // max(1, tensor.shape[0])
    return list(flat.split([count * row for count in counts]))


def _check_divides(tensor: Tensor, ranks: int) -> None:
    if tensor.dim() and tensor.shape[0] % ranks:
        raise ValueError(
            f"all_to_all: {tensor.shape[0]} rows cannot be divided evenly among {ranks} ranks. Pass the sizes."
        )


def different_calls(first: str, other: str) -> SyncError:
    """Return the error for two ranks that make different calls."""
    return SyncError(
        "ranks.calls_differ",
        "the ranks made different calls: {first}, {other}. Every rank of a group must make the same calls in the "
        "same order, with tensors of the same type and size.",
        first=first,
        other=other,
    )


def _check_sizes(what: str, of_ranks: Sequence[Tensor], own: Tensor) -> None:
    for rank, tensor in enumerate(of_ranks):
        if tensor.numel() * tensor.element_size() != own.numel() * own.element_size():
            sizes = " and ".join(f"{t.numel()} {t.dtype}".replace("torch.", "") for t in (own, tensor))
            raise ValueError(
                f"{what}: this rank's tensor and the tensor for rank {rank} must have the same size, not {sizes}"
            )


def _check_count(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"{what} needs {wanted} for this group, but got {found}")


_BINARY: dict[ReduceOp.RedOpType, tuple[str, Callable[..., Tensor]]] = {
    ReduceOp.SUM: ("sum", torch.add),
    ReduceOp.AVG: ("mean", torch.add),
    ReduceOp.PRODUCT: ("product", torch.mul),
    ReduceOp.MIN: ("min", torch.minimum),
    ReduceOp.MAX: ("max", torch.maximum),
    ReduceOp.BAND: ("and", torch.bitwise_and),
    ReduceOp.BOR: ("or", torch.bitwise_or),
    ReduceOp.BXOR: ("xor", torch.bitwise_xor),
}


Op = Any  # torch's ReduceOp, or a member of its enum


class Reduction:
    """Operation that combines the tensors of several ranks."""

    @classmethod
    def of(cls, op: Op, dtype: torch.dtype, size: int) -> Reduction:
        """Return the reduction that torch's `op` names.

        Raises:
            ValueError: the operation is not supported.
        """
        return _reduction(getattr(op, "op", op), dtype, size)

    def __init__(self, kind: ReduceOp.RedOpType, dtype: torch.dtype, size: int) -> None:
        if kind not in _BINARY:
            raise ValueError(
                f"{kind} is not offered between CPUs; there are {', '.join(n for n, _ in _BINARY.values())}"
            )
        self.name, self._binary = _BINARY[kind]
        self._divisor = size if self.name == "mean" else 0
        self._whole = not (dtype.is_floating_point or dtype.is_complex)
        # torch has no arithmetic for 8-bit floating point, so it is done in fp32 and rounded once.
        self._through = torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else None

    def into(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Reduce the `parts` of all ranks, in rank order, into `out`.

        `out` may be the same tensor as the first part.
        """
        if self._through is not None:
            out.copy_(self._scaled(self._wide(parts)))
        else:
            self.add(out, parts)
            if self._divisor:
                self._scaled(out)

    def add(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Reduce the parts of some ranks into `out`.

        For a mean, the result is a sum, which `scale` divides later.
        """
        if self._through is not None:
            out.copy_(self._wide(parts))
        elif len(parts) == 1:
            if out is not parts[0]:
                out.copy_(parts[0])
        else:
            self._binary(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self._binary(out, part, out=out)

    def scale(self, total: Tensor) -> None:
        """For a mean, divide a sum over all ranks by the number of ranks."""
        if self._divisor and self._through is not None:
            total.copy_(self._scaled(total.to(self._through)))
        else:
            self._scaled(total)

    def _wide(self, parts: Sequence[Tensor]) -> Tensor:
        wide = parts[0].to(self._through)
        for part in parts[1:]:
            self._binary(wide, part.to(self._through), out=wide)
        return wide

    def _scaled(self, total: Tensor) -> Tensor:
        if self._divisor:
            total.div_(self._divisor, rounding_mode="trunc" if self._whole else None)
        return total


_reduction = cache(Reduction)


class Collectives(Protocol):
    """Collectives of one group, on flat and contiguous tensors.

    The process group copies other tensors first. Each collective is a generator that yields while it waits. Results of
    reductions have the same bits on every rank.
    """

    rank: int
    size: int

    def waits_for(self) -> Sequence[Awaited]:
        """Return the peers that the current collective waits for."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Steps:
        """Replace `tensor` with the reduction over all ranks."""

    def reduce(self, tensor: Tensor, reduction: Reduction, root: int) -> Steps:
        """Replace `tensor` on rank `root` with the reduction over all ranks."""

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Replace `tensor` with the tensor of rank `root`."""

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        """Give every rank the tensors of all ranks."""

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
        """Give rank `root` the tensors of all ranks; other ranks pass no outputs."""

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> Steps:
        """Send `tensors[r]` of rank `root` to each rank r; other ranks pass no tensors."""

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Steps:
        """Give rank r the reduction of all ranks' `inputs[r]`, each of `output`'s size."""

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        """Send `inputs[r]` to each rank r, and receive `outputs[r]` from rank r.

        The sizes may differ between pairs of ranks.
        """

    def barrier(self) -> Steps:
        """Wait until all ranks have arrived."""


def all_reduce_sparse(collectives: Collectives, tensor: Tensor, op: Op) -> Steps:
    """Replace a sparse tensor with the sum over all ranks.

    Raises:
        ValueError: the reduction is not a sum.
    """
    if op != ReduceOp.SUM:
        raise ValueError(f"sparse tensors can only be summed, not {op}")
    own, size = tensor.detach().coalesce(), collectives.size
    message = rows_to_send(own)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    yield from collectives.all_gather(counts, torch.tensor([len(message)]))
    padded = message.new_zeros(max(map(int, counts)), message.shape[1])
    padded[: len(message)] = message
    parts = [torch.empty_like(padded) for _ in range(size)]
    yield from collectives.all_gather([part.view(-1) for part in parts], padded.view(-1))
    total = sum_of_rows([part[: int(count)] for part, count in zip(parts, counts, strict=True)], own)
    with torch.no_grad():
        tensor.copy_(total)  # not of `tensor.detach()`, which keeps the old indices and values when they are replaced


def rows_to_send(own: Tensor) -> Tensor:
    """Return a sparse tensor's n indices and values as bytes, shape (n, bytes)."""
    values = own._values().reshape(own._nnz(), math.prod(own._values().shape[1:]))
    return torch.cat([_packed(own._indices().t()).view(torch.uint8), _packed(values).view(torch.uint8)], 1)


def sum_of_rows(of_ranks: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the coalesced sum of all ranks' rows (see `rows_to_send`), added in rank order.

    Args:
        like: a sparse tensor with the shape and dtype of the sum.
    """
    rows, index_bytes = torch.cat(list(of_ranks)), 8 * like.sparse_dim()
    indices = _packed(rows[:, :index_bytes]).view(torch.int64).t()
    values = _packed(rows[:, index_bytes:]).view(like.dtype).view(len(rows), *like._values().shape[1:])
    return added_up(indices, values, like.shape)


def _packed(rows: Tensor) -> Tensor:
    """Return a copy that can be viewed as any dtype."""
    # torch treats a tensor of one row as contiguous with any stride
    return rows.clone(memory_format=torch.contiguous_format)


def added_up(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Create a coalesced sparse tensor; values with equal indices are added in order."""
    make = partial(torch.sparse_coo_tensor, size=shape, check_invariants=False)
    of_rows = len(indices) == 1 and values.dim() == 2 and values.dtype in (torch.float32, torch.float64)
    if not (of_rows and values.is_cpu and len(values)):
        return make(indices, values).coalesce()
    # like `coalesce`, with one vectorized pass over the values
    ascending, order = indices[0].sort(stable=True)
    once, counts = ascending.unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    return make(once[None], F.embedding_bag(order, values, first, mode="sum"), is_coalesced=True)


class Transport:
    """Transport of a `Group`; this base class is for torch's own process groups.

    A process group that allocates its own memory provides an instance of a subclass as its attribute `transport`.

    Attributes:
        name: name in a plan (`shm`, `tcp`, `gloo`), or torch's name of an accelerator's backend.
        shares_memory: True if tensors from `empty` are in memory that all ranks share.
        unauthenticated: number of connections without the run's key that this rank has rejected so far.
    """

    shares_memory = False
    unauthenticated = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Allocate zeros in the transport's memory, or return None.

        All ranks must call this method together.
        """
        return None

    def release(self, tensor: Tensor) -> None:
        """Free a tensor that `empty` returned."""

    def prepared_sum(self, tensor: Tensor) -> Callable[[], None] | None:
        """Return a function that sums a flat tensor over the ranks faster than an all-reduce.

        The result is None if the transport has no faster sum.
        """
        return None

    def place_of(self, tensor: Tensor) -> tuple[int, int]:
        """Return the arena number and byte offset of a contiguous tensor.

        Arena 0 means that the tensor is not in shared memory. If ranks have tensors at the same place, they get the
        same numbers.
        """
        return 0, 0

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        """Return all ranks' shared memory at the place of this rank's tensor."""
        raise NotImplementedError(f"{self.name} shares no memory")


def transport_of(group: dist.ProcessGroup | None) -> Transport:
    """Return a process group's transport, or `none` for a single rank without a group."""
    if group is None:
        return Transport("none")
    own = getattr(group, "transport", None)
    return own if isinstance(own, Transport) else Transport(dist.get_backend(group))


def register(name: str) -> None:
    """Register a plan's transport with torch, so that `new_group` accepts its name.

    Raises:
        PlanError: the transport's package or its description cannot be loaded.
        JobError: the transport's class or function cannot be imported.
    """
    # Installed packages are not searched if the name is built in.
    known = name in TRANSPORTS.built_in or name in TRANSPORTS.installed
    if not known or (path := TRANSPORTS[name].backend) is None:
        return
    create = load_object(path)
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
