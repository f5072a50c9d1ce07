"""FedProx: clients are held near the server's parameters (Li et al., 2020, arXiv:1812.06127)."""

from __future__ import annotations

from torch import Tensor

from paceline_federated.rule import FederatedRule, Local


class FedProx(FederatedRule):
    """Federated averaging of clients whose loss has a term μ/2 · ‖w − w_server‖²."""

    def __init__(self, value: float) -> None:
        self.mu = value

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        """Add the gradient of the term."""
        gradients.add_(parameters - local.start, alpha=self.mu)
