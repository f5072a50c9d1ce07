"""Sum of a flat tensor in coded form, with error feedback.

What the codes lost is added to the next tensor of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.sync.compress.codec import Codec, Scratch
from paceline.sync.compress.two_phase import TwoPhase
from paceline.sync.traffic import Traffic


class Chunked:
    """Sums the first `numel` numbers of a flat tensor in coded form, the others exactly.

    The `exact` others follow them.

    Between steps it holds one fp32 number per coded one (what this rank's codes lost) and one n-th of that (what those
    of the sum lost).
    """

    def __init__(self, group: Group, codec: Codec, numel: int, exact: int, traffic: Traffic, scratch: Scratch) -> None:
        self.phases = TwoPhase(group, codec, numel, exact)
        self.numel, self.traffic, self.scratch = numel, traffic, scratch
        self.error = torch.zeros(group.size, self.phases.chunk, device=group.device)
        self.sum_error = torch.zeros(self.phases.chunk, device=group.device)

    def sum(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        """Replace `flat` by its sum over the ranks; see `Compressor.sum`."""
        coded, tail = self.scratch.get("coded", self.phases.numel), flat[self.numel :]
        torch.add(flat[: self.numel], self.error.view(-1)[: self.numel], out=coded[: self.numel])
        coded[self.numel :].zero_()
        exact = self.scratch.filled("exact", self.phases.share * len(self.error), tail)
        signal = square(coded)
        finite = math.isfinite(signal)
        rows = coded.view_as(self.error)
        done = self.phases.sum(
            rows, exact.view(len(rows), -1), finite=finite, error=self.error, sum_error=self.sum_error
        )
        tail.copy_(exact[: len(tail)])
        if not done:
            flat[: self.numel] = math.nan
            return
        self.phases.read(flat[: self.numel])
        self.traffic.signal_square += signal
        self.traffic.error_square += square(self.error.view(-1))

    def state_dict(self) -> dict[str, Tensor]:
        """Error feedback of this rank, without the tensor's name; see `Compressor.state_dict`."""
        return {"error": self.error, "sum_error": self.sum_error}


def square(numbers: Tensor) -> float:
    """Squared L2 norm of a flat fp32 tensor; not finite if any element is not."""
    total = float(torch.dot(numbers, numbers))
    if math.isfinite(total) or not bool(torch.isfinite(numbers).all()):
        return total
    return float(numbers.cpu().double().square().sum())  # the numbers are only large
