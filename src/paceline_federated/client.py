"""Local training of one client: steps on its own samples, and the update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.samples import RequestedSamples
from paceline.errors import JobError
from paceline.job.batch import place, target_of
from paceline.job.job import Job
from paceline.job.loss_items import call
from paceline.job.zoo.losses import build_loss
from paceline.run.build import seed_all
from paceline.text import nearest
from paceline_federated.rules import FederatedRule, Local, Task, Update
from paceline_federated.section import FederatedRuleSpec, FederateSpec, federate_spec

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_DROPOUT = 1  # purpose of all random numbers except the order of samples


@dataclass
class ClientState:
    """State that a client keeps between its rounds.

    Attributes:
        rule: tensors of the rule, each of shape (p,); empty before the first round.
        personal: parameters that stay on the client, by name; empty before the first round.
    """

    rule: dict[str, Tensor] = field(default_factory=dict)
    personal: dict[str, Tensor] = field(default_factory=dict)


class LocalTraining:
    """Local training of a job's clients, one at a time, in one model.

    Args:
        model: the job's initial model. Training overwrites its weights.

    Attributes:
        layout: the tensors that clients and server share.
        rule: the client's side of the rule.
        work: amount of work of a client per round.

    Raises:
        JobError: the job's settings are incompatible with its rule.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        spec = federated(job)
        self.job, self.model, self.loss = job, model, build_loss(job.loss)
        self.layout, self.work = Layout.of(model, spec.personal), Work.of(job)
        self.rule = rule_of(job)
        self.adjusts = type(self.rule).adjust is not FederatedRule.adjust
        held = tensors_of(model)
        self.first_personal = {name: held[name].detach().clone() for name in self.layout.personal}
        self._unshared = {
            name: held[name].detach().clone()
            for name in held
            if name not in self.layout.names and name not in self.first_personal
        }

    def train(self, task: Task, client: int, dataset: Dataset[Any], state: ClientState) -> Update:
        """Train one client on a task.

        Args:
            client: number of the client, which determines the order of the client's samples.
            dataset: the client's own samples, which are all used for training.
            state: the client's state, which is updated in place.

        Raises:
            DataError: a sample cannot be read, or does not match the model.
        """
        samples = len(dataset)  # type: ignore[arg-type]
        self._begin(task, state)
        reader = RequestedSamples(dataset, None, client, self.job.seed)
        start = task.weights[: self.layout.parameters]
        local = Local(start, task.sent, task.lr, state.rule)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = self.job.optimizer.model_copy(update={"lr": task.lr}).build(trained)
        losses = []
        with drawing_from(one_key(self.job.seed, _DROPOUT, task.round, client)):
            for indices in self.work.batches(client, task.round, samples):
                optimizer.zero_grad()
                losses.append(self._backward(reader.read(indices.tolist())))
                if self.job.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(trained, self.job.clip_norm)
                if self.adjusts:
                    self._adjust(local)
                optimizer.step()
        delta = self.layout.flatten(self.model) - task.weights
        steps = torch.tensor(float(len(losses)), dtype=self.layout.dtype)
        returned = self.rule.finish(delta[: self.layout.parameters], steps, local) if losses else {}
        held = tensors_of(self.model)
        state.personal = {name: held[name].detach().clone() for name in self.layout.personal}
        mean = float(torch.stack(losses).double().mean()) if losses else float("nan")
        return Update(client, task.round, task.version, delta, returned, samples, len(losses), mean)

    @torch.no_grad()
    def show(self, weights: Tensor, state: ClientState | None = None) -> nn.Module:
        """Load the server's weights into the model, and a client's personal parameters if given."""
        self.layout.load(self.model, weights)
        held, personal = tensors_of(self.model), self.first_personal | (state.personal if state else {})
        for name, tensor in {**self._unshared, **personal}.items():
            held[name].copy_(tensor)
        return self.model

    def _begin(self, task: Task, state: ClientState) -> None:
        self.show(task.weights, state)
        self.model.train()
        for name in self.rule.client_keeps:
            if name not in state.rule:
                state.rule[name] = torch.zeros(self.layout.parameters, dtype=self.layout.dtype)

    def _backward(self, batch: Any) -> Tensor:
        """Compute the gradients of a batch, and return its loss."""
        batch = place(batch, torch.device("cpu"), dtype=self._input_dtype, channels_last=False)
        loss: Tensor = self.loss(call(self.model, batch, loss=self.loss), target_of(batch))
        loss.backward()
        return loss.detach()

    @property
    def _input_dtype(self) -> torch.dtype | None:
        return None if self.layout.dtype is torch.float32 else self.layout.dtype

    @torch.no_grad()
    def _adjust(self, local: Local) -> None:
        held = dict(self.model.named_parameters())
        names = self.layout.names[: self.layout.trainable]
        grads = [torch.zeros_like(held[n]) if (g := held[n].grad) is None else g for n in names]
        gradients = torch.cat([g.reshape(-1) for g in grads])
        parameters = torch.cat([held[n].reshape(-1) for n in names])
        self.rule.adjust(gradients, parameters, local)
        for name, gradient in zip(names, gradients.split(self.layout.sizes[: len(names)]), strict=True):
            held[name].grad = gradient.view_as(held[name])


