"""FedBuff: an asynchronous server steps when a buffer of updates is full (Nguyen et al., 2022, arXiv:2106.06639)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline_federated.rule import FederatedRule


class FedBuff(FederatedRule):
    """Mean of the next `value` updates, whichever version they began from, each over √(1 + staleness)."""

    def __init__(self, value: int, lr: float = 1.0) -> None:
        self.buffer, self.lr = value, lr

    def discount(self, staleness: int) -> float:
        """The share of a stale update that counts."""
        return float((1 + staleness) ** -0.5)

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Move along the mean of the discounted updates."""
        parameters.add_(mean, alpha=self.lr)
