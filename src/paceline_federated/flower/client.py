"""Clients of a federated job in a Flower app."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitins
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import DataError, FederateError
from paceline.job.job import Job
from paceline.job.samples import Selection
from paceline.run.build import load_published
from paceline_federated.client import ClientState, Layout, LocalTraining, federated, first_model
from paceline_federated.record import Measure
from paceline_federated.rules import Task, Update
from paceline_federated.section import FederateSpec
from paceline_federated.simulated_clients import deal, kept_apart

ARRAYS, SENT, RETURNED, CONFIG, METRICS = "arrays", "sent", "returned", "config", "metrics"
EXAMPLES, LR, ROUND, NUMBER = "num-examples", "lr", "server-round", "number"
PARTITION, PARTITIONS, DATA = "partition-id", "num-partitions", "data"  # keys of a node's configuration
_RULE, _PERSONAL = "rule", "personal"  # keys of a node's state


@cache
def clients_of(file: str) -> Clients:
    """Return the clients of a job file that this process runs."""
    return Clients(Job.load(file))


class Clients:
    """Clients of a job that this process runs, one client per message."""

    def __init__(self, job: Job) -> None:
        job.fetch()
        model = first_model(job)
        load_published(job, model)
        self.job, self.spec = job, federated(job)
        self.training = LocalTraining(job, model)
        self.measure = Measure(self.training)
        self._parts = cache(self._read_parts)

    def trained(self, content: RecordDict, context: Context) -> RecordDict:
        """Train a client locally, and return its new weights and its number of samples."""
        number, samples, _ = self._samples(context)
        task = self._task(content) if self.spec.secure is None else self._masked_task(content)
        state = ClientState(_tensors(context, _RULE), _tensors(context, _PERSONAL))
        update = self.training.train(task, number, samples, state)
        if not update.steps:
            raise FederateError(
                "federate.client_without_batch", "client {client} has no batch to train on", client=number
            )
        if state.rule:
            context.state[_RULE] = ArrayRecord(state.rule)
        if state.personal:
            context.state[_PERSONAL] = ArrayRecord(state.personal)
        if self.spec.secure is not None:
            return self._to_mask(number, update)
        weights = content[ARRAYS].to_torch_state_dict() | self.training.layout.named(task.weights + update.delta)
        metrics = {EXAMPLES: update.samples, "loss": update.loss, "steps": update.steps}
        answer = RecordDict({ARRAYS: ArrayRecord(weights), METRICS: MetricRecord(metrics)})
        if update.returned:
            answer[RETURNED] = ArrayRecord(dict(update.returned))
        return answer

    def measured(self, content: RecordDict, context: Context) -> RecordDict:
        """Compute the job's metrics on this client's held-out samples."""
        number, _, own = self._samples(context)
        if not len(own):  # type: ignore[arg-type]
            raise FederateError(
                "federate.client_without_held_out",
                "client {client} has no held-out samples for evaluation. Set federate.held_out in the job, or "
                "fraction_evaluate=0 in the strategy.",
                client=number,
            )
        state = ClientState(personal=_tensors(context, _PERSONAL))
        metrics = self.measure.validation(weights_of(content[ARRAYS], self.training.layout), own, state)
        return RecordDict({METRICS: MetricRecord({EXAMPLES: len(own), **metrics})})  # type: ignore[arg-type]

    def described(self, context: Context) -> RecordDict:
        """Return the number of this client, and its number of training samples."""
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
                "federate.strategy_needed",
                "federate.rule {rule} needs more data from the server than the weights. Use "
                "paceline_federated.flower.server.JobStrategy on the server.",
                rule=self.spec.rule,
            )
        return Task(number, number - 1, weights, sent, float(config.get(LR, usual)))

    def _masked_task(self, content: RecordDict) -> Task:
        """Read the task in a message of Flower's SecAgg+, whose arrays have no names."""
        ins, layout = recorddict_to_fitins(content, keep_input=True), self.training.layout
        weights, *sent = (torch.from_numpy(array.copy()) for array in parameters_to_ndarrays(ins.parameters))
        must_fit(weights, layout)
        names = sorted(self.training.rule.sends())
        number = int(ins.config[ROUND])
        return Task(number, number - 1, weights, dict(zip(names, sent, strict=True)), float(ins.config[LR]))

    def _to_mask(self, number: int, update: Update) -> RecordDict:
        """Pack an update, the rule's tensors and the loss for masking by SecAgg+.

        Raises:
            FederateError: the update exceeds the bounds of the secure sum.
        """
        secure, privacy, delta = self.spec.secure, self.spec.privacy, update.delta
        assert secure is not None, "the job sums securely"
        if privacy is not None:
            delta = delta * min(1.0, privacy.clip / max(float(delta.norm()), 1e-30))
        weight, most = weight_of(self.spec, update.samples), most_weight(self.spec)
        # unlike the update, the loss is always weighted by samples
        share = 1.0 if _weighs(self.spec) else update.samples / secure.max_weight
        vector = [
            delta,
            *(update.returned[name] for name in sorted(update.returned)),
            torch.tensor([update.loss * share, share]),
        ]
        largest = max(float(tensor.abs().max()) for tensor in vector[:-1]) * weight / most
        if weight > most:
            raise FederateError(
                "federate.max_weight",
                "client {client} has {samples} samples. Set federate.secure.max_weight to at least this number.",
                client=number,
                samples=weight,
            )
        if not largest <= secure.clipping_range:
            raise FederateError(
                "federate.beyond_clipping_range",
                "a number in the update of client {client} is {largest:g}, which exceeds "
                "federate.secure.clipping_range",
                client=number,
                largest=largest,
            )
        arrays = [tensor.detach().numpy() for tensor in vector]
        return fitres_to_recorddict(FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), weight, {}), False)

    def _samples(self, context: Context) -> tuple[int, Dataset[Any], Dataset[Any]]:
        """Return a node's client number, its training samples, and its held-out samples."""
        config = context.node_config
        if PARTITION not in config:
            raise FederateError(
                "federate.node_without_number",
                'a node needs the number of its client. Start it with --node-config "{partition}=0", and with '
                '{data}="/path" if it has its own samples.',
                partition=PARTITION,
                data=DATA,
            )
        number = int(config[PARTITION])
        whole, rows = self._parts(str(config[DATA])) if DATA in config else self._parts(None)
        parts, nodes = self.spec.clients if DATA in config else len(rows), int(config.get(PARTITIONS, len(rows)))
        if DATA not in config and nodes != parts:
            raise FederateError(
                "federate.nodes_differ",
                "the job has {clients} clients, but Flower has {nodes} nodes. Start {clients} nodes (num-supernodes).",
                clients=parts,
                nodes=nodes,
            )
        if not 0 <= number < parts:
            raise FederateError(
                "federate.number_out_of_range",
                "{partition} is {number}, but the clients of the job have numbers from 0 to {largest}",
                partition=PARTITION,
                number=number,
                largest=parts - 1,
            )
        mine = rows[0] if DATA in config else rows[number]
        own, rest = kept_apart(len(mine), self.spec.held_out, self.job.seed, number)
        return number, Selection(whole, mine[rest]), Selection(whole, mine[own])

    def _read_parts(self, data: str | None) -> tuple[Dataset[Any], Any]:
        """Read samples and each client's row numbers; a client's own data set has all rows."""
        if data is not None:
            samples = own_samples(self.job, Path(data))
            return samples, [np.arange(len(samples))]  # type: ignore[arg-type]
        job = self.job
        samples = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
        return samples, deal(samples, self.spec.partition, self.spec.clients, job.seed)


