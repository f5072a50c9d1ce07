"""Federated rules: their interface, and the built-in rules. No sockets, no files.

A rule has two sides: the server's step, and corrections of the clients' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """Work of one client in one round.

    Attributes:
        round: number of the round, from 1.
        version: number of server steps so far, which identifies `weights`.
        weights: the shared part of the model as a flat tensor (`Layout`): trainable parameters, then buffers.
        sent: additional flat tensors of the rule, each as long as the trainable parameters.
        lr: learning rate of the local optimizer.
    """

    round: int
    version: int
    weights: Tensor
    sent: Mapping[str, Tensor]
    lr: float


@dataclass(frozen=True)
class Update:
    """Result of a client's work on a task.

    Attributes:
        client: number of the client, from 0.
        round: round of the task.
        version: version of the task.
        delta: new weights minus the task's weights, as a flat tensor.
        returned: tensors that the rule returns to the server (`FederatedRule.finish`).
        samples: number of the client's training samples.
        steps: number of local optimizer steps.
        loss: mean training loss over these steps; NaN without steps.
    """

    client: int
    round: int
    version: int
    delta: Tensor
    returned: Mapping[str, Tensor]
    samples: int
    steps: int
    loss: float


@dataclass
class Local:
    """Local training of one client, or of k clients together, as a rule sees it.

    For k clients, tensors have shape (k, p) instead of (p,), with p trainable elements.

    Attributes:
        start: parameters of the task, of shape (p,).
        sent: additional tensors of the task, each of shape (p,).
        state: tensors that the rule keeps on each client between rounds, each of shape (p,) or (k, p).
        lr: learning rate of the local optimizer.
    """

    start: Tensor
    sent: Mapping[str, Tensor]
    lr: float
    state: dict[str, Tensor] = field(default_factory=dict)


class FederatedRule:
    """A federated rule: the server's step, and the corrections of each client's gradients.

    The server has one instance of the rule, and each client has its own instance with the same arguments. The methods
    of this base class implement federated averaging with a server learning rate of 1.

    Attributes:
        client_keeps: names of tensors that a client keeps between its rounds. Each tensor is as long as the parameters
            and initially zero.
        buffer: number of updates per step of an asynchronous server; None for synchronous rounds.
        plain_sgd: True if the local optimizer must be SGD without momentum.
    """

    client_keeps: tuple[str, ...] = ()
    buffer: int | None = None
    plain_sgd: bool = False

    def start(self, parameters: Tensor, clients: int) -> None:
        """Initialise the rule with the server's initial parameters (p,) and the number of clients."""

    def sends(self) -> Mapping[str, Tensor]:
        """Return tensors of shape (p,) that every task contains in addition to the weights."""
        return {}

    def discount(self, staleness: int) -> float:
        """Return the weight of an update that began `staleness` server steps ago."""
        return 1.0

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Update the server's parameters, of shape (p,), in place.

        Args:
            mean: the aggregated update of shape (p,): the weighted mean of the clients' deltas, or a robust aggregate.
            returned: unweighted means of the tensors that the clients' `finish` returned.
            clients: number of aggregated updates.
        """
        parameters += mean

    def state_dict(self) -> dict[str, Tensor]:
        """Return the server's state, to resume a run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the server's state. Call this after `start`."""

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        """Correct the gradients of one local step in place, of shape (p,) or (k, p)."""

    def finish(self, delta: Tensor, steps: Tensor, local: Local) -> Mapping[str, Tensor]:
        """End local training, update `local.state` in place, and return tensors for the server.

        Args:
            delta: new parameters minus the task's parameters, of shape (p,) or (k, p).
            steps: number of local steps, of shape () or (k, 1).
        """
        return {}


class FedAvg(FederatedRule):
    """Federated averaging with server learning rate and momentum.

    FedAvgM: Hsu et al., 2019, arXiv:1909.06335.
    """

    def __init__(self, lr: float = 1.0, momentum: float = 0.0) -> None:
        self.lr, self.momentum = lr, momentum
        self._velocity: Tensor | None = None

    def start(self, parameters: Tensor, clients: int) -> None:
        self._velocity = torch.zeros_like(parameters) if self.momentum else None

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Apply the mean update."""
        if self._velocity is not None:
            mean = self._velocity.mul_(self.momentum).add_(mean)
        parameters.add_(mean, alpha=self.lr)

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._velocity is not None:
            self._velocity.copy_(state["velocity"])