def first_model(job: Job) -> nn.Module:
    """Build the job's initial model, which is the same in every run.

    Raises:
        JobError: clients do not support the job's precision.
    """
    if job.precision not in _DTYPES:
        raise JobError(
            "federate.precision",
            "precision {precision}: federated clients compute only in fp32 or fp64",
            precision=job.precision,
        )
    seed_all(job.seed)
    return job.model.build().to(_DTYPES[job.precision])


def rule_of(job: Job) -> FederatedRule:
    """Make a new instance of the job's rule.

    Raises:
        JobError: the rule is unknown, or is incompatible with the job's optimizer.
    """
    spec = federated(job)
    rule, name = FederatedRuleSpec.parse(spec.rule).build(), job.optimizer.name
    if rule.plain_sgd and (name != "sgd" or job.optimizer.momentum or job.clip_norm is not None):
        raise JobError(
            "federate.rule_needs_sgd",
            "federate.rule {rule} computes the clients' mean gradient from the change of their weights, so it "
            "needs optimizer: {{name: sgd}} without momentum, and no clip_norm",
            rule=spec.rule,
        )
    return rule


def federated(job: Job) -> FederateSpec:
    """Return the validated `federate` section of a job.

    Raises:
        JobError: the job has no such section, or uses features that federated training does not support.
    """
    spec = federate_spec(job)
    if job.stop.epochs is not None:
        raise JobError(
            "federate.epochs",
            "stop.epochs: a federated run counts rounds, not epochs. Set stop.steps to the number of rounds.",
        )
    if job.data.test is not None:
        raise JobError(
            "federate.test_set",
            "data.test: a federated run does not evaluate a test set. Leave it out, and use paceline evaluate RUN "
            "--data FILE.",
        )
    if job.checkpoint.best is not None:
        raise JobError(
            "federate.best_checkpoint",
            "checkpoint.best: a federated run keeps only its newest checkpoints. Leave it out.",
        )
    if job.nonfinite != "stop" or job.spike.policy != "off":
        raise JobError(
            "federate.nonfinite",
            "nonfinite and spike apply only to paceline train. A federated run always refuses updates with NaN or Inf.",
        )
    if keys := job.beyond_plain_steps:
        raise JobError(
            "federate.optimizer_unsupported",
            "{keys}: federated clients do not support these settings. Use sgd, adam, adamw, lars or lamb for all "
            "parameters, and a constant, linear, cosine or step schedule.",
            keys=list(keys),
        )
    if job.trackers:
        raise JobError(
            "federate.trackers",
            "trackers work only with paceline train. A federated run has only its own record. Leave trackers out.",
        )
    return spec


