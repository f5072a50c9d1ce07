"""Federated rules: their interface, and the built-in ones. No sockets, no files.

A rule has two ends: the server's step, and the corrections of clients' gradients.
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
        round: from 1.
        version: server steps before it, so the age of `weights`.
        weights: the shared part of the model, flat (`paceline_federated.client`): trainable numbers, then buffers.
        sent: further flat tensors from the rule, of the length of the trainable numbers.
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
        round, version: those of the task.
        delta: new weights less the task's, of the same length.
        returned: the rule's own tensors (`FederatedRule.finish`).
        samples: training samples that the client holds.
        steps: local optimizer steps that it took.
        loss: mean training loss over these steps; NaN where it took none.
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

    A batch has tensors of the shape (k, p) in the place of (p,), p being the trainable numbers.

    Attributes:
        start: parameters of the task, (p,).
        sent: the task's tensors, (p,) each.
        state: what the rule keeps at each client between rounds, (p,) or (k, p) each.
        lr: learning rate of the local optimizer.
    """

    start: Tensor
    sent: Mapping[str, Tensor]
    lr: float
    state: dict[str, Tensor] = field(default_factory=dict)


class FederatedRule:
    """A federated rule: the server's step, and the corrections of each client's gradients.

    The server has one instance; each client has another with the same arguments. By itself a rule is federated
    averaging with a server learning rate of 1: the methods here do that.

    Attributes:
        client_keeps: names of tensors of the length of the parameters that a client keeps between its rounds, zeros
            at first.
        buffer: updates after which an asynchronous server steps; None: rule with synchronous rounds.
        plain_sgd: the local optimizer has to be sgd without momentum.
    """

    client_keeps: tuple[str, ...] = ()
    buffer: int | None = None
    plain_sgd: bool = False

    def start(self, parameters: Tensor, clients: int) -> None:
        """Begin with the server's first parameters (p,) and the number of all clients."""

    def sends(self) -> Mapping[str, Tensor]:
        """Tensors (p,) that every task carries beside the weights."""
        return {}

    def discount(self, staleness: int) -> float:
        """Factor of an update that was begun `staleness` server steps ago."""
        return 1.0

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Step on the server's parameters (p,), in place.

        Args:
            mean: the agreed update (p,): the weighted mean of the clients' deltas, or a robust one.
            returned: the plain mean of what clients' `finish` returned.
            clients: number of updates in it.
        """
        parameters += mean

    def state_dict(self) -> dict[str, Tensor]:
        """The server's state for a resumed run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the server's state, after `start`."""

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
        """Correct gradients (p,) or (k, p) of one local step, in place."""

    def finish(self, delta: Tensor, steps: Tensor, local: Local) -> Mapping[str, Tensor]:
        """End the local training, update `local.state` in place, and return what the server needs.

        Args:
            delta: new parameters less those of the task, (p,) or (k, p).
            steps: local steps taken, () or (k, 1).
        """
        return {}


class FedAvg(FederatedRule):
    """Federated averaging, with a server learning rate and momentum (FedAvgM: Hsu et al., 2019, arXiv:1909.06335)."""

    def __init__(self, lr: float = 1.0, momentum: float = 0.0) -> None:
        self.lr, self.momentum = lr, momentum
        self._velocity: Tensor | None = None

    def start(self, parameters: Tensor, clients: int) -> None:
        self._velocity = torch.zeros_like(parameters) if self.momentum else None

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Move along the mean update."""
        if self._velocity is not None:
            mean = self._velocity.mul_(self.momentum).add_(mean)
        parameters.add_(mean, alpha=self.lr)

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._velocity is not None:
            self._velocity.copy_(state["velocity"])


class FedProx(FederatedRule):
    """Federated averaging of clients whose loss has a term μ/2 · ‖w − w_server‖²."""

    def __init__(self, value: float) -> None:
        self.mu = value

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
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
    """Clients add the server's control variate to each gradient and take off their own (option II of the paper).

    A client's is the mean gradient of its last round, so the local optimizer is plain SGD.
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
        """Move along the mean update, and the control variate by the clients' share of all."""
        parameters.add_(mean, alpha=self.lr)
        self._control.add_(returned[CONTROL], alpha=clients / self.clients)

    def state_dict(self) -> dict[str, Tensor]:
        return {CONTROL: self._control}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._control.copy_(state[CONTROL])

    def adjust(self, gradients: Tensor, parameters: Tensor, local: Local) -> None:
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
        return float((1 + staleness) ** -0.5)

    def step(self, parameters: Tensor, mean: Tensor, returned: Mapping[str, Tensor], clients: int) -> None:
        """Move along the mean of the discounted updates."""
        parameters.add_(mean, alpha=self.lr)
