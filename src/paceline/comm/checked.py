"""Check that all ranks make the same call, before a difference causes a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.errors import SyncError

if TYPE_CHECKING:
    from paceline.comm.group import Group

_TEXT_BYTES, _DIGEST_BYTES = 240, 16  # of a call: enough for a person, and exact


def same_call(group: Group, call: str) -> None:
    """Make sure that all ranks of the group make the same call.

    Raises:
        SyncError: on every rank; names the calls of two ranks.
    """
    calls = _gathered(group, _line(call))
    other = next((r for r, theirs in enumerate(calls) if theirs != calls[0]), None)
    if other is not None:
        raise _differ(0, calls[0], other, calls[other])


def same_messages(group: Group, send: Sequence[tuple[int, str]], receive: Sequence[tuple[int, str]]) -> None:
    """Check that messages to send and to receive match between ranks.

    Each entry is (rank, description).

    Raises:
        SyncError: on both ranks of a pair that differs.
    """
    own = [(r, _tensor(group, _line(text))) for r, text in (*send, *receive)]
    theirs = [(r, torch.empty_like(line)) for r, line in own]
    # What is sent to a rank is held against what it receives, so the answers to this rank's sends come in the order of
    # its receives there.
    group.exchange(own[: len(send)], theirs[len(send) :])
    group.exchange(own[len(send) :], theirs[: len(send)])
    for (rank, line), (_, other) in zip(own, theirs, strict=True):
        if not torch.equal(line, other):
            raise _differ(group.rank, bytes(line.tolist()), rank, bytes(other.tolist()))


def _differ(rank: int, call: bytes, other: int, its: bytes) -> SyncError:
    return SyncError(
        f"the ranks made different calls: rank {rank} {_text(call)}, rank {other} {_text(its)}. Every rank of "
        "a group must make the same "
        "calls in the same order, with tensors of the same shape and dtype."
    )


def _gathered(group: Group, line: bytes) -> list[bytes]:
    own = _tensor(group, line)
    gathered = own.new_empty(group.size * len(line))
    group.all_gather(gathered, own)
    return [bytes(part.tolist()) for part in gathered.cpu().split(len(line))]


def _tensor(group: Group, line: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(line), dtype=torch.uint8).to(group.device)


def _line(call: str) -> bytes:
    data = call.encode()
    return data[:_TEXT_BYTES].ljust(_TEXT_BYTES) + _digest(data)


def _text(line: bytes) -> str:
    return line[:_TEXT_BYTES].decode(errors="replace").rstrip()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]
