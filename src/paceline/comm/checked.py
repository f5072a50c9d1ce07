"""A group whose ranks compare every call before it starts.

A difference is an error then, and not a hang. For code that may differ between ranks: rules of other packages. torch's
own check (`TORCH_DISTRIBUTED_DEBUG=DETAIL`) wraps no process group that is written in Python, as those of shm and tcp.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from paceline.comm.allreduce.point_to_point import Messages
from paceline.comm.group import Group, Op, Pending
from paceline.errors import SyncError

_TEXT_BYTES, _DIGEST_BYTES = 240, 16  # of a call: enough for a person, and exact


@dataclass
class CheckedGroup(Group):
    """A view of a group that compares every call over the ranks before it starts.

    A call that differs (another collective, dtype or shape) raises SyncError on all ranks and names two of them; of
    messages, on both ranks of a pair.

    Args:
        plain: the group itself.
    """

    plain: Group = field(default_factory=Group)

    @classmethod
    def of(cls, group: Group) -> CheckedGroup:
        """The view of a group. They count together."""
        return cls(**{each.name: getattr(group, each.name) for each in fields(group)}, plain=group)

    def start_exchange(self, send: Messages, receive: Messages) -> Pending:
        own = [(rank, _tensor(self, _line(_described(tensor)))) for rank, tensor in (*send, *receive)]
        theirs = [(rank, torch.empty_like(line)) for rank, line in own]
        # What is sent to a rank is held against what it receives, so the answers to this rank's sends come in the order
        # of its receives there.
        self.plain.exchange(own[: len(send)], theirs[len(send) :])
        self.plain.exchange(own[len(send) :], theirs[: len(send)])
        for (rank, line), (_, other) in zip(own, theirs, strict=True):
            if not torch.equal(line, other):
                raise _differ(self.rank, bytes(line.tolist()), rank, bytes(other.tolist()))
        return super().start_exchange(send, receive)

    def _same(self, what: str, tensor: Tensor, op: Op | None = None) -> None:
        own = _tensor(self, _line(f"{what}{f' ({op})' if op else ''} of {_described(tensor)}"))
        gathered = own.new_empty(self.size * len(own))
        self.plain.all_gather(gathered, own)
        calls = [bytes(part.tolist()) for part in gathered.cpu().split(len(own))]
        other = next((r for r, theirs in enumerate(calls) if theirs != calls[0]), None)
        if other is not None:
            raise _differ(0, calls[0], other, calls[other])


def _differ(rank: int, call: bytes, other: int, its: bytes) -> SyncError:
    return SyncError(
        f"the ranks made different calls: rank {rank} {_text(call)}, rank {other} {_text(its)}. Every rank of a group "
        "must make the same calls in the same order, with tensors of the same shape and dtype."
    )


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _tensor(group: Group, line: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(line), dtype=torch.uint8).to(group.device)


def _line(call: str) -> bytes:
    data = call.encode()
    return data[:_TEXT_BYTES].ljust(_TEXT_BYTES) + hashlib.sha256(data).digest()[:_DIGEST_BYTES]


def _text(line: bytes) -> str:
    return line[:_TEXT_BYTES].decode(errors="replace").rstrip()
