"""Cost of a codec: time to code and bytes to send, measured on this machine.

The measurement is a compressed sum whose messages go nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.comm.allreduce.point_to_point import Messages
from paceline.sync.compress.compressor import Compressor
from paceline.sync.traffic import Traffic

_SAMPLE = 2**22  # numbers of the model that are coded; what they cost is taken to grow with their count
_REPEATS = 2


@dataclass(frozen=True)
class CodecCost:
    """Cost of one coded sum: `coding_s` seconds of computing on this rank, and bytes sent."""

    coding_s: float
    sent_bytes: float


def measure_codec(codec: str, group: Group, buckets: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> CodecCost:
    """Measure the cost of coding random numbers in the shapes of `buckets`.

    `buckets` are flat tensors and their views, as for `Compressor.sum`; they are not changed.
    """
    cost_s, sample = 0.0, 0
    traffic, random = Traffic(), torch.Generator(group.device).manual_seed(0)  # not the generator that training uses
    compressor = Compressor(
        codec, _Alone(rank=group.rank, size=group.size, hosts=group.hosts, device=group.device), traffic
    )
    for i, (flat, views) in enumerate(buckets):
        taken = _first(views, _SAMPLE - sample)
        numel = sum(view.numel() for view in taken)
        if numel == 0:
            continue
        numbers = torch.randn(numel, device=group.device, generator=random)
        own = torch.empty(numel, dtype=flat.dtype, device=group.device)
        parts = [
            part.view(view.shape) for part, view in zip(own.split([view.numel() for view in taken]), taken, strict=True)
        ]
        cost_s += min(_timed_s(compressor, f"{i}", own, parts, numbers) for _ in range(1 + _REPEATS))
        sample += numel
    sent = traffic.sent_bytes / (1 + _REPEATS)
    grows = sum(view.numel() for _, views in buckets for view in views) / max(sample, 1)
    return CodecCost(cost_s * grows, sent * grows)


def _first(views: Sequence[Tensor], limit: int) -> list[Tensor]:
    """The first views with `limit` numbers in all, at least one for a positive limit."""
    taken: list[Tensor] = []
    for view in views:
        if limit <= 0:
            break
        taken.append(view)
        limit -= view.numel()
    return taken


def _timed_s(compressor: Compressor, name: str, flat: Tensor, views: Sequence[Tensor], numbers: Tensor) -> float:
    flat.copy_(numbers)
    wait_for(flat.device)
    started = time.perf_counter()
    compressor.sum(name, flat, views)
    wait_for(flat.device)
    return time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Alone(Group):
    """A rank that gets its own messages back."""

    def exchange(self, send: Messages, receive: Messages) -> None:
        for (_, own), (_, theirs) in zip(send, receive, strict=True):
            theirs.copy_(own)

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> None:
        """Leave it as it is."""

    def gather_json(self, value: Any) -> list[Any]:
        return [value] * self.size
