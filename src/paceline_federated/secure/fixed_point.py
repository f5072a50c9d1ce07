"""Real numbers as integers modulo 2^32, whose sum is exact and cannot overflow."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.errors import SecureSumError
from paceline_federated.secure.masks import Numbers

_LARGEST = 2**31 - 1  # of a sum, either sign


class FixedPoint:
    """Numbers of at most `bound`, for sums over at most `clients`.

    Attributes:
        step: distance between two numbers; a sum is off by at most half of it per client.
    """

    def __init__(self, bound: float, clients: int) -> None:
        if not (math.isfinite(bound) and bound > 0):
            raise SecureSumError(f"the bound of a secure sum is a positive number, not {bound}")
        if not 1 <= clients <= 2**20:
            raise SecureSumError(f"a secure sum is over 1 to {2**20:,} clients, not {clients}")
        self.bound, self.clients = bound, clients
        self._levels = _LARGEST // clients
        self.step = bound / self._levels

    def encode(self, values: Tensor) -> Numbers:
        """One client's numbers (1-D, any floating type) as integers.

        Raises:
            SecureSumError: one is NaN or beyond the bound. Nothing would tell it from another number once it is masked.
        """
        wide = values.detach().to("cpu", torch.float64)
        # a NaN is not within the bound either
        beyond = ~(wide.abs() <= self.bound)
        if beyond.any():
            at = int(beyond.nonzero()[0])
            raise SecureSumError(
                f"number {at} of {len(wide):,} is {float(wide[at]):g}, beyond the bound of {self.bound:g} that a "
                "secure sum is set to; nothing was sent. Clip updates, or raise the bound."
            )
        levels = torch.round(wide / self.step).clamp_(-self._levels, self._levels)
        return levels.to(torch.int32).numpy().view(np.uint32)

    def decode(self, total: Numbers) -> Tensor:
        """The sum of the clients' numbers (1-D, float64)."""
        return torch.from_numpy(total.view(np.int32).astype(np.float64) * self.step)
