"""Local training of one client: some steps on its own samples, and the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.samples import RequestedSamples
from paceline.errors import JobError
from paceline.job.batch import place, target_of
from paceline.job.job import Job
from paceline.job.zoo.losses import build_loss, call
from paceline.run.build import seed_all
from paceline_federated.layout import Layout, tensors_of
from paceline_federated.order import drawing_from, one_key
from paceline_federated.rule import FederatedRule, Local, Task, Update
from paceline_federated.rule_info import FederatedRuleSpec
from paceline_federated.section import FederateSpec, federate_spec
from paceline_federated.work import Work

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_DROPOUT = 1  # beside the order of samples


@dataclass
class ClientState:
    """State that a client keeps from one of its rounds to the next.

    Attributes:
        rule: tensors of the rule, (p,) each; empty before the first round.
        personal: parameters that are not shared, by name; empty before the first round.
    """

    rule: dict[str, Tensor] = field(default_factory=dict)
    personal: dict[str, Tensor] = field(default_factory=dict)


class LocalTraining:
    """Trains clients of a job, one at a time, in one model.

    Args:
        model: as the job begins it; its weights are overwritten.

    Attributes:
        layout: what clients and server share.
        rule: the clients' end of the rule.
        work: how much a client does in a round.

    Raises:
        JobError: the job does not fit its rule.
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
            client: its number, on which the order of its samples depends.
            dataset: its own samples, all for training.
            state: what it kept; updated in place.

        Raises:
            DataError: a sample cannot be read, or does not fit.
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
        """The model with a server's weights, and a client's own parts, if given."""
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
        """Make the gradients of a batch; returns its loss."""
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
    """The model as every run of the job begins it.

    Raises:
        JobError: its precision is not one for clients.
    """
    if job.precision not in _DTYPES:
        raise JobError(f"precision {job.precision}: federated clients compute in fp32 or fp64")
    seed_all(job.seed)
    return job.model.build().to(_DTYPES[job.precision])


def rule_of(job: Job) -> FederatedRule:
    """A new instance of the job's rule.

    Raises:
        JobError: the rule is unknown, or does not go with the job's optimizer.
    """
    spec = federated(job)
    rule, name = FederatedRuleSpec.parse(spec.rule).build(), job.optimizer.name
    if rule.plain_sgd and (name != "sgd" or job.optimizer.momentum or job.clip_norm is not None):
        raise JobError(
            f"federate.rule {spec.rule} takes the clients' mean gradient from how far they moved, so it needs "
            "optimizer: {name: sgd} without momentum, and no clip_norm"
        )
    return rule


def federated(job: Job) -> FederateSpec:
    """The federated part of a job.

    Raises:
        JobError: it has none, or names what federated training does not have.
    """
    spec = federate_spec(job)
    if job.stop.epochs is not None:
        raise JobError("stop.epochs: clients have epochs of their own; a federated run counts rounds, as stop.steps")
    if job.nonfinite != "stop" or job.spike.policy != "off":
        raise JobError("nonfinite and spike are about steps of one run; updates with NaN or Inf are always refused")
    if job.trackers:
        raise JobError(
            "trackers follow the runs of paceline train; a federated run has its record alone: leave them out"
        )
    return spec