class FedProx(FederatedRule):
    """Federated averaging with the term μ/2 · ‖w − w_server‖² in the loss of each client."""

    def __init__(self, value: float) -> None:
        self.mu = value

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        gradients.add_(parameters - local.start, alpha=self.mu)


class FedAdam(FederatedRule):
    """Adam on the server, with the mean update as the gradient and without bias correction.

    Args:
        lr: the server's learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: degree of adaptivity, which is added to the root of the second moment. The initial second moment is `tau`
            squared.
    """

    def __init__(self, lr: float, beta1: float, beta2: float, tau: float) -> None:
        self.lr, self.beta1, self.beta2, self.tau = lr, beta1, beta2, tau
        self._first = self._second = torch.empty(0)

    def start(self, parameters: Tensor, clients: int) -> None:
        self._first = torch.zeros_like(parameters)
        self._second = torch.full_like(parameters, self.tau**2)

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Update the parameters by the first moment divided by the root of the second moment."""
        self._first.mul_(self.beta1).add_(mean, alpha=1 - self.beta1)
        self.update_second(self._second, mean * mean)
        parameters.addcdiv_(self._first, self._second.sqrt().add_(self.tau), value=self.lr)

    def update_second(self, second: Tensor, square: Tensor) -> None:
        """Update the second moment in place."""
        second.mul_(self.beta2).add_(square, alpha=1 - self.beta2)

    def state_dict(self) -> dict[str, Tensor]:
        return {"first": self._first, "second": self._second}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._first.copy_(state["first"])
        self._second.copy_(state["second"])


class FedYogi(FedAdam):
    """FedAdam with a second moment that changes by a bounded amount in either direction."""

    def update_second(self, second: Tensor, square: Tensor) -> None:
        """Move the second moment towards the squared update by a share of the squared update."""
        second.sub_(square * torch.sign(second - square), alpha=1 - self.beta2)


CONTROL = "control"


class Scaffold(FederatedRule):
    """SCAFFOLD: clients correct gradients by control variates (option II of the paper).

    Each gradient is corrected by the server's control variate minus the client's. A client's control variate is the
    mean gradient of its last round, so the local optimizer must be plain SGD.
    """

    client_keeps = (CONTROL,)
    plain_sgd = True

    def __init__(self, lr: float = 1.0) -> None:
        self.lr, self.clients = lr, 1
        self._control = torch.empty(0)

    def start(self, parameters: Tensor, clients: int) -> None:
        self._control, self.clients = torch.zeros_like(parameters), clients

    def sends(self) -> Mapping[str, Tensor]:
        return {CONTROL: self._control}

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Apply the mean update and the clients' mean change of the control variate.

        The change is multiplied by the fraction of clients that took part.
        """
        parameters.add_(mean, alpha=self.lr)
        self._control.add_(returned[CONTROL], alpha=clients / self.clients)

    def state_dict(self) -> dict[str, Tensor]:
        return {CONTROL: self._control}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._control.copy_(state[CONTROL])

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        gradients.add_(local.sent[CONTROL]).sub_(local.state[CONTROL])

    def finish(self, delta: Tensor, steps: Tensor, local: Local) -> Mapping[str, Tensor]:
        """Set the client's control variate to the round's mean gradient, and return its change."""
        change = -local.sent[CONTROL] - delta / (steps * local.lr)
        local.state[CONTROL].add_(change)
        return {CONTROL: change}


class FedBuff(FederatedRule):
    """FedBuff: mean of the next `value` updates, each divided by √(1 + staleness)."""

    def __init__(self, value: int, lr: float = 1.0) -> None:
        self.buffer, self.lr = value, lr

    def discount(self, staleness: int) -> float:
        return float((1 + staleness) ** -0.5)

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Apply the mean of the discounted updates."""
        parameters.add_(mean, alpha=self.lr)
