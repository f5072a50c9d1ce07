"""SCAFFOLD: control variates correct the drift of clients (Karimireddy et al., 2020, arXiv:1910.06378)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline_federated.rule import FederatedRule, Local

CONTROL = "control"


class Scaffold(FederatedRule):
    """Clients add the server's control variate to each gradient and take off their own (option II of the paper).

    A client's is the mean gradient of its last round, so the local optimizer is plain SGD.
    """

    client_keeps = (CONTROL,)
    plain_sgd = True

    def __init__(self, lr: float = 1.0) -> None:
        self.lr, self.clients = lr, 1
        self._control = torch.empty(0)

    def start(self, parameters: Tensor, clients: int) -> None:
        """Begin with control variates of zero."""
        self._control, self.clients = torch.zeros_like(parameters), clients

    def sends(self) -> Mapping[str, Tensor]:
        """The server's control variate."""
        return {CONTROL: self._control}

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Move along the mean update, and the control variate by the clients' share of all."""
        parameters.add_(mean, alpha=self.lr)
        self._control.add_(returned[CONTROL], alpha=clients / self.clients)

    def state_dict(self) -> dict[str, Tensor]:
        """The server's control variate."""
        return {CONTROL: self._control}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the server's control variate."""
        self._control.copy_(state[CONTROL])

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        """Correct by the server's control variate less the client's own."""
        gradients.add_(local.sent[CONTROL]).sub_(local.state[CONTROL])

    def finish(self, delta: Tensor, steps: Tensor, local: Local) -> Mapping[str, Tensor]:
        """Take the mean gradient of the round as control variate; return its change."""
        change = -local.sent[CONTROL] - delta / (steps * local.lr)
        local.state[CONTROL].add_(change)
        return {CONTROL: change}
