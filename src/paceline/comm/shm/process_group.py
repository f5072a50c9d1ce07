"""The process group `shm`: c10d's collectives and messages between processes of one host.

A message consists of a header (tag, size) and its bytes, and passes through a ring buffer in the sender's memory. A
message that is larger than the ring is streamed through the ring. The receiver matches tags. If no receive waits for a
message, the receiver copies the message out of the ring, so that it does not block later messages.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.messages import Matching, Message, Receive
from paceline.comm.operation import Operation, OperationQueue, Steps, note_failure
from paceline.comm.process_group import DrivenProcessGroup, MessageSteps, Transport
from paceline.comm.shm.collectives import MAIL_BYTES, SMALL_BYTES, Rounds, ShmCollectives
from paceline.comm.shm.progress import Peer, ShmProgress
from paceline.comm.shm.segment import Handle, create
from paceline.errors import ClusterError, SyncError
from paceline.shared_words import acquiring, publish

_log = logging.getLogger(__name__)


class ShmProcessGroup(DrivenProcessGroup):
    """Process group over the shared memory of one host.

    The group supports CPU tensors of any dtype, contiguous or not. Once `paceline.comm.shm` is imported,
    `dist.init_process_group("shm")` and `dist.new_group(backend="shm")` create such groups.
    """

    _collectives: ShmCollectives

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        progress = ShmProgress.acquire()
        progress.expect(size)
        try:
            self._rounds = Rounds(store, rank, size, progress, timeout.total_seconds())
        except BaseException:
            ShmProgress.release()
            raise
        super().__init__(rank, size, timeout, name, progress, ShmCollectives(self._rounds))
        self._outboxes: dict[int, tuple[ShmOutbox, OperationQueue]] = {}
        self._inboxes: dict[int, ShmInbox] = {}

    @property
    def transport(self) -> Transport:
        return SharedMemory(self)

    # Messages

    def _sending(self, receiver: int, flat: Tensor, tag: int) -> MessageSteps:
        outbox, queue = self._outboxes.get(receiver) or self._outboxes.setdefault(
            receiver, (ShmOutbox(self._rounds, receiver), OperationQueue())
        )
        return queue, outbox.send(flat, tag), outbox.waits_for

    def _receiving(self, sender: int | None, flat: Tensor, tag: int) -> MessageSteps:
        senders = [r for r in range(self.size()) if r != self.rank()] if sender is None else [sender]
        inboxes = [self._inbox(r) for r in senders]

        def waits_for() -> list[Peer]:
            silent = [peer for inbox in inboxes for peer in inbox.waits_for()]
            if sender is not None or (len(silent) == len(inboxes) and all(peer.why_over() for peer in silent)):
                return silent
            return []  # a living peer can still send

        return OperationQueue(), receive(inboxes, Receive(tag, flat.view(torch.uint8))), waits_for

    def _inbox(self, sender: int) -> ShmInbox:
        return self._inboxes.get(sender) or self._inboxes.setdefault(sender, ShmInbox(self._rounds, sender))

    # Shutdown

    def shutdown(self) -> None:
        """Release the shared memory."""
        if not self._closed:
            self._closed = True
            # torch's caches may keep this object for as long as the process lives.
            del self._collectives, self._rounds, self._progress
            self._outboxes.clear()
            self._inboxes.clear()
            ShmProgress.release()

    abort = shutdown

    def getBackendName(self) -> str:
        return "shm"


class SharedMemory(Transport):
    """Memory that the processes of one host share."""

    shares_memory = True

    def __init__(self, group: ShmProcessGroup) -> None:
        super().__init__("shm")
        self._group = group

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Allocate a flat tensor of zeros in shared memory; all ranks must call it together.

        Reductions of the tensor, or of contiguous parts at the same place on all ranks, move each byte once. The tensor
        is valid until `release`, or until the end of the group. If the allocation fails on one rank, every rank gets
        None.
        """
        own = None
        try:
            own = create(max(64, -(-numel * dtype.itemsize // 64) * 64), "tensor")
        except ClusterError as error:
            _log.warning("%s", error)
        try:
            mine = torch.frombuffer(bytearray((own.handle.to_bytes() if own else b"").ljust(256)), dtype=torch.uint8)
            handles = [torch.empty_like(mine) for _ in range(self._group.size())]
            self._group.allgather([handles], [mine]).wait()
            found = [bytes(handle.tolist()).strip() for handle in handles]
            if own is None or not all(found):
                return None
            arena = self._group._rounds.add_arena(own, [Handle.from_bytes(handle) for handle in found])
            self._group.barrier().wait()  # all ranks have mapped the memory
        finally:
            if own is not None:
                own.close_descriptor()
        return arena.segments[self._group.rank()].bytes[: numel * dtype.itemsize].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Free the shared memory of a tensor from `empty`.

        The memory is freed after all ranks have called this method and no view of the memory is left.
        """
        if self._group._closed:
            return
        number, _ = self._group._rounds.place_of(tensor, tensor.nbytes)
        self._group._rounds.arenas.pop(number, None)
        self._group._collectives.forget(number)

    def prepared_sum(self, tensor: Tensor) -> Callable[[], None] | None:
        whole = tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.float64)
        return SmallSum(self._group, tensor) if whole and tensor.nbytes <= SMALL_BYTES else None

    def reduce_on(self, ranks: int) -> None:
        """Divide the work of large all-reduces over only the first `ranks` ranks.

        Every rank must call this before the first collective.
        """
        self._group._collectives.reducers = ranks

    def place_of(self, tensor: Tensor) -> tuple[int, int]:
        return self._group._rounds.place_of(tensor, tensor.nbytes)

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        number, start = self.place_of(tensor)
        segments = self._group._rounds.arenas[number].segments
        parts = [segment.bytes[start : start + tensor.nbytes] for segment in segments]
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]


class SmallSum:
    """Sum of one small tensor over the ranks, prepared for many calls.

    If no operation or profiler is active and the other ranks arrive soon, a call creates no `Operation` and calls no
    function of torch. The result has the same bits as the result of `all_reduce`.
    """

    def __init__(self, group: ShmProcessGroup, tensor: Tensor) -> None:
        rounds = group._rounds
        self._group, self._tensor, self._numbers = group, tensor, tensor.detach().numpy()
        self._call = group._collectives.call_of("all_reduce", "sum", tensor)
        self._parts = [
            [slot[: len(tensor)].numpy() for slot, _ in rounds.slots_of(tensor.dtype, parity)] for parity in (0, 1)
        ]

    def __call__(self) -> None:
        """Sum the tensor in place.

        Raises:
            SyncError, DistBackendError: a peer is gone, missed the deadline, or made a different call.
        """
        group = self._group
        group._check_open()
        driver, queue, rounds = group._progress, group._operations, group._rounds
        with driver.lock:
            prepared = driver.is_idle and queue.breakage.error is None and not _profiler_enabled()
            if prepared:
                group.entered += 1
                steps = self._steps(rounds, rounds.progress)
                try:
                    if queue.finish(steps):
                        return
                except SyncError:
                    note_failure(self._operation(steps))
                    raise
                operation = self._operation(steps)
                driver.start(queue, operation)
        if prepared:
            driver.wait(operation)
        else:
            group.allreduce([self._tensor]).wait()

    def _operation(self, steps: Steps) -> Operation:
        group = self._group
        waits_for = group._collectives.waits_for
        return Operation("all_reduce", steps, group._timeout_s, waits_for, group, group.entered, [self._tensor])

    def _steps(self, rounds: Rounds, progress: ShmProgress) -> Steps:
        parts = self._parts[(rounds.round + 1) & 1]
        parts[rounds.rank][:] = self._numbers
        line = rounds.announce(self._call)
        rounds.count()
        if not progress.spin(rounds.met):
            yield
            while not rounds.met():
                yield
        rounds.calls_match(line)
        first, second, *further = parts
        np.add(first, second, out=self._numbers)
        for part in further:
            self._numbers += part


_HEADER = struct.Struct("<qq")  # tag, size; messages are padded to a multiple of it
_STEP_BYTES = MAIL_BYTES // 8  # bytes moved at a time, so that one side writes while the other reads
_WRITTEN, _READ = 0, 8  # words: total bytes so far, on separate cache lines


class ShmOutbox:
    """This rank's end of the ring to one receiver."""

    def __init__(self, rounds: Rounds, receiver: int) -> None:
        self._peer = rounds.peers[receiver]
        self._words, self._headers, self._ring = rounds.mailbox(rounds.rank, receiver)
        self._written = 0

    def send(self, tensor: Tensor, tag: int) -> Steps:
        """Write a message; the steps end when all bytes are in the ring or received."""
        data, size = tensor.view(torch.uint8), tensor.nbytes
        while self._free() < _HEADER.size:
            yield
        _HEADER.pack_into(self._headers, self._written % MAIL_BYTES, tag, size)
        self._written += _HEADER.size
        start = 0
        while start < size:
            at = self._written % MAIL_BYTES
            count = min(self._free(), MAIL_BYTES - at, size - start, _STEP_BYTES)
            if count:
                self._ring[at : at + count].copy_(data[start : start + count])
                start += count
                self._written += count
            if start < size:
                self._tell()
                if not count:
                    yield
        self._written += -size % _HEADER.size
        self._tell()

    @acquiring
    def _free(self) -> int:
        used: int = self._written - self._words[_READ]
        return MAIL_BYTES - used

    def _tell(self) -> None:
        publish(self._words, _WRITTEN, self._written)
        self._peer.ring()

    def waits_for(self) -> list[Peer]:
        """Return the receiver while the ring is full."""
        return [self._peer] if self._free() < _HEADER.size else []


class ShmInbox:
    """This rank's end of the ring from one sender."""

    def __init__(self, rounds: Rounds, sender: int) -> None:
        self.peer = rounds.peers[sender]
        self._words, self._headers, self._ring = rounds.mailbox(sender, rounds.rank)
        self._read = 0
        self._coming: Message | None = None
        self._abandoned = False
        self._matching = Matching()

    def request(self, request: Receive) -> None:
        """Request a message; requests are served in order.

        Raises:
            SyncError: an earlier request was abandoned, so messages can no longer be matched.
        """
        if self._abandoned:
            raise SyncError(
                "ranks.receive_failed_before",
                "this group can no longer receive messages from rank {rank}, because an earlier receive from it failed",
                rank=self.peer.rank,
            )
        message = self._matching.ask(request.call, request)
        if message is not None:
            request.take(message, self.peer.rank)

    def abandon(self) -> None:
        """Accept no further requests."""
        self._abandoned = True

    def pump(self) -> None:
        """Read the available bytes from the ring."""
        while (there := self._unread()) > 0:
            at = self._read % MAIL_BYTES
            if self._coming is None:
                tag, size = _HEADER.unpack_from(self._headers, at)
                self._coming = self._begin(tag, size)
                self._take(_HEADER.size)
            else:
                message = self._coming
                count = min(there, MAIL_BYTES - at, len(message.data) - message.received, _STEP_BYTES)
                message.data[message.received : message.received + count].copy_(self._ring[at : at + count])
                message.received += count
                self._take(count)
            if self._coming.whole:
                self._take(-len(self._coming.data) % _HEADER.size)
                self._coming = None

    def waits_for(self) -> list[Peer]:
        """Return the sender while the ring is empty."""
        return [] if self._unread() else [self.peer]

    @acquiring
    def _unread(self) -> int:
        written: int = self._words[_WRITTEN]
        return written - self._read

    def _begin(self, tag: int, size: int) -> Message:
        """Start to receive a message into the waiting tensor, or else into separate memory."""
        request = self._matching.who_waits(tag)
        fits = request is not None and len(request.target) == size
        message = Message(tag, request.target if request and fits else torch.empty(size, dtype=torch.uint8))
        if request is None:
            self._matching.keep(tag, message)
        else:
            request.take(message, self.peer.rank)
        return message

    def _take(self, count: int) -> None:
        self._read += count
        publish(self._words, _READ, self._read)
        self.peer.ring()


def receive(inboxes: Sequence[ShmInbox], request: Receive) -> Steps:
    """Fill the tensor with the first message that has its tag; return the sender.

    Raises:
        SyncError: the message and the tensor have different sizes.
    """
    for inbox in inboxes:
        # Once one sender's message has completed the request, another sender's kept message stays for the next request.
        if request.message is None:
            inbox.request(request)
    try:
        while not request.done:
            for inbox in inboxes:
                inbox.pump()
            if not request.done:
                yield
    except GeneratorExit:
        for inbox in inboxes:
            inbox.abandon()
        raise
    message, target = request.message, request.target
    assert message is not None
    if len(message.data) != len(target):
        raise SyncError(
            "ranks.message_size",
            "rank {source} sent a message of {sent} bytes (tag {tag}) for a tensor of {expected} bytes",
            source=request.source,
            sent=len(message.data),
            tag=request.call,
            expected=len(target),
        )
    if message.data is not target:
        target.copy_(message.data)
    return request.source
