"""FedAdam and FedYogi: the server steps adaptively on the mean update (Reddi et al., 2021, arXiv:2003.00295)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline_federated.rule import FederatedRule


class FedAdam(FederatedRule):
    """Adam on the server, with the mean update as gradient, without bias correction.

    Args:
        lr: the server's learning rate.
        beta1, beta2: decay of the first and second moment.
        tau: adaptivity, added to the root of the second moment, which begins at its square.
    """

    def __init__(self, lr: float, beta1: float, beta2: float, tau: float) -> None:
        self.lr, self.beta1, self.beta2, self.tau = lr, beta1, beta2, tau
        self._first = self._second = torch.empty(0)

    def start(self, parameters: Tensor, clients: int) -> None:
        """Begin with the moments of the paper's algorithm 2."""
        self._first = torch.zeros_like(parameters)
        self._second = torch.full_like(parameters, self.tau**2)

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Move by the first moment over the root of the second."""
        self._first.mul_(self.beta1).add_(mean, alpha=1 - self.beta1)
        self.update_second(self._second, mean * mean)
        parameters.addcdiv_(self._first, self._second.sqrt().add_(self.tau), value=self.lr)

    def update_second(self, second: Tensor, square: Tensor) -> None:
        """Update the second moment in place."""
        second.mul_(self.beta2).add_(square, alpha=1 - self.beta2)

    def state_dict(self) -> dict[str, Tensor]:
        """Both moments."""
        return {"first": self._first, "second": self._second}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the moments."""
        self._first.copy_(state["first"])
        self._second.copy_(state["second"])


class FedYogi(FedAdam):
    """FedAdam, whose second moment changes by a bounded amount in either direction."""

    def update_second(self, second: Tensor, square: Tensor) -> None:
        """Move the second moment towards the square by a share of the square."""
        second.sub_(square * torch.sign(second - square), alpha=1 - self.beta2)
