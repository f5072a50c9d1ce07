"""The protocol of a federated rule: tasks, updates, and the two ends of a round. No sockets, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class MakesRule(Protocol):
    """Factory of a rule from its arguments; the one after the colon is `value`."""

    def __call__(self, **arguments: Any) -> FederatedRule: ...
