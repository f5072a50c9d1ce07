"""Checks that ranks have equal state, machines and calls (`CheckedGroup`), and maxima over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from paceline.comm.group import Group, Messages, Op, Pending
from paceline.comm.process_group import different_calls
from paceline.device import is_accelerator, widest_float
from paceline.device import name as device_name
from paceline.errors import SyncError


def greatest(group: Group, value: float) -> float:
    """Return the maximum of a number over all ranks; every rank must call this."""
    tensor = torch.tensor([value], dtype=widest_float(group.device), device=group.device)
    group.all_reduce(tensor, "max")
    return float(tensor)


def check_equal(group: Group, what: Sequence[str]) -> None:
    """Check that all ranks pass the same lines, such as names and shapes of parameters.

    Every rank must call this function. If the lines are equal, the check costs one collective of 16 bytes.

    Raises:
        SyncError: the lines differ. Every rank raises the error, which shows the first different line on two ranks.
    """
    digest = int.from_bytes(hashlib.sha256("\n".join(what).encode()).digest()[:7], "big")
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=group.device)
    group.all_reduce(both, "max")
    if both[0].item() == -both[1].item():
        return
    of_ranks = group.gather_json(list(what))
    rank = next(r for r, lines in enumerate(of_ranks) if lines != of_ranks[0])
    number, (first, other) = next(
        (i, pair)
        for i, pair in enumerate(zip_longest(of_ranks[0], of_ranks[rank], fillvalue="nothing more"))
        if pair[0] != pair[1]
    )
    raise SyncError(
        "ranks.models_differ",
        "the ranks have different models: entry {number} is {first} on rank 0, but {other} on rank {rank}. Every rank "
        "must build the same model. Look for code that depends on the rank, on a file of the host, or on the order "
        "of a set.",
        number=number + 1,
        first=first,
        rank=rank,
        other=other,
    )


def same_machines(group: Group) -> bool:
    """Return True if the ranks have the same processors, threads and libraries.

    Every rank of the group must call this function.
    """
    device = device_name(group.device) if is_accelerator(group.device) else processor()
    kinds = group.gather_json(
        [device, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), torch.__version__]
    )
    return all(kind == kinds[0] for kind in kinds)


def processor() -> str:
    """Return the lines of /proc/cpuinfo that identify the processor; empty if there are none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    wanted = ("vendor_id", "cpu family", "model\t", "model name", "CPU implementer", "CPU part")
    return "; ".join(line for line in lines if line.startswith(wanted))


_TEXT_BYTES, _DIGEST_BYTES = 240, 16  # limits for the description of a call: readable text, and an exact digest


@dataclass
class CheckedGroup(Group):
    """View of a group that compares every call over the ranks before the call starts.

    If a call differs in collective, dtype or shape, all ranks raise a SyncError that names two of the ranks. For
    messages, only sender and receiver compare the call, and both raise the error.

    Args:
        plain: the group that makes the calls.
    """

    plain: Group = field(default_factory=Group)

    @classmethod
    def of(cls, group: Group) -> CheckedGroup:
        """Create the view of a group; view and group share one count of bytes."""
        return cls(**{each.name: getattr(group, each.name) for each in fields(group)}, plain=group)

    def start_exchange(self, send: Messages, receive: Messages, what: str = "messages") -> Pending:
        own = [(rank, _tensor(self, _line(_described(tensor)))) for rank, tensor in (*send, *receive)]
        theirs = [(rank, torch.empty_like(line)) for rank, line in own]
        # Each send to a rank is compared with that rank's receive, so the answers to this rank's sends arrive in the
        # order of its receives there.
        self.plain.exchange(own[: len(send)], theirs[len(send) :])
        self.plain.exchange(own[len(send) :], theirs[: len(send)])
        for (rank, line), (_, other) in zip(own, theirs, strict=True):
            if not torch.equal(line, other):
                raise _differ(self.rank, bytes(line.tolist()), rank, bytes(other.tolist()))
        return super().start_exchange(send, receive, what)

    def _same(self, what: str, tensor: Tensor, op: Op | None = None) -> None:
        own = _tensor(self, _line(f"{what}{f' ({op})' if op else ''} of {_described(tensor)}"))
        gathered = own.new_empty(self.size * len(own))
        self.plain.all_gather(gathered, own)
        calls = [bytes(part.tolist()) for part in gathered.cpu().split(len(own))]
        other = next((r for r, theirs in enumerate(calls) if theirs != calls[0]), None)
        if other is not None:
            raise _differ(0, calls[0], other, calls[other])


def _differ(rank: int, call: bytes, other: int, its: bytes) -> SyncError:
    return different_calls(f"rank {rank} {_text(call)}", f"rank {other} {_text(its)}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _tensor(group: Group, line: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(line), dtype=torch.uint8).to(group.device)


def _line(call: str) -> bytes:
    data = call.encode()
    return data[:_TEXT_BYTES].ljust(_TEXT_BYTES) + hashlib.sha256(data).digest()[:_DIGEST_BYTES]


def _text(line: bytes) -> str:
    return line[:_TEXT_BYTES].decode(errors="replace").rstrip()
