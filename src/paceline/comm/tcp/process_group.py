"""The process group `tcp`: c10d's collectives and messages between ranks on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.c10d.operation import Steps
from paceline.comm.c10d.process_group import DrivenProcessGroup, flattened, put_back
from paceline.comm.c10d.transport import Transport
from paceline.comm.tcp.collectives import TcpCollectives
from paceline.comm.tcp.link import PeerLink
from paceline.comm.tcp.mesh import LinkMesh, MeshQueue, TcpSend
from paceline.comm.tcp.messages import MESSAGE, CurrentCall, TcpReceive
from paceline.comm.tcp.progress import TcpProgress


class TcpProcessGroup(DrivenProcessGroup):
    """A process group over links that outlive their connections. CPU tensors of any dtype, contiguous or not.

    Made by `torch.distributed`, once `paceline.comm.tcp` is imported: `dist.init_process_group("tcp")`,
    `dist.new_group(backend="tcp")`.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        loop = TcpProgress.acquire()
        try:
            self._mesh = LinkMesh(loop, store, rank, size, timeout.total_seconds())
        except BaseException:
            TcpProgress.release()
            raise
        super().__init__(rank, size, timeout, name, loop, TcpCollectives(self._mesh))
        self._operations = MeshQueue(self._mesh)

    @property
    def transport(self) -> Transport:
        """The transport for `Group`, with the unauthenticated peers that came to this process so far."""
        described = Transport("tcp")
        described.unauthenticated = 0 if self._closed else self._mesh.loop.unauthenticated
        return described

    def send(self, tensors: Sequence[Tensor], receiver: int, tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        under_way: list[TcpSend | TcpReceive] = []

        def steps() -> Steps:
            flat = flattened(tensor)
            message = self._mesh.send(receiver, MESSAGE, _message(flat, tag), flat)
            under_way.append(message)
            while not message.done:
                yield
            message.end_loan()

        return self._launch(
            MeshQueue(self._mesh), "send", f"send to rank {receiver}", steps(), self._awaited(under_way), [tensor]
        )

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int) -> dist.Work:
        return self._receive(tensors, sender, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Sequence[Tensor], sender: int | None, tag: int) -> dist.Work:
        self._check_open()
        [tensor] = tensors
        under_way: list[TcpSend | TcpReceive] = []

        def steps() -> Steps:
            flat = flattened(tensor)
            call = _message(flat, tag)
            mesh = self._mesh
            receive = (
                mesh.receive_from_any(MESSAGE, call, flat)
                if sender is None
                else mesh.receive(sender, MESSAGE, call, flat)
            )
            under_way.append(receive)
            while not receive.done:
                yield
            put_back(flat, tensor)
            return receive.source

        title, whom = ("recvAnySource", "any rank") if sender is None else ("recv", f"rank {sender}")
        return self._launch(
            MeshQueue(self._mesh), title, f"receive from {whom}", steps(), self._awaited(under_way), [tensor]
        )

    def _awaited(self, under_way: list[TcpSend | TcpReceive]) -> Callable[[], list[PeerLink]]:
        mesh = self._mesh  # kept, because a message may be in progress when the group ends
        return lambda: mesh.links_of(under_way)

    # The end

    def shutdown(self) -> None:
        """Let the others receive what they have not yet, and close all connections."""
        self._end(self._timeout_s)

    def abort(self) -> None:
        """Close all connections at once."""
        self._end(0.0)

    def end_within(self, seconds: float) -> None:
        """Close all connections when the failure notice is sent, at the latest after `seconds`."""
        self._end(seconds)

    def _end(self, linger_s: float) -> None:
        if not self._closed:
            self._closed = True
            self._mesh.close(linger_s)
            # torch's own caches may keep this object for as long as the process lives.
            del self._collectives, self._mesh, self._operations, self._progress
            TcpProgress.release()

    def getBackendName(self) -> str:
        return "tcp"


def _message(flat: Tensor, tag: int) -> CurrentCall:
    return CurrentCall.of("message", flat.dtype, flat.numel())._replace(tag=tag)
