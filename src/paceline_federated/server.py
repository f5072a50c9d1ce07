"""The server of federated training as a state machine without I/O."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import JobError, NonFiniteError, PlanError
from paceline.job.job import Job
from paceline.planning.sync_info import CODECS, CompressSpec
from paceline.sync.compress.alone import MessageCodec
from paceline_federated.client import Layout, federated, keys, one_key, rule_of, uniform
from paceline_federated.rules import FederatedRule, Task, Update
from paceline_federated.section import FederateSpec, PrivacySpec, trimmed_share

# purposes of random numbers, so that different uses of a seed draw different numbers
_CHOICE, _NOISE, _DOWN, _UP = 11, 12, 13, 14


class Server:
    """Owner of the shared weights, which applies aggregated updates.

    Args:
        weights: the initial weights, a flat tensor of shape (n,).
        clients: total number of clients, from which the fraction of participating clients is computed.
        adds_noise: False if other code adds the noise of differential privacy, such as Flower in a deployment.

    Attributes:
        weights: the current weights.
        version: number of steps so far.
        privacy: the spent privacy budget; None without differential privacy.
        up: codec of updates.
        down: codec of weights.

    Raises:
        JobError: settings in the job's `federate` section are incompatible, or need a package that is not installed.
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
                "federate.privacy_of_rule",
                "federate.privacy does not work with rule {rule}: its accountant supports only rules in which each "
                "client sends one clipped update per round. Use fedavg, fedprox, fedadam or fedyogi.",
                rule=self.spec.rule,
            )
        self._adds_noise = adds_noise
        self.up, self.down = codecs_of(job, layout)

    def choose(self, round: int, available: NDArray[np.int64]) -> list[int]:
        """Choose the clients of a round among the available clients.

        The same job and round always give the same choice.

        Under differential privacy each client is chosen independently, as the accountant assumes.
        """
        if self.privacy is not None and self.privacy.rate < 1:
            drawn = uniform(self.job.seed, _CHOICE, round, available) < self.privacy.rate
            return [int(client) for client in available[drawn]]
        if len(available) <= self.per_round:
            return [int(client) for client in available]
        by_chance = np.argsort(keys(self.job.seed, _CHOICE, round, available), kind="stable")
        return [int(client) for client in np.sort(available[by_chance[: self.per_round]])]

    def task(self, round: int) -> Task:
        """Return the task of every client that begins now."""
        weights = self.down.round_trip(self.weights.clone(), round)
        sent = {name: tensor.clone() for name, tensor in self.rule.sends().items()}
        return Task(round, self.version, weights, sent, self.lr_in(round))

    def lr_in(self, round: int) -> float:
        """Return the learning rate of the clients' optimizer in a round."""
        return self.job.optimizer.lr * self.job.schedule.factor_at(round - 1, self.job.stop.steps)

    @property
    def task_bytes(self) -> int:
        """Return the encoded bytes of a task's tensors."""
        return self.down.nbytes + sum(tensor.nbytes for tensor in self.rule.sends().values())

    @property
    def update_bytes(self) -> int:
        """Return the encoded bytes of an update's tensors."""
        returned = len(self.rule.client_keeps) * self.layout.parameters * self.layout.dtype.itemsize
        return self.up.nbytes + returned

    def aggregator(self, round: int) -> Aggregator:
        """Make an aggregator for the updates of the next step."""
        noise = None
        if self.privacy is not None and self._adds_noise:
            noise = torch.Generator().manual_seed(one_key(self.job.seed, _NOISE, round))
        return Aggregator(self.spec, self.layout, self.rule, chosen=float(self.per_round), noise=noise)

    def apply(self, aggregate: Aggregate) -> None:
        """Update the weights with the aggregate of a round.

        Raises:
            NonFiniteError: the new weights are not finite.
        """
        parameters = self.layout.parameters
        self.rule.step(self._parameters, aggregate.delta[:parameters], aggregate.returned, aggregate.clients)
        self.weights[parameters:] += aggregate.delta[parameters:]
        if not bool(self.weights.norm().isfinite()):
            raise NonFiniteError(
                "federate.weights_diverged",
                "the server's weights are not finite after step {step} of rule {rule}. Lower its lr or the "
                "clients' learning rate, or set federate.norm_bound.",
                step=self.version + 1,
                rule=self.spec.rule,
            )
        self.version += 1
        if self.privacy is not None:
            self.privacy.rounds += 1

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state without the weights: the rule's tensors, and plain values."""
        spent = self.privacy.rounds if self.privacy is not None else 0
        return dict(self.rule.state_dict()), {"version": self.version, "noised_rounds": spent}

    def load_state_dict(self, weights: Tensor, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the weights and the state of an earlier run of the same job."""
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
    """Return the codecs of updates and of weights, equal on a server and its clients."""
    spec, numel, dtype = federated(job), layout.numel, layout.dtype
    up = UpdateCodec(spec.compress, numel, seed=one_key(job.seed, _UP), dtype=dtype)
    down = UpdateCodec(spec.compress_down, numel, seed=one_key(job.seed, _DOWN), weights=True, dtype=dtype)
    return up, down


@dataclass(frozen=True)
class Cohort:
    """Updates of k clients that trained on one task, one row per client.

    Attributes:
        clients: numbers of the clients.
        deltas: new weights minus the task's weights, of shape (k, n).
        returned: the rule's own tensors, each of shape (k, p).
        samples: number of training samples of each client.
        steps: number of local steps of each client.
        losses: mean training loss of each client.
    """

    clients: Sequence[int]
    deltas: Tensor
    returned: Mapping[str, Tensor]
    samples: Sequence[int]
    steps: Sequence[int]
    losses: Sequence[float]

    @classmethod
    def of(cls, update: Update) -> Cohort:
        """Make a cohort of one update."""
        returned = {name: tensor.unsqueeze(0) for name, tensor in update.returned.items()}
        delta = update.delta.unsqueeze(0)
        return cls([update.client], delta, returned, [update.samples], [update.steps], [update.loss])

    def rows(self, places: Sequence[int]) -> Cohort:
        """Select some clients of the cohort."""
        if list(places) == list(range(len(self.clients))):
            return self
        index = torch.tensor(places, dtype=torch.int64)

        return Cohort(
            [self.clients[place] for place in places],
            self.deltas[index],
            {name: tensor[index] for name, tensor in self.returned.items()},
            [self.samples[place] for place in places],
            [self.steps[place] for place in places],
            [self.losses[place] for place in places],
        )


@dataclass(frozen=True)
class Aggregate:
    """Aggregate of a round's updates.

    Attributes:
        delta: the aggregated update, of shape (n,).
        returned: unweighted means of the rule's own tensors, each of shape (p,).
        clients: number of aggregated updates.
        samples: total number of samples of these clients.
        loss: mean training loss of the clients, weighted by samples.
        norm: the largest L2 norm of an update before clipping.
        clipped: number of clipped updates.
    """

    delta: Tensor
    returned: Mapping[str, Tensor]
    clients: int
    samples: int
    loss: float
    norm: float
    clipped: int


class Aggregator:
    """Aggregator of the updates of one server step, in any order.

    The mean needs the memory of only one update. Median and trimmed mean keep all updates.

    Args:
        rule: the rule, which discounts updates that began from an older version.
        chosen: expected number of updates. Differential privacy divides the sum by this number.
        noise: random generator for the noise of differential privacy; None adds no noise.

    Attributes:
        refused: reason for each refused client, by client number.
        clients: number of updates accepted so far.
    """

    def __init__(
        self,
        spec: FederateSpec,
        layout: Layout,
        rule: FederatedRule,
        *,
        chosen: float = 0.0,
        noise: torch.Generator | None = None,
    ) -> None:
        self.spec, self.layout, self.rule = spec, layout, rule
        self.chosen, self.noise = chosen, noise
        self.refused: dict[int, str] = {}
        self.clients = self._samples = self._clipped = 0
        self._delta = torch.zeros(layout.numel, dtype=layout.dtype)
        self._weight = self._loss = self._norm = 0.0
        self._returned: dict[str, Tensor] = {}
        self._kept: list[Tensor] = []
        self._trimmed = trimmed_share(spec.aggregate)
        self._bound = spec.privacy.clip if spec.privacy else spec.norm_bound

    def add(self, update: Update, staleness: int = 0) -> str | None:
        """Add the update of one client, or return the reason for its refusal."""
        reason = problem_with(update, self.layout)
        if reason is not None:
            self.refused[update.client] = reason
            return reason
        self.add_cohort(Cohort.of(update), staleness)
        return self.refused.get(update.client)

    def add_cohort(self, cohort: Cohort, staleness: int = 0) -> None:
        """Add the updates of clients with the same task. Non-finite rows are refused."""
        norms = cohort.deltas.norm(dim=1)
        finite = norms.isfinite()
        for tensor in cohort.returned.values():
            finite &= tensor.norm(dim=1).isfinite()
        if not bool(finite.all()):
            kept = finite.nonzero().flatten().tolist()
            for place, client in enumerate(cohort.clients):
                if place not in kept:
                    self.refused[client] = "its update holds NaN or Inf"
            cohort, norms = cohort.rows(kept), norms[kept]
        if cohort.clients:
            self._take(cohort, norms, staleness)

    def add_sum(
        self, total: Tensor, weight: float, returned: Mapping[str, Tensor], clients: int, samples: int, loss: float
    ) -> None:
        """Add the sum of several unknown updates (secure aggregation).

        Args:
            total: weighted sum of the updates, of shape (n,).
            weight: sum of the weights.
            returned: sums of the rule's own tensors.
            loss: mean loss of the clients.
        """
        self._delta += total.to(self._delta)
        self._add(weight, returned, clients, samples, samples * loss)

    def aggregate(self) -> Aggregate | None:
        """Return the aggregate, or None if no update was accepted."""
        if not self.clients:
            return None
        return Aggregate(
            self._mean(),
            {name: tensor / self.clients for name, tensor in self._returned.items()},
            self.clients,
            self._samples,
            self._loss / self._samples if self._samples else math.nan,
            self._norm,
            self._clipped,
        )

    def _take(self, cohort: Cohort, norms: Tensor, staleness: int) -> None:
        deltas = cohort.deltas
        equal = self.spec.weigh == "equal" or self.spec.privacy is not None
        weights = torch.ones_like(norms) if equal else torch.tensor(cohort.samples).to(norms)
        scales = torch.full_like(norms, self.rule.discount(staleness))
        if self._bound is not None:
            scales *= (self._bound / norms).clamp(max=1.0)
            self._clipped += int((norms > self._bound).sum())
        if self._trimmed == 0.0:
            self._delta += (weights * scales) @ deltas
        else:
            self._kept.append(deltas * scales.unsqueeze(1))
        self._norm = max(self._norm, float(norms.max()))
        returned = {name: tensor.sum(dim=0) for name, tensor in cohort.returned.items()}
        loss = sum(n * loss for n, loss in zip(cohort.samples, cohort.losses, strict=True))
        self._add(float(weights.sum()), returned, len(cohort.clients), sum(cohort.samples), loss)

    def _add(self, weight: float, returned: Mapping[str, Tensor], clients: int, samples: int, loss: float) -> None:
        self._weight += weight
        for name, tensor in returned.items():
            total = tensor.to(self._delta)
            self._returned[name] = self._returned[name] + total if name in self._returned else total
        self.clients += clients
        self._samples += samples
        self._loss += loss

    def _mean(self) -> Tensor:
        privacy = self.spec.privacy
        if privacy is not None:
            total = self._delta
            if self.noise is not None:
                drawn = torch.empty_like(total).normal_(0.0, privacy.noise * privacy.clip, generator=self.noise)
                total = total + drawn
            return total / self.chosen
        if self._trimmed == 0.0:
            return self._delta / self._weight
        ordered = torch.cat(self._kept).sort(dim=0).values
        middle = (len(ordered) - 1) // 2
        cut = middle if self._trimmed is None else min(int(self._trimmed * len(ordered)), middle)
        return ordered[cut : len(ordered) - cut].mean(dim=0)


def problem_with(update: Update, layout: Layout) -> str | None:
    """Return why an update is malformed, or None if it fits the layout."""
    if update.delta.shape != (layout.numel,):
        return f"its update has the shape {tuple(update.delta.shape)} instead of ({layout.numel},): another model"
    if update.delta.dtype is not layout.dtype:
        return f"its update is of {update.delta.dtype} instead of {layout.dtype}"
    for name, tensor in update.returned.items():
        if tensor.shape != (layout.parameters,):
            return f"its {name} has the shape {tuple(tensor.shape)} instead of ({layout.parameters},)"
    if update.samples < 1 or update.steps < 1:
        return f"it trained {update.steps} steps on {update.samples} samples"
    return None


class UpdateCodec:
    """Codec of flat tensors of one length.

    The seed and the numbers that come with each tensor determine the random rounding.

    Args:
        text: the codec as in a plan's `compress=`, such as `int8` or `topk:0.01+bf16`, or `none`.
        numel: number of elements of a tensor.
        weights: True if the tensors are weights, in which case every element must be sent.

    Attributes:
        exact: True if tensors are sent unencoded.
        nbytes: size of an encoded tensor in bytes.

    Raises:
        JobError: the codec is unknown, or cannot encode the numbers of a single client.
    """

    def __init__(self, text: str, numel: int, *, seed: int, weights: bool = False, dtype: torch.dtype) -> None:
        self.text, self.numel, self.seed, self.dtype = text, numel, seed, dtype
        self.exact = text == "none"
        self.nbytes = numel * dtype.itemsize
        if self.exact:
            return
        key = "federate.compress_down" if weights else "federate.compress"
        self._generator = torch.Generator()
        try:
            self._codec = MessageCodec(text, numel, self._generator)
        except PlanError as error:
            raise JobError("federate.compress_invalid", "{key}: {error}", key=key, error=error) from None
        if weights and any(CODECS[name].keeps_numbers for name, _ in CompressSpec.parse(text).codecs):
            raise JobError(
                "federate.compress_partial",
                "{key}: {text} sends only some of the numbers, but clients need every weight. Use bf16 or int8.",
                key=key,
                text=text,
            )
        plain, self.nbytes = self.nbytes, self._codec.nbytes
        if self.nbytes >= plain:
            raise JobError(
                "federate.compress_larger",
                "{key}: {text} would send {coded} bytes instead of {plain}. Leave it out for a model of {numel} "
                "numbers.",
                key=key,
                text=text,
                coded=self.nbytes,
                plain=plain,
                numel=numel,
            )

    def encode(self, flat: Tensor, *numbers: int) -> Tensor:
        """Encode a tensor of shape (numel,) as uint8; `numbers` identify the round and the client."""
        if self.exact:
            return flat.detach().contiguous().view(torch.uint8)
        self._generator.manual_seed(one_key(self.seed, *numbers))
        return self._codec.encode(flat)

    def decode(self, coded: Tensor) -> Tensor:
        """Decode a tensor of shape (numel,)."""
        if self.exact:
            return coded.view(self.dtype)
        return self._codec.decode(coded).to(self.dtype)

    def round_trip(self, flat: Tensor, *numbers: int) -> Tensor:
        """Encode and decode a tensor, and return the tensor that the other end receives."""
        return flat if self.exact else self.decode(self.encode(flat, *numbers))


class PrivacySpent:
    """Accountant of the server's steps with noised sums, which computes ε.

    Args:
        rate: probability with which each client is independently chosen in a round.

    Attributes:
        rounds: number of noised sums so far.

    Raises:
        JobError: opacus is not installed.
    """

    def __init__(self, spec: PrivacySpec, rate: float) -> None:
        try:
            from opacus.accountants import RDPAccountant
        except ImportError as error:
            raise JobError(
                "federate.opacus_missing",
                "federate.privacy needs opacus, whose accountant computes the spent privacy budget: pip install "
                "'paceline[federate]', or leave privacy out",
            ) from error
        self.spec, self.rate, self.rounds = spec, rate, 0
        self._accountant = RDPAccountant

    @property
    def epsilon(self) -> float:
        """Return ε of all rounds so far, for the job's δ."""
        if not self.rounds:
            return 0.0
        accountant = self._accountant()
        accountant.history = [(self.spec.noise, self.rate, self.rounds)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # if the optimal order is at the end of its range, the bound is loose
            return float(accountant.get_epsilon(delta=self.spec.delta))
