"""The server of federated training as a state machine, without any I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import JobError, NonFiniteError
from paceline.job.job import Job
from paceline_federated.aggregate import Aggregator, Agreed
from paceline_federated.client import federated, rule_of
from paceline_federated.codec import UpdateCodec
from paceline_federated.layout import Layout
from paceline_federated.order import keys, one_key, uniform
from paceline_federated.privacy import PrivacySpent
from paceline_federated.rule import Task

# what random numbers of a seed are for, so that no two uses draw the same
_CHOICE, _NOISE, _DOWN, _UP = 11, 12, 13, 14


class Server:
    """Holds the weights that clients share, and steps on what they agree on.

    Args:
        weights: the first ones, flat (n,).
        clients: number of all clients, for the share of them that a round has.
        adds_noise: False if something else adds privacy's noise, as Flower does in a deployment.

    Attributes:
        weights: the newest ones.
        version: steps so far.
        privacy: what was spent; None without privacy.
        up, down: codecs of updates, and of weights.

    Raises:
        JobError: the job's federated part names what does not go together or is not installed.
    """

    def __init__(self, job: Job, layout: Layout, weights: Tensor, clients: int, *, adds_noise: bool = True) -> None:
        self.job, self.spec, self.layout, self.clients = job, federated(job), layout, clients
        self.weights, self.version = weights.clone(), 0
        self.rule = rule_of(job)
        self.rule.start(self._parameters, clients)
        self.per_round = min(self.spec.per_round or clients, clients)
        self.privacy = PrivacySpent(self.spec.privacy, self.per_round / clients) if self.spec.privacy else None
        if self.privacy is not None and (self.rule.buffer is not None or self.rule.client_keeps):
            raise JobError(
                f"federate.privacy does not go with rule {self.spec.rule}: its accountant counts sums of rounds in "
                "which each client sends one clipped update. Take fedavg, fedprox, fedadam or fedyogi"
            )
        self._adds_noise = adds_noise
        self.up, self.down = codecs_of(job, layout)

    def choose(self, round: int, available: NDArray[np.int64]) -> list[int]:
        """Clients of a round, out of those that are there.

        The same job and round have the same ones.

        Under differential privacy each is chosen independently of the others, as its accountant assumes.
        """
        if self.privacy is not None and self.privacy.rate < 1:
            drawn = uniform(self.job.seed, _CHOICE, round, available) < self.privacy.rate
            return [int(client) for client in available[drawn]]
        if len(available) <= self.per_round:
            return [int(client) for client in available]
        by_chance = np.argsort(keys(self.job.seed, _CHOICE, round, available), kind="stable")
        return [int(client) for client in np.sort(available[by_chance[: self.per_round]])]

    def task(self, round: int) -> Task:
        """The task of every client that begins now."""
        factor = self.job.schedule.factor_at(round - 1, self.job.stop.steps)
        weights = self.down.round_trip(self.weights.clone(), round)
        sent = {name: tensor.clone() for name, tensor in self.rule.sends().items()}
        return Task(round, self.version, weights, sent, self.job.optimizer.lr * factor)

    @property
    def task_bytes(self) -> int:
        """Bytes of a task's tensors as they are sent."""
        return self.down.nbytes + sum(tensor.nbytes for tensor in self.rule.sends().values())

    @property
    def update_bytes(self) -> int:
        """Bytes of an update's tensors as they are sent."""
        returned = len(self.rule.client_keeps) * self.layout.parameters * self.layout.dtype.itemsize
        return self.up.nbytes + returned

    def aggregator(self, round: int) -> Aggregator:
        """Takes the updates of the next step."""
        noise = None
        if self.privacy is not None and self._adds_noise:
            noise = torch.Generator().manual_seed(one_key(self.job.seed, _NOISE, round))
        return Aggregator(self.spec, self.layout, self.rule, chosen=float(self.per_round), noise=noise)

    def apply(self, agreed: Agreed) -> None:
        """Step on an agreement.

        Raises:
            NonFiniteError: the new weights are not finite.
        """
        parameters = self.layout.parameters
        self.rule.step(self._parameters, agreed.delta[:parameters], agreed.returned, agreed.clients)
        self.weights[parameters:] += agreed.delta[parameters:]
        if not bool(self.weights.norm().isfinite()):
            raise NonFiniteError(
                f"the server's weights are not finite after step {self.version + 1} of rule {self.spec.rule}: lower "
                "its lr or the clients' learning rate, or set federate.norm_bound"
            )
        self.version += 1
        if self.privacy is not None:
            self.privacy.step()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """State beside the weights: the rule's tensors, and plain values."""
        spent = self.privacy.rounds if self.privacy is not None else 0
        return dict(self.rule.state_dict()), {"version": self.version, "noised_rounds": spent}

    def load_state_dict(self, weights: Tensor, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore weights and state of an earlier run of the same job."""
        self.weights = weights.clone()
        self.rule.start(self._parameters, self.clients)
        self.rule.load_state_dict(tensors)
        self.version = int(values["version"])
        if self.privacy is not None:
            self.privacy.rounds = int(values["noised_rounds"])

    @property
    def _parameters(self) -> Tensor:
        return self.weights[: self.layout.parameters]


def codecs_of(job: Job, layout: Layout) -> tuple[UpdateCodec, UpdateCodec]:
    """The codecs of updates and of weights, alike on a server and its clients."""
    spec, numel, dtype = federated(job), layout.numel, layout.dtype
    up = UpdateCodec(spec.compress, numel, seed=one_key(job.seed, _UP), dtype=dtype)
    down = UpdateCodec(spec.compress_down, numel, seed=one_key(job.seed, _DOWN), weights=True, dtype=dtype)
    return up, down


def with_samples(samples: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of the clients that have any sample."""
    return np.flatnonzero(np.asarray(samples) > 0)
