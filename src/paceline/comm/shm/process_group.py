"""The process group that torch.distributed sees: c10d's collectives and messages over shared memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.c10d.operation import OperationQueue, Steps
from paceline.comm.c10d.process_group import DrivenProcessGroup, flattened, put_back
from paceline.comm.c10d.transport import Transport
from paceline.comm.shm.collectives import ShmCollectives
from paceline.comm.shm.mailbox import ShmInbox, ShmOutbox, ShmReceive, receive_from_any
from paceline.comm.shm.progress import Peer, ShmProgress
from paceline.comm.shm.rounds import Rounds
from paceline.comm.shm.segment import Handle, create
from paceline.errors import ClusterError

_log = logging.getLogger(__name__)


class ShmProcessGroup(DrivenProcessGroup):
    """A process group over memory that the processes of one host share. CPU tensors of any dtype, contiguous or not.

    Made by `torch.distributed`, once `paceline.comm.shm` is imported: `dist.init_process_group("shm")`,
    `dist.new_group(backend="shm")`.
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
        self._sending: dict[int, tuple[ShmOutbox, OperationQueue]] = {}
        self._inboxes: dict[int, ShmInbox] = {}

    @property
    def transport(self) -> Transport:
        """This group's memory, for `Group`."""
        return _SharedMemory(self)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor of zeros in shared memory; all ranks ask for it together.

        Reductions of it, or of contiguous parts of it that are at the same place on all ranks, move each byte once. It
        lives until `release`, or the end of the group. None on every rank if one of them is refused the memory.
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
                own.close_descriptor()
        return arena.segments[self.rank()].bytes[: numel * dtype.itemsize].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Free the shared memory of a tensor from `empty`.

        It ends when all ranks have, and no view is left.
        """
        if self._closed:
            return
        number, _ = self._rounds.place_of(tensor, tensor.nbytes)
        self._rounds.arenas.pop(number, None)
        self._collectives.forget(number)

    def place_of(self, tensor: Tensor) -> tuple[int, int]:
        """Arena and byte offset of a contiguous tensor, equal on ranks with the same place."""
        return self._rounds.place_of(tensor, tensor.nbytes)

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' memory at the place of this rank's tensor, as tensors like it.

        The tensor is contiguous and in shared memory.
        """
        number, start = self.place_of(tensor)
        parts = (segment.bytes[start : start + tensor.nbytes] for segment in self._rounds.arenas[number].segments)
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    # Messages

    def send(self, tensors: Sequence[Tensor], receiver: int, tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        outbox, queue = self._sending.get(receiver) or self._sending.setdefault(
            receiver, (ShmOutbox(self._rounds, receiver), OperationQueue())
        )
        return self._launch(
            queue, "send", f"send to rank {receiver}", outbox.send(flattened(tensor), tag), outbox.waits_for, [tensor]
        )

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        inbox, flat = self._inbox(sender), flattened(tensor)

        def steps() -> Steps:
            request = ShmReceive(tag, flat.view(torch.uint8))
            inbox.request(request)  # here, where no other thread is at the inbox
            yield from inbox.receive(request)
            put_back(flat, tensor)
            return sender

        return self._launch(OperationQueue(), "recv", f"receive from rank {sender}", steps(), inbox.waits_for, [tensor])

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        inboxes, flat = [self._inbox(r) for r in range(self.size()) if r != self.rank()], flattened(tensor)

        def steps() -> Steps:
            sender = yield from receive_from_any(inboxes, ShmReceive(tag, flat.view(torch.uint8)))
            put_back(flat, tensor)
            return sender

        def waits_for() -> list[Peer]:  # one that lives can still send
            silent = [peer for inbox in inboxes for peer in inbox.waits_for()]
            return silent if len(silent) == len(inboxes) and all(peer.is_gone() for peer in silent) else []

        return self._launch(OperationQueue(), "recvAnySource", "receive from any rank", steps(), waits_for, [tensor])

    def _inbox(self, sender: int) -> ShmInbox:
        return self._inboxes.get(sender) or self._inboxes.setdefault(sender, ShmInbox(self._rounds, sender))

    # The end

    def shutdown(self) -> None:
        """Let go of the shared memory."""
        if not self._closed:
            self._closed = True
            # torch's own caches may keep this object for as long as the process lives.
            del self._collectives, self._rounds, self._progress
            self._sending.clear()
            self._inboxes.clear()
            ShmProgress.release()

    abort = shutdown

    def getBackendName(self) -> str:
        return "shm"


class _SharedMemory(Transport):
    """Memory that the processes of one host share."""

    shares_memory = True

    def __init__(self, group: ShmProcessGroup) -> None:
        super().__init__("shm")
        self.group = group

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self.group.empty(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self.group.release(tensor)

    def place_of(self, tensor: Tensor) -> tuple[int, int]:
        return self.group.place_of(tensor)

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        return self.group.everywhere(tensor)
