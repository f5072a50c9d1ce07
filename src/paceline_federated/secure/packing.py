"""An update as one vector for a secure sum, and what the sum says.

The vector is: the clipped difference times the client's weight, what the rule returns, the weight, and the loss. So the
server learns neither a client's samples nor its loss, but their sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import SecureSumError
from paceline_federated.rule import Update
from paceline_federated.secure.fixed_point import FixedPoint
from paceline_federated.secure.masks import Numbers

MOST_LOSS = 100.0  # a greater one counts as this
_ROUNDING = 1e-3  # by which a norm may be greater than what its numbers were clipped to


@dataclass(frozen=True)
class PackedSum:
    """The sum over a group of clients.

    Attributes:
        weighted: differences times weights, summed (float64).
        weight: sum of the weights.
        returned: the rule's own tensors, summed.
        loss: the clients' losses, summed.
    """

    weighted: Tensor
    weight: float
    returned: Mapping[str, Tensor]
    loss: float


class Packing:
    """Layout and scale of the vectors of a secure sum.

    Args:
        numel: length of an update's difference.
        returned: length of each tensor that the rule's clients return, by name.
        clip: L2 norm to which each of these is scaled down.
        most_samples: samples of a client of weight 1, and of every client that has more; None: all weigh the same.
        clients: in a sum, at most.
    """

    def __init__(
        self, numel: int, returned: Mapping[str, int], clip: float, most_samples: int | None, clients: int
    ) -> None:
        self.numel, self.clip, self.most_samples, self.clients = numel, clip, most_samples, clients
        self.returned: dict[str, int] = {name: returned[name] for name in sorted(returned)}
        self.numbers = numel + sum(self.returned.values()) + 2
        self._fixed = FixedPoint(clip, clients)

    def weight(self, samples: int) -> float:
        """The weight of a client with so many samples, at most 1."""
        return 1.0 if self.most_samples is None else min(samples, self.most_samples) / self.most_samples

    def samples(self, total: PackedSum, clients: int) -> int:
        """Samples of a sum's clients, to rounding; their number where all weigh the same."""
        return clients if self.most_samples is None else round(total.weight * self.most_samples)

    def pack(self, update: Update) -> Numbers:
        """A client's update as a vector.

        Raises:
            SecureSumError: it has NaN, or another form than the sum.
        """
        lengths = {name: tensor.numel() for name, tensor in update.returned.items()}
        if update.delta.numel() != self.numel or lengths != self.returned:
            raise SecureSumError(
                f"an update of {update.delta.numel():,} numbers and {lengths or 'no'} tensors of the rule, where the "
                f"sum is of {self.numel:,} and {self.returned or 'no'}"
            )
        weight = self.weight(update.samples)
        loss = min(max(update.loss, 0.0), MOST_LOSS) if math.isfinite(update.loss) else MOST_LOSS
        parts = [weight * self._clipped(update.delta)]
        parts += [self._clipped(update.returned[name]) for name in self.returned]
        parts.append(torch.tensor([weight * self.clip, loss / MOST_LOSS * self.clip], dtype=torch.float64))
        return self._fixed.encode(torch.cat(parts))

    def unpack(self, total: Numbers, clients: int) -> PackedSum:
        """The sum over so many clients.

        Raises:
            SecureSumError: no clients that keep to the bounds have such a sum: one of them poisons it.
        """
        values = self._fixed.decode(total)
        weighted, *returned, tail = values.split([self.numel, *self.returned.values(), 2])
        weight, loss = float(tail[0]) / self.clip, float(tail[1]) / self.clip * MOST_LOSS
        slack = clients * self._fixed.step / self.clip
        if not 0 < weight <= clients + slack or not -slack * MOST_LOSS <= loss <= clients * MOST_LOSS * (1 + slack):
            raise SecureSumError(f"the weights of {clients} clients sum to {weight:g}, their losses to {loss:g}")
        self._must_be_possible(weighted, weight, clients, "updates")
        for name, tensor in zip(self.returned, returned, strict=True):
            self._must_be_possible(tensor, clients, clients, name)
        return PackedSum(weighted, weight, dict(zip(self.returned, returned, strict=True)), loss)

    def _clipped(self, tensor: Tensor) -> Tensor:
        wide = tensor.detach().to("cpu", torch.float64).flatten()
        norm = float(wide.norm())
        if not math.isfinite(norm):
            raise SecureSumError("the update has NaN or Inf; nothing was sent")
        return wide if norm <= self.clip else wide * (self.clip / norm)

    def _must_be_possible(self, total: Tensor, weight: float, clients: int, what: str) -> None:
        rounding = 0.5 * clients * self._fixed.step * math.sqrt(total.numel())
        most = self.clip * weight * (1 + _ROUNDING) + rounding
        if (norm := float(total.norm())) > most:
            raise SecureSumError(
                f"the sum of {what} of {clients} clients has the norm {norm:.4g}; with each clipped to {self.clip:g} "
                f"it is at most {most:.4g}"
            )
