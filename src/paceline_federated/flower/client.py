"""Clients of a federated job as a Flower `ClientApp`, for any of Flower's strategies."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import FederateError
from paceline.job.job import Job
from paceline.job.zoo.data.samples import Selection
from paceline.run.build import load_published
from paceline_federated.client import ClientState, LocalTraining, federated, first_model
from paceline_federated.layout import Layout
from paceline_federated.measure import Measure
from paceline_federated.real.join import own_samples
from paceline_federated.rule import Task
from paceline_federated.simulation.deal import deal, kept_apart

ARRAYS, SENT, RETURNED, CONFIG, METRICS = "arrays", "sent", "returned", "config", "metrics"
EXAMPLES, LR, ROUND, NUMBER = "num-examples", "lr", "server-round", "number"
PARTITION, PARTITIONS, DATA = "partition-id", "num-partitions", "data"  # of a node's configuration
_RULE, _PERSONAL = "rule", "personal"  # of a node's state


def client_app(job: str | Path) -> Any:
    """A Flower ClientApp that trains and measures clients of a job.

    A node is the client with the number `partition-id` of its configuration. It trains on its part of the job's data,
    or on the file or folder `data` of its configuration. Weights come and go as "arrays", by the names of the model's
    shared tensors, so every strategy of Flower can be the server.

    Args:
        job: file of the job.
    """
    app: Any = ClientApp()

    def train(message: Message, context: Context) -> Message:
        return Message(_clients(str(job)).trained(message.content, context), reply_to=message)

    def evaluate(message: Message, context: Context) -> Message:
        return Message(_clients(str(job)).measured(message.content, context), reply_to=message)

    def query(message: Message, context: Context) -> Message:
        return Message(_clients(str(job)).described(context), reply_to=message)

    app.train()(train)
    app.evaluate()(evaluate)
    app.query()(query)
    return app


@cache
def _clients(file: str) -> Clients:
    return Clients(Job.load(file))


class Clients:
    """Clients of a job that this process plays, one for each message."""

    def __init__(self, job: Job) -> None:
        job.fetch()
        model = first_model(job)
        load_published(job, model)
        self.job, self.spec = job, federated(job)
        self.training = LocalTraining(job, model)
        self.measure = Measure(self.training)
        self._parts = cache(self._read_parts)

    def trained(self, content: RecordDict, context: Context) -> RecordDict:
        """New weights after local training, and the number of samples."""
        number, samples, _ = self._samples(context)
        task = self._task(content)
        state = ClientState(_tensors(context, _RULE), _tensors(context, _PERSONAL))
        update = self.training.train(task, number, samples, state)
        if not update.steps:
            raise FederateError(f"client {number} has no batch to train on")
        if state.rule:
            context.state[_RULE] = ArrayRecord(state.rule)
        if state.personal:
            context.state[_PERSONAL] = ArrayRecord(state.personal)
        weights = content[ARRAYS].to_torch_state_dict() | self.training.layout.named(task.weights + update.delta)
        metrics = {EXAMPLES: update.samples, "loss": update.loss, "steps": update.steps}
        answer = RecordDict({ARRAYS: ArrayRecord(weights), METRICS: MetricRecord(metrics)})
        if update.returned:
            answer[RETURNED] = ArrayRecord(dict(update.returned))
        return answer

    def measured(self, content: RecordDict, context: Context) -> RecordDict:
        """The job's metrics on the samples that this client keeps apart."""
        number, _, own = self._samples(context)
        if not len(own):  # type: ignore[arg-type]
            raise FederateError(
                f"client {number} keeps no samples apart to be measured on: set federate.held_out in the job, or "
                "fraction_evaluate=0 in the strategy"
            )
        state = ClientState(personal=_tensors(context, _PERSONAL))
        metrics = self.measure.validation(weights_of(content[ARRAYS], self.training.layout), own, state)
        return RecordDict({METRICS: MetricRecord({EXAMPLES: len(own), **metrics})})  # type: ignore[arg-type]

    def described(self, context: Context) -> RecordDict:
        """Number of this client, and of the samples that it trains on."""
        number, samples, _ = self._samples(context)
        return RecordDict({METRICS: MetricRecord({NUMBER: number, EXAMPLES: len(samples)})})  # type: ignore[arg-type]

    def _task(self, content: RecordDict) -> Task:
        weights = weights_of(content[ARRAYS], self.training.layout)
        config = content.get(CONFIG, ConfigRecord())
        number = int(config.get(ROUND, 1))
        usual = self.job.optimizer.lr * self.job.schedule.factor_at(number - 1, self.job.stop.steps)
        sent = content[SENT].to_torch_state_dict() if SENT in content else {}
        if sent.keys() != self.training.rule.sends().keys():
            raise FederateError(
                f"federate.rule {self.spec.rule} needs more from its server than weights: take "
                "paceline_federated.flower.strategy.JobStrategy there"
            )
        return Task(number, number - 1, weights, sent, float(config.get(LR, usual)))

    def _samples(self, context: Context) -> tuple[int, Dataset[Any], Dataset[Any]]:
        """Number of a node's client, its samples to train on, and its held-out ones."""
        config = context.node_config
        if PARTITION not in config:
            raise FederateError(
                f'a node is a client by its number: start it with --node-config "{PARTITION}=0", and with '
                f'{DATA}="/path" where its samples are its own'
            )
        number = int(config[PARTITION])
        whole, rows = self._parts(str(config[DATA])) if DATA in config else self._parts(None)
        parts, nodes = self.spec.clients if DATA in config else len(rows), int(config.get(PARTITIONS, len(rows)))
        if DATA not in config and nodes != parts:
            raise FederateError(
                f"the job has {parts} clients, and Flower {nodes} nodes: start {parts} (num-supernodes)"
            )
        if not 0 <= number < parts:
            raise FederateError(f"{PARTITION} is {number}, and the job has clients 0 to {parts - 1}")
        mine = rows[0] if DATA in config else rows[number]
        own, rest = kept_apart(len(mine), self.spec.held_out, self.job.seed, number)
        return number, Selection(whole, mine[rest]), Selection(whole, mine[own])

    def _read_parts(self, data: str | None) -> tuple[Dataset[Any], Any]:
        """Samples, and the rows of each client; all rows of a client's own data."""
        if data is not None:
            samples = own_samples(self.job, Path(data))
            return samples, [np.arange(len(samples))]  # type: ignore[arg-type]
        job = self.job
        samples = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
        return samples, deal(samples, self.spec.partition, self.spec.clients, job.seed)


def weights_of(record: ArrayRecord, layout: Layout) -> Tensor:
    """The shared tensors in a record, flat (n,).

    Raises:
        FederateError: some are missing, have another shape, or are not finite.
    """
    tensors = record.to_torch_state_dict()
    if missing := [name for name in layout.names if name not in tensors]:
        raise FederateError(f"the weights have no {', '.join(missing[:5])}: they are of another model")
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if tuple(tensors[name].shape) != shape:
            raise FederateError(f"{name} has the shape {tuple(tensors[name].shape)}, and this model's is {shape}")
    flat = torch.cat([tensors[name].reshape(-1).to(layout.dtype) for name in layout.names])
    if not bool(flat.isfinite().all()):
        raise FederateError("the weights hold NaN or Inf")
    return flat


def _tensors(context: Context, key: str) -> dict[str, Tensor]:
    return dict(context.state[key].to_torch_state_dict()) if key in context.state else {}
