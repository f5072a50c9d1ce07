"""Groups of ranks and their collectives, with deadlines and errors that name missing ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.process_group import Transport, transport_of
from paceline.comm.rendezvous import missing_ranks, register
from paceline.comm.transport import make_process_group
from paceline.device import on_accelerator
from paceline.errors import LoaderProcessError, SyncError, lost_a_peer
from paceline.wire.position import report_wait
from paceline.wire.status import GenerationOver, ends_generation, refuse_aborted

if TYPE_CHECKING:
    from paceline.comm.allreduce import Algorithm
    from paceline.comm.comm_thread import Task
    from paceline.comm.interruption import Interruption
    from paceline.comm.links import GroupLinks

Op = Literal["sum", "mean", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 still has the earlier names, but warns about them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Counts:
    """Bytes that one rank has reduced and sent over a group."""

    reduced_bytes: int = 0
    sent_bytes: int = 0


@dataclass
class Group:
    """Group of ranks that communicate with each other.

    In a group of one rank, collectives return at once.

    Args:
        rank: this rank's number in the group.
        size: number of ranks in the group.
        backend: torch's process group; None for a group of one rank.
        store: key-value store of the rendezvous, used only to find missing ranks after a failure.
        deadline_s: maximum wait of a collective, in seconds.
        hosts: the host index of each rank.
        links: measured speeds of the links between the hosts, if available; equal on all ranks.
        transport_note: reason why a faster transport was not used, or a note that the transport does not encrypt; else
            None.
        interruption: thread that ends waits on an accelerator when the generation is over; None if no such thread is
            needed.
    """

    rank: int = 0
    size: int = 1
    backend: dist.ProcessGroup | None = None
    store: Store | None = None
    deadline_s: float = 300.0
    hosts: tuple[int, ...] = (0,)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    transport_note: str | None = None
    links: GroupLinks | None = None
    counts: Counts = field(default_factory=Counts)
    interruption: Interruption | None = None
    _host: Group | None = None
    _failures: int = 0

    # Properties

    @property
    def spans_hosts(self) -> bool:
        """Return True if the ranks are on more than one host."""
        return len(set(self.hosts)) > 1

    @property
    def transport(self) -> Transport:
        """Transport of the group: `shm`, `tcp`, `gloo` or an accelerator's library; `none` for one rank."""
        return transport_of(self.backend if self.size > 1 else None)

    @property
    def is_fake(self) -> bool:
        """Return True in a dry run, which has no other ranks (`paceline check --dry-run`)."""
        return self.transport.name == "fake"

    @property
    def bytes_reduced(self) -> int:
        """Total size in bytes of the tensors passed to all-reduces so far."""
        return self.counts.reduced_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent so far.

        For a collective of the backend, this counts the minimum number of bytes that the rank must send.
        """
        return self.counts.sent_bytes

    def count(self, sent_bytes: int, *, reduced_bytes: int = 0) -> None:
        """Count the bytes of a call, also of calls that do not use the backend."""
        self.counts.sent_bytes += sent_bytes
        self.counts.reduced_bytes += reduced_bytes

    # Groups of the same ranks, or of some of them

    @property
    def host(self) -> Group:
        """Group of the ranks on this rank's host, over shared memory if possible.

        All of these ranks must make their first access to this property together.
        """
        if self._host is None and self.spans_hosts:
            self._host = self.subgroup([r for r in range(self.size) if self.hosts[r] == self.hosts[self.rank]])
        return self._host or self

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """Create a group of some ranks, in ascending order; only these ranks call this.

        If this group spans hosts and the new group does not, the new group uses shared memory if the host supports it.
        """
        ranks = list(ranks)
        if ranks != sorted(set(ranks)) or not set(ranks) <= set(range(self.size)) or self.rank not in ranks:
            raise SyncError(
                "ranks.group_invalid",
                "rank {rank} of {size} cannot create a group of ranks {ranks}. Give the ranks in ascending order, "
                "including its own rank.",
                rank=self.rank,
                size=self.size,
                ranks=ranks,
            )
        hosts = tuple(self.hosts[r] for r in ranks) if len(self.hosts) == self.size else (0,) * len(ranks)
        links = self.links and replace(self.links, hosts=hosts)
        made = Group(
            ranks.index(self.rank), len(ranks), deadline_s=self.deadline_s, hosts=hosts, device=self.device, links=links
        )
        if made.size > 1:
            assert self.backend is not None
            shared = self.spans_hosts and not made.spans_hosts and self.device.type == "cpu"
            with self._named(f"the start of a group of ranks {ranks}"):
                made.backend, made.store = make_process_group(
                    self.backend, ranks, self.deadline_s, share_memory=shared, spread=made.spans_hosts
                )
                register(made.store, made.rank)
        return made

    def copy(self) -> Group:
        """Create a group of the same ranks with separate connections, for a second thread.

        Every rank must call this method. Call `close` on the copy at the end.
        """
        return self.subgroup(range(self.size))

    def for_host_memory(self) -> Group:
        """Create a group of the same ranks for tensors in host memory.

        Every rank must call this method. Call `close` on the group at the end.
        """
        if self.device.type == "cpu" or self.backend is None:
            return self.copy()
        ranks, cpu = range(self.size), torch.device("cpu")
        made = Group(self.rank, self.size, deadline_s=self.deadline_s, hosts=self.hosts, device=cpu)
        with self._named("the start of a group for the hosts' memory"):
            made.backend, made.store = make_process_group(
                self.backend, ranks, self.deadline_s, share_memory=False, spread=self.spans_hosts, host_memory=True
            )
            register(made.store, made.rank)
        return made

    def close(self) -> None:
        """Close a group from `subgroup` or `copy`.

        The ranks need not call this method at the same time, but must not use the group afterwards.
        """
        if self._host is not None:
            self._host.close()
        backend, self.backend, self.store = self.backend, None, None
        if backend is not None and dist.is_initialized():
            dist.destroy_process_group(backend)

    # Memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat tensor of zeros on the group's device.

        All ranks must call this method together. The shared-memory transport allocates the tensor in shared memory, so
        that an all-reduce moves each byte once. Call `release` to free the tensor.
        """
        transport = self.transport
        if transport.shares_memory:
            with self._named("the start of a shared tensor"):
                shared = transport.empty(numel, dtype)
            if shared is not None:
                return shared
            self.transport_note = (
                f"there is no shared memory for a tensor of {numel * dtype.itemsize} bytes; it is copied through "
                "smaller parts"
            )
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def release(self, tensor: Tensor) -> None:
        """Free a tensor from `empty`."""
        self.transport.release(tensor)

    # Collectives

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Replace `tensor` on every rank with the sum, mean or maximum over the ranks.

        The result has the same bits on all ranks.

        Raises:
            SyncError: a rank is gone, or did not arrive within the deadline.
        """
        if self.size == 1:
            return
        self._same("all-reduce", tensor, op)
        self.count(2 * tensor.nbytes * (self.size - 1) // self.size, reduced_bytes=tensor.nbytes)
        # gloo accepts a tensor with gaps, and returns a wrong result
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        started = time.monotonic()
        try:
            self._reduce(whole, op, waits=True).wait()
        except RuntimeError as error:
            self._explain("all-reduce", time.monotonic() - started, error)
            raise
        if op == "mean":
            whole.div_(self.size)
        if whole is not tensor:
            tensor.copy_(whole)

    def prepared_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Return a function that sums a tensor over the ranks, like `all_reduce`.

        If the tensor is small, the transport may prepare its sum, so that each call takes less time.
        """
        prepared = self.transport.prepared_sum(tensor) if self.size > 1 else None
        if prepared is None:
            return partial(self.all_reduce, tensor)
        sent_bytes, reduced_bytes = 2 * tensor.nbytes * (self.size - 1) // self.size, tensor.nbytes

        def summed() -> None:
            self._same("all-reduce", tensor, "sum")
            self.count(sent_bytes, reduced_bytes=reduced_bytes)
            started = time.monotonic()
            try:
                prepared()
            except RuntimeError as error:
                self._explain("all-reduce", time.monotonic() - started, error)
                raise

        return summed

    def start_all_reduce(self, tensor: Tensor, op: Op = "sum") -> Pending:
        """Begin an all-reduce (sum or maximum); call `wait()` on the result before reading `tensor`."""
        self._same("all-reduce", tensor, op)
        self.count(2 * tensor.nbytes * (self.size - 1) // self.size, reduced_bytes=tensor.nbytes)
        return Pending(self, "all-reduce", [self._reduce(tensor, op, waits=False)])

    def _reduce(self, tensor: Tensor, op: Op, *, waits: bool) -> dist.Work:
        """Run an all-reduce without the checks and logs of `dist.all_reduce`.

        For small tensors, these checks and logs can take as long as the sum.
        """
        assert self.backend is not None
        return self.backend.allreduce([tensor], _options(op, waits))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Replace `tensor` on every rank with the tensor of rank `root` of the group."""
        if self.size > 1:
            with self._call(f"broadcast from rank {root}", tensor, tensor.nbytes * (self.size - 1) // self.size):
                dist.broadcast(tensor, group_src=root, group=self.backend)

    def all_gather(self, gathered: Tensor, own: Tensor) -> None:
        """Fill `gathered` (flat, `size` times as long as `own`) with every rank's `own`, in rank order."""
        if self.size == 1:
            gathered.copy_(own.view_as(gathered))
            return
        with self._call("all-gather", own, own.nbytes * (self.size - 1)):
            _all_gather(gathered, own, group=self.backend)

    def reduce_scatter(self, own: Tensor, whole: Tensor, op: Op = "sum") -> None:
        """Fill `own` with this rank's part of the reduction of every rank's `whole`.

        `whole` is flat and consists of `size` equal parts; the reduction is a sum, mean or maximum.
        """
        if self.size == 1:
            own.copy_(whole.view_as(own))
            return
        with self._call("reduce-scatter", whole, whole.nbytes * (self.size - 1) // self.size, op):
            _reduce_scatter(own, whole, op=_OPS[op], group=self.backend)
        if op == "mean":
            own.div_(self.size)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Gather the `rows` of every rank, in rank order.

        Rank r has `counts[r]` rows, and the ranks' tensors may differ only in dim 0. This rank's entry is `rows`
        itself, so gradients flow only through this entry.
        """
        if self.size == 1:
            return [rows]
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in counts]
        with self._call("all-gather of rows", padded, padded.nbytes * (self.size - 1)):
            dist.all_gather(parts, padded, group=self.backend)
        gathered = [part[:count] for part, count in zip(parts, counts, strict=True)]
        gathered[self.rank] = rows
        return gathered

    def all_to_all(
        self, received: Tensor, rows: Tensor, receives: Sequence[int] | None = None, sends: Sequence[int] | None = None
    ) -> None:
        """Send the next `sends[r]` rows to each rank r, and receive `receives[r]` rows from it.

        The received rows are written to `received` in rank order. Without `sends` and `receives`, all ranks exchange
        the same number of rows. The method raises SyncError like `all_reduce`.
        """
        if self.size == 1:
            received.copy_(rows)
            return
        kept = sends[self.rank] if sends else len(rows) // self.size
        with self._call("all-to-all", rows[:0] if sends else rows, rows.nbytes - rows[:kept].nbytes):
            dist.all_to_all_single(
                received, rows, receives and list(receives), sends and list(sends), group=self.backend
            )

    def gather_json(self, value: Any) -> list[Any]:
        """Gather every rank's `value` in rank order, as JSON instead of pickle.

        In a dry run, every entry is this rank's value.
        """
        if self.size == 1 or self.is_fake:
            return [value] * self.size
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        self.all_reduce(lengths)
        counts = lengths.tolist()
        refuse_aborted()
        parts = [bytes(part.cpu().tolist()) for part in self.gather_rows(data, counts)]
        refuse_aborted()
        return [json.loads(part) for part in parts]

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        arrived = torch.zeros(1, device=self.device)
        self.all_reduce(arrived)
        arrived.item()  # on accelerators, only a read of the result waits for the sum
        refuse_aborted()

    # Messages

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor to rank `to`, which must call `receive`.

        The method raises SyncError like `all_reduce`.
        """
        self.exchange([(to, tensor)], [])

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with the message of rank `source`.

        The method raises SyncError like `all_reduce`.
        """
        self.exchange([], [(source, tensor)])

    def exchange(self, send: Messages, receive: Messages) -> None:
        """Send and receive contiguous tensors at the same time, given as pairs (rank, tensor).

        The call returns when all tensors are received and the sent tensors may be overwritten. Messages between two
        ranks are matched in the order of the calls.

        Raises:
            SyncError: a rank is gone or missed the deadline, or a tensor is not contiguous.
        """
        self.start_exchange(send, receive).wait()

    def start_exchange(self, send: Messages, receive: Messages, what: str = "messages") -> Pending:
        """Begin an exchange and return at once; `what` is its name in errors.

        Call `wait()` on the result before reading received tensors or changing sent tensors.
        """
        self.count(sum(tensor.nbytes for _, tensor in send))
        assert self.backend is not None
        with self._named(f"the start of {what}"):
            return Pending(self, what, start_messages(self.backend, send, receive), (send, receive))

    # Calls

    def _same(self, what: str, tensor: Tensor, op: Op | None = None) -> None:
        """Hook before each collective, in which `CheckedGroup` compares the call over the ranks."""

    @contextmanager
    def _call(self, what: str, tensor: Tensor, sent_bytes: int, op: Op | None = None) -> Iterator[None]:
        """Compare a collective over the ranks (`CheckedGroup`), count its bytes, and explain its errors."""
        self._same(what, tensor, op)
        self.count(sent_bytes)
        with self._named(what):
            yield

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self._explain(what, time.monotonic() - started, error)
            raise

    def _explain(self, what: str, waited_s: float, error: RuntimeError) -> None:
        """Raise an error that explains a failed wait for other ranks.

        If this rank itself is the cause, the method returns.
        """
        if "DataLoader worker" in str(error):  # raised by torch's SIGCHLD handler, anywhere in the main thread
            raise LoaderProcessError(
                "loader.worker_ended_in_wait",
                "rank {rank} failed in a wait for other ranks ({what}): {error}",
                rank=self.rank,
                what=what,
                error=str(error).strip(),
            ) from error
        if waited_s >= self.deadline_s:
            report_wait(error)  # called first, because later calls may wait for other ranks
        if ends_generation(error):
            raise GenerationOver(
                "ranks.interrupted",
                "rank {rank}: {what} was interrupted after {waited_s:.1f} s",
                rank=self.rank,
                what=what,
                waited_s=waited_s,
            ) from error
        if not lost_a_peer(error):
            return
        self._failures += 1
        missing = missing_ranks(self.store, self.rank, self.size, self._failures)
        if missing is None:
            who = "a rank did not come, or a connection failed"
        else:
            who = f"ranks {missing} did not come" if missing else "every rank came, but a connection failed"
        said = str(error).splitlines()[0].partition(". This is typically")[0] if str(error) else type(error).__name__
        raise SyncError(
            "ranks.deadline",
            "rank {rank} waited {waited_s:.1f} s in {what} and {who} (deadline {deadline_s:g} s). Look for the "
            "first error of those ranks. If they are only slow, raise deadline_s. Transport: {transport}",
            rank=self.rank,
            waited_s=waited_s,
            what=what,
            who=who,
            deadline_s=self.deadline_s,
            transport=said,
        ) from error


@cache
def _options(op: Op, waits: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = _OPS[op], not waits  # type: ignore[assignment]  # torch converts it
    return options


@dataclass
class Pending:
    """Handle for a collective or for messages in progress."""

    group: Group
    what: str
    works: Sequence[dist.Work]
    held: Any = None  # objects that must live until the end

    def wait(self) -> None:
        """Wait for the result (on accelerators, make the current stream wait).

        Raises:
            SyncError: a rank is gone, or missed the group's deadline.
        """
        with self.group._named(self.what):
            for work in self.works:
                work.wait()


Messages = Sequence[tuple[int, Tensor]]  # (rank of the group, tensor)


def start_messages(backend: dist.ProcessGroup, send: Messages, receive: Messages) -> list[dist.Work]:
    """Begin to send and receive; messages between two ranks are matched in call order.

    Raises:
        SyncError: a tensor is not contiguous, so it cannot be sent as bytes.
    """
    works = []
    # On accelerators, one launch for all messages; otherwise two ranks that both send first would deadlock
    if any(on_accelerator(tensor) for _, tensor in (*send, *receive)):
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, group=backend, group_peer=to) for to, tensor in send]
            + [dist.P2POp(dist.irecv, tensor, group=backend, group_peer=source) for source, tensor in receive]
        )
    for source, tensor in receive:  # receives come first, so that incoming messages have memory
        works.append(backend.recv([_message(tensor, "receive from", source)], source, 0))
    for to, tensor in send:
        works.append(backend.send([_message(tensor, "send to", to)], to, 0))
    return works


def _message(tensor: Tensor, what: str, rank: int) -> Tensor:
    """View a tensor as bytes, because not every transport supports every dtype."""
    if not tensor.is_contiguous():
        raise SyncError(
            "ranks.tensor_not_contiguous",
            "cannot {what} rank {rank} a tensor of shape {shape} and strides {stride}, because it is not "
            "contiguous. Send a copy made with .contiguous(), and receive into a contiguous tensor.",
            what=what,
            rank=rank,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass
class Bucket:
    """Flat buffer of gradients, scalars (in the last bucket) and one usage count per parameter.

    Attributes:
        used: usage counts at the end of `flat`: 1 for each parameter that this replica used. After the sum, the number
            of replicas that used the parameter.
        seen: indices of parameters with a gradient in the buffer from any microbatch of this step.
        whole: indices in `seen` whose gradient of the last microbatch has been added.
    """

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]
    used: Tensor
    gradient_size: int
    seen: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    pending: Pending | Task | None = None

    @property
    def gradients(self) -> Tensor:
        """All gradients as a flat tensor."""
        return self.flat[: self.gradient_size]

    @classmethod
    def of(cls, parameters: list[nn.Parameter], memory: Algorithm, scalar_count: int = 0) -> Bucket:
        """Create a bucket for the gradients of `parameters` and some scalars.

        All parameters have one dtype; without parameters, the dtype is float32. `memory` allocates the buffer (in
        shared memory if the transport has it), and must also release it.
        """
        gradient_size = sum(p.numel() for p in parameters)
        dtype = parameters[0].dtype if parameters else torch.float32
        flat = memory.empty(gradient_size + scalar_count + len(parameters), dtype)
        views, start = [], 0
        for p in parameters:
            views.append(_like(flat[start : start + p.numel()], p))
            start += p.numel()
        return cls(flat, parameters, views, flat[gradient_size + scalar_count :], gradient_size)

    def take(self, i: int, parameter: Tensor) -> None:
        """Move the gradient of parameter `i` into the bucket.

        The first microbatch of a step overwrites the buffer; further microbatches add to it.
        """
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if i in self.seen:
            self.views[i].add_(gradient)
        else:
            self.views[i].copy_(gradient)
            self.seen.add(i)
        parameter.grad = None

    def take_all(self) -> None:
        """Move all existing gradients into the bucket at once."""
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.take(i, parameter)

    def fill(self) -> None:
        """Record which parameters have gradients, and zero the gradients of the others."""
        self.used.fill_(1.0)
        if len(self.seen) == len(self.parameters):
            return
        unseen = [i for i in range(len(self.parameters)) if i not in self.seen]
        self.used[unseen] = 0.0
        torch._foreach_zero_([self.views[i] for i in unseen])

    def sum_over(self, group: Group) -> None:
        """Replace the gradients of all parameters with their sums over the group, synchronously."""
        self.take_all()
        self.fill()
        group.all_reduce(self.flat)
        self.hand_out()

    def hand_out(self) -> None:
        """Set every parameter's reduced gradient, or None if no replica used the parameter."""
        unused: set[int] = set()
        if len(self.seen) < len(self.parameters):
            unseen = [i for i in range(len(self.parameters)) if i not in self.seen]
            unused = {i for i, n in zip(unseen, self.used[unseen].tolist(), strict=True) if not n > 0}
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            parameter.grad = None if i in unused else view
        self.seen.clear()
        self.whole.clear()
        self.pending = None


def _like(flat: Tensor, parameter: Tensor) -> Tensor:
    """View `flat` with the shape and strides of `parameter`, e.g. channels-last."""
    # the same order of strides, but contiguous
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
