"""Federated rules: their interface, and the built-in ones. No sockets, no files.

A rule has two sides: the server's step, and corrections of clients' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """The work of one client in one round.

    Attributes:
        round: number of the round, from 1.
        version: number of earlier server steps, which identifies `weights`.
        weights: the shared part of the model as a flat tensor (`Layout`): trainable parameters, then buffers.
        sent: additional flat tensors from the rule, of the length of the trainable parameters.
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
        round, version: as in the task.
        delta: new weights minus the task's weights, of the same length.
        returned: the rule's own tensors (`FederatedRule.finish`).
        samples: number of the client's training samples.
        steps: number of local optimizer steps.
        loss: mean training loss over these steps; NaN if there were none.
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
    """Local training of one client, or of k clients together, from a rule's view.

    For k clients, tensors have shape (k, p) instead of (p,), with p trainable elements.

    Attributes:
        start: parameters of the task, (p,).
        sent: the task's additional tensors, (p,) each.
        state: tensors that the rule keeps on each client between rounds, (p,) or (k, p) each.
        lr: learning rate of the local optimizer.
    """

    start: Tensor
    sent: Mapping[str, Tensor]
    lr: float
    state: dict[str, Tensor] = field(default_factory=dict)


class FederatedRule:
    """A federated rule: the server's step, and the corrections of each client's gradients.

    The server has one instance, and each client has its own instance with the same arguments. The methods of this base
    class implement federated averaging with a server learning rate of 1.

    Attributes:
        client_keeps: names of tensors that a client keeps between its rounds, of the length of the parameters and
            initially zero.
        buffer: number of updates per step of an asynchronous server; None for synchronous rounds.
        plain_sgd: True if the local optimizer must be sgd without momentum.
    """

    client_keeps: tuple[str, ...] = ()
    buffer: int | None = None
    plain_sgd: bool = False

    def start(self, parameters: Tensor, clients: int) -> None:
        """Initialise with the server's first parameters (p,) and the number of all clients."""

    def sends(self) -> Mapping[str, Tensor]:
        """Return tensors (p,) that every task carries in addition to the weights."""
        return {}

    def discount(self, staleness: int) -> float:
        """Return the factor of an update that began `staleness` server steps ago."""
        return 1.0

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Step the server's parameters (p,) in place.

        Args:
            mean: the aggregated update (p,): the weighted mean of the clients' deltas, or a robust aggregate.
            returned: the unweighted mean of the tensors that clients' `finish` returned.
            clients: number of aggregated updates.
        """
        parameters += mean

    def state_dict(self) -> dict[str, Tensor]:
        """Return the server's state, to resume a run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the server's state, after `start`."""

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        """Correct gradients (p,) or (k, p) of one local step, in place."""

    def finish(self, delta: Tensor, steps: Tensor, local: Local) -> Mapping[str, Tensor]:
        """End local training, update `local.state` in place, and return tensors for the server.

        Args:
            delta: new parameters minus the task's parameters, (p,) or (k, p).
            steps: number of local steps, () or (k, 1).
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
    """Federated averaging with a term μ/2 · ‖w − w_server‖² in the clients' loss."""

    def __init__(self, value: float) -> None:
        self.mu = value

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        gradients.add_(parameters - local.start, alpha=self.mu)


class FedAdam(FederatedRule):
    """Adam on the server, with the mean update as gradient, without bias correction.

    Args:
        lr: the server's learning rate.
        beta1, beta2: decay of the first and second moment.
        tau: degree of adaptivity, added to the root of the second moment. The second moment begins at `tau` squared.
    """

    def __init__(self, lr: float, beta1: float, beta2: float, tau: float) -> None:
        self.lr, self.beta1, self.beta2, self.tau = lr, beta1, beta2, tau
        self._first = self._second = torch.empty(0)

    def start(self, parameters: Tensor, clients: int) -> None:
        self._first = torch.zeros_like(parameters)
        self._second = torch.full_like(parameters, self.tau**2)

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Apply the first moment divided by the root of the second moment."""
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
    """FedAdam, whose second moment changes by a bounded amount in either direction."""

    def update_second(self, second: Tensor, square: Tensor) -> None:
        """Move the second moment towards the square by a share of the square."""
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
        """Apply the mean update, and move the control variate by the participating fraction."""
        parameters.add_(mean, alpha=self.lr)
        self._control.add_(returned[CONTROL], alpha=clients / self.clients)

    def state_dict(self) -> dict[str, Tensor]:
        return {CONTROL: self._control}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._control.copy_(state[CONTROL])

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        gradients.add_(local.sent[CONTROL]).sub_(local.state[CONTROL])

    def finish(self, delta: Tensor, steps: Tensor, local: Local) -> Mapping[str, Tensor]:
        """Set the control variate to the round's mean gradient, and return its change."""
        change = -local.sent[CONTROL] - delta / (steps * local.lr)
        local.state[CONTROL].add_(change)
        return {CONTROL: change}


class FedBuff(FederatedRule):
    """Mean of the next `value` updates, each divided by √(1 + staleness)."""

    def __init__(self, value: int, lr: float = 1.0) -> None:
        self.buffer, self.lr = value, lr

    def discount(self, staleness: int) -> float:
        return float((1 + staleness) ** -0.5)

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Apply the mean of the discounted updates."""
        parameters.add_(mean, alpha=self.lr)
