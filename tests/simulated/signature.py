"""Agreement of ranks on what they do next: a mistake that hangs NCCL is an error here, which names both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import DistBackendError

_BYTES = 256
_DTYPES = sorted(
    (dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)), key=str
)  # known to both sides of a message


class Mismatch(DistBackendError):
    """Two ranks do different things."""


def agree(inner: Any, own: str, position: int, group: str, wait: Callable[[Any], None]) -> None:
    """Compare what all ranks of a group do.

    Args:
        inner: process group for the CPU, whose turn it is.
        own: this rank's collective, with all that must be the same.
        position: of it in the group, from 1.
        wait: waits for the inner group's work.

    Raises:
        Mismatch: another rank does something else.
    """
    text = f"{position}: {own}".encode()[:_BYTES]
    mine = torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8)
    all_ranks = [torch.empty_like(mine) for _ in range(inner.size())]
    wait(inner.allgather([all_ranks], [mine], AllgatherOptions()))
    for rank, theirs in enumerate(all_ranks):
        if not torch.equal(theirs, mine):
            found = bytes(theirs.tolist()).decode(errors="replace").strip()
            raise Mismatch(
                f"the ranks of the group {group} do different things: rank {inner.rank()} does "
                f"{text.decode(errors='replace')}, rank {rank} does {found} (number in the group: collective, "
                "elements, dtype). All must call the same collectives in the same order, with the same sizes and "
                "dtypes."
            )


def header(tensor: Tensor) -> Tensor:
    """Number of elements and dtype, sent in front of a message."""
    return torch.tensor([tensor.numel(), _DTYPES.index(tensor.dtype)])


def check_message(announced: Tensor, wanted: Tensor, sender: int) -> None:
    """Refuse a message that does not fit the tensor that is to hold it.

    Raises:
        Mismatch: number of elements or dtype differ.
    """
    if not torch.equal(announced, header(wanted)):
        elements, dtype = announced.tolist()
        raise Mismatch(
            f"rank {sender} sent {elements} elements of {_DTYPES[dtype]}, but here {wanted.numel()} of {wanted.dtype} "
            "are to be received"
        )
