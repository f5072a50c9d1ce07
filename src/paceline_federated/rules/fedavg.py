"""FedAvg: the server takes the mean of the clients' updates (McMahan et al., 2017, arXiv:1602.05629)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline_federated.rule import FederatedRule


class FedAvg(FederatedRule):
    """Federated averaging, with a server learning rate and momentum (FedAvgM: Hsu et al., 2019, arXiv:1909.06335)."""

    def __init__(self, lr: float = 1.0, momentum: float = 0.0) -> None:
        self.lr, self.momentum = lr, momentum
        self._velocity: Tensor | None = None

    def start(self, parameters: Tensor, clients: int) -> None:
        """Begin with a velocity of zero."""
        self._velocity = torch.zeros_like(parameters) if self.momentum else None

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Move along the mean update."""
        if self._velocity is not None:
            mean = self._velocity.mul_(self.momentum).add_(mean)
        parameters.add_(mean, alpha=self.lr)

    def state_dict(self) -> dict[str, Tensor]:
        """The velocity, where there is momentum."""
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the velocity."""
        if self._velocity is not None:
            self._velocity.copy_(state["velocity"])
