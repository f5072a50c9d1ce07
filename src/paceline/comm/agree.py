"""Agreement of all ranks: the same things held, equal machines, or the largest value."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch

from paceline.comm.group import Group
from paceline.device import is_accelerator, widest_float
from paceline.device_info import name as device_name
from paceline.errors import SyncError


def greatest(group: Group, value: float) -> float:
    """The maximum of a number over all ranks, the same on each of them. Every rank calls it."""
    tensor = torch.tensor([value], dtype=widest_float(group.device), device=group.device)
    group.all_reduce(tensor, "max")
    return float(tensor)


def agree_on(group: Group, what: Sequence[str]) -> None:
    """Check that all ranks bring the same lines, e.g. name, shape and dtype of parameters.

    Every rank calls it. It costs one collective of 16 bytes if they agree.

    Raises:
        SyncError: on every rank; names the first line that differs, and what two ranks have there.
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
        f"the ranks do not hold the same: number {number + 1} of rank 0 is {first}, of rank {rank} it is "
        f"{other}. Every rank must build "
        "the same model; look for what depends on the rank, on a file of its host, or on the order of a set."
    )


def same_machines(group: Group) -> bool:
    """True if the ranks have the same processors, threads and libraries. Every rank of the group calls it."""
    device = device_name(group.device) if is_accelerator(group.device) else _processor()
    kinds = group.gather_json(
        [device, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), torch.__version__]
    )
    return all(kind == kinds[0] for kind in kinds)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    wanted = ("vendor_id", "cpu family", "model\t", "model name", "CPU implementer", "CPU part")
    return "; ".join(line for line in lines if line.startswith(wanted))
