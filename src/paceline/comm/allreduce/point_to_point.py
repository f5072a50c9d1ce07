"""Messages between ranks of a group, over any backend: several at once, in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.device import on_accelerator
from paceline.errors import SyncError

Messages = Sequence[tuple[int, Tensor]]  # (rank of the group, tensor)


def start_messages(backend: dist.ProcessGroup, send: Messages, receive: Messages) -> list[dist.Work]:
    """Begin to send and receive; those between two ranks are matched in their order.

    Raises:
        SyncError: a tensor has gaps, so that its bytes are not a message.
    """
    works = []
    # On accelerators one launch for all, else two ranks that both send first wait forever
    if any(on_accelerator(tensor) for _, tensor in (*send, *receive)):
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, group=backend, group_peer=to) for to, tensor in send]
            + [dist.P2POp(dist.irecv, tensor, group=backend, group_peer=source) for source, tensor in receive]
        )
    for source, tensor in receive:  # first, so that what comes has its place
        works.append(backend.recv([_message(tensor, "receive from", source)], source, 0))
    for to, tensor in send:
        works.append(backend.send([_message(tensor, "send to", to)], to, 0))
    return works


def _message(tensor: Tensor, what: str, rank: int) -> Tensor:
    """The bytes of a tensor, in place: not every transport knows every dtype."""
    if not tensor.is_contiguous():
        raise SyncError(
            f"cannot {what} rank {rank} a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}: its "
            "bytes do not lie in one piece. Make a copy with .contiguous(), and copy what is received back."
        )
    return tensor.detach().view(-1).view(torch.uint8)