@dataclass(frozen=True)
class Layout:
    """Layout of the flat shared tensor: trainable parameters, followed by floating-point buffers.

    Frozen parameters and integer buffers are not shared, and keep their initial values.

    Attributes:
        names: names of the shared tensors, in order.
        shapes: shape of each shared tensor.
        trainable: number of shared tensors that are parameters.
        personal: names of the parameters that stay on the client.
        dtype: dtype of the flat tensor.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trainable: int
    personal: tuple[str, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module, personal: Sequence[str] = ()) -> Layout:
        """Return the layout of a model.

        Args:
            personal: name patterns of parameters that stay on the client, such as `head.*`.

        Raises:
            JobError: a pattern matches no parameter, or no parameter remains to be shared.
        """
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for pattern in personal:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                raise JobError(
                    "federate.personal_unmatched",
                    'federate.personal: "{pattern}" matches no trainable parameter of the model. {hint}',
                    pattern=pattern,
                    hint=nearest(pattern, list(parameters)),
                )
        kept = {name for name in parameters if any(fnmatchcase(name, pattern) for pattern in personal)}
        shared = {name: p for name, p in parameters.items() if name not in kept}
        if not shared:
            raise JobError(
                "federate.all_personal",
                "federate.personal keeps every trainable parameter on the clients. Share at least one parameter.",
            )
        buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        tensors: dict[str, Tensor] = {**shared, **buffers}
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1:
            raise JobError(
                "federate.mixed_types",
                "federated training needs one floating-point type, but the model has {dtypes}. Convert it with "
                "model.float().",
                dtypes=list(dtypes),
            )
        shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        return cls(tuple(tensors), shapes, len(shared), tuple(sorted(kept)), dtypes.pop())

    @property
    def sizes(self) -> list[int]:
        """Number of elements in each shared tensor."""
        return [prod(shape) for shape in self.shapes]

    @property
    def parameters(self) -> int:
        """Number of trainable elements, which come first."""
        return sum(self.sizes[: self.trainable])

    @property
    def numel(self) -> int:
        """Total number of elements."""
        return sum(self.sizes)

    def flatten(self, model: nn.Module) -> Tensor:
        """Copy a model's shared tensors to a flat tensor of shape (n,)."""
        held = tensors_of(model)
        return torch.cat([held[name].detach().reshape(-1) for name in self.names])

    @torch.no_grad()
    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Overwrite a model's shared tensors with a flat tensor."""
        held = tensors_of(model)
        for name, value in self.named(flat).items():
            held[name].copy_(value)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a tensor of shape (n,) or (k, n) into named views of the original shapes."""
        parts = flat.split(self.sizes, dim=-1)
        return {
            name: part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }


def tensors_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the parameters and buffers of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """Local work of a job's clients.

    Attributes:
        batch: number of samples per step. The last step of an epoch has the remaining samples.
        epochs: number of passes over the samples per round, if `steps` is None.
        steps: number of optimizer steps per round.
        seed: seed for the order of samples.
    """

    batch: int
    epochs: int
    steps: int | None
    seed: int

    @classmethod
    def of(cls, job: Job) -> Work:
        """Return the work of a job's clients."""
        spec = federate_spec(job)
        return cls(spec.batch or job.global_batch, spec.epochs, spec.local_steps, job.seed)

    def step_count(self, samples: int) -> int:
        """Return the number of optimizer steps of a client with this number of samples."""
        if not samples:
            return 0
        return self.steps or self.epochs * -(-samples // self.batch)

    def step_counts(self, samples: Ints) -> Ints:
        """Return the number of optimizer steps of several clients."""
        steps = self.epochs * -(-samples // self.batch) if self.steps is None else np.full_like(samples, self.steps)
        return np.where(samples > 0, steps, 0)

    def batches(self, client: int, round: int, samples: int) -> Iterator[Ints]:
        """Iterate over the steps of a round, and yield the sample indices of each step.

        Index 0 is the client's first sample.
        """
        left, epoch = self.step_count(samples), 0
        while left:
            indices = order(self.seed, client, round, epoch, samples)
            for start in range(0, samples, self.batch):
                yield indices[start : start + self.batch]
                left -= 1
                if not left:
                    return
            epoch += 1


_GAMMA_INT, _FIRST_INT, _SECOND_INT = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GAMMA, _FIRST, _SECOND = np.uint64(_GAMMA_INT), np.uint64(_FIRST_INT), np.uint64(_SECOND_INT)
_MASK = 2**64 - 1


def keys(*numbers: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash each combination of the broadcast `numbers` to 64 random bits.

    SplitMix64: Steele et al., 2014.
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for number in numbers:
            state = state + np.asarray(number).astype(np.uint64) + _GAMMA
            state = (state ^ (state >> np.uint64(30))) * _FIRST
            state = (state ^ (state >> np.uint64(27))) * _SECOND
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def uniform(*numbers: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return random numbers in [0, 1), computed with `keys`."""
    return (keys(*numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def one_key(*numbers: int) -> int:
    """Return a random integer in [0, 2^63): the result of `keys` divided by 2."""
    state = 0
    for number in numbers:
        state = (state + number + _GAMMA_INT) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST_INT) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND_INT) & _MASK
        state ^= state >> 31
    return state >> 1


def order(seed: int, client: int, round: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Return the order of a client's samples in one epoch of a round."""
    return np.argsort(keys(seed, round, epoch, client, np.arange(samples)), kind="stable")


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed torch's random numbers on the CPU within this context.

    This is faster than `torch.manual_seed`, which also records a traceback for each type of accelerator.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
