"""Built-in federated rules: the server's step, and the corrections of clients' gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline_federated.rule import FederatedRule, Local


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


class FedProx(FederatedRule):
    """Federated averaging of clients whose loss has a term μ/2 · ‖w − w_server‖²."""

    def __init__(self, value: float) -> None:
        self.mu = value

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        """Add the gradient of the term."""
        gradients.add_(parameters - local.start, alpha=self.mu)


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