def weights_of(record: ArrayRecord, layout: Layout) -> Tensor:
    """Read the shared tensors in a record as a flat tensor of shape (n,).

    Raises:
        FederateError: tensors are missing, have a wrong shape, or are not finite.
    """
    tensors = record.to_torch_state_dict()
    if missing := [name for name in layout.names if name not in tensors]:
        raise FederateError(
            "federate.weights_missing",
            "the weights do not contain {missing}, so they belong to another model",
            missing=list(missing[:5]),
        )
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if tuple(tensors[name].shape) != shape:
            raise FederateError(
                "federate.weights_shape",
                "{name} has the shape {received}, but in this model it has {expected}",
                name=name,
                received=tuple(tensors[name].shape),
                expected=shape,
            )
    flat = torch.cat([tensors[name].reshape(-1).to(layout.dtype) for name in layout.names])
    must_fit(flat, layout)
    return flat


def must_fit(flat: Tensor, layout: Layout) -> None:
    """Refuse flat weights that belong to another model or contain NaN or Inf.

    Raises:
        FederateError: the weights do not match the model, or are not finite.
    """
    if flat.shape != (layout.numel,):
        raise FederateError(
            "federate.weights_count",
            "{received} weights were received, but this model has {expected} weights",
            received=flat.numel(),
            expected=layout.numel,
        )
    if not bool(flat.isfinite().all()):
        raise FederateError("federate.weights_not_finite", "the weights contain NaN or Inf")


def weight_of(spec: FederateSpec, samples: int) -> int:
    """Return the weight of a client in a secure sum."""
    return samples if _weighs(spec) else 1


def most_weight(spec: FederateSpec) -> float:
    """Return the largest weight of a client in a secure sum."""
    assert spec.secure is not None, "the job sums securely"
    return float(spec.secure.max_weight) if _weighs(spec) else 1.0


def _weighs(spec: FederateSpec) -> bool:
    return spec.weigh == "samples" and spec.privacy is None


def own_samples(job: Job, data: Path) -> Dataset[Any]:
    """Load the samples of a client with its own data. All are used for training.

    Args:
        data: file or folder that replaces the job's `data.path`. If the job's data has no path, the file has arrays
            `x` and `y`.

    Raises:
        DataError: there are no samples, or the samples cannot be read.
    """
    spec = job.data
    if "path" in type(spec).model_fields:
        values = spec.model_dump(exclude={"held_out_path"}) | {"path": data.resolve()}
        spec = type(spec).model_validate(values)
    else:
        from paceline.job.data import Arrays

        spec = Arrays(kind="arrays", path=data.resolve())
    built = spec.model_copy(update={"held_out": 0.0}).build(input_shape=job.model.input_shape(), seed=job.seed)
    if not len(built.train):  # type: ignore[arg-type]
        raise DataError("federate.data_empty", "{path}: it contains no samples", path=data)
    return built.train


def _tensors(context: Context, key: str) -> dict[str, Tensor]:
    return dict(context.state[key].to_torch_state_dict()) if key in context.state else {}
