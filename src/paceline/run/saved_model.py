"""The model of a run's checkpoint in this process, for evaluation and predictions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import device
from paceline.comm import Group
from paceline.engine.engine import RankEngine
from paceline.engine.evaluation import batches_of
from paceline.engine.guard import Settings
from paceline.errors import DataError, RunError
from paceline.job.batch import Batch
from paceline.job.data import Custom, DataSpec, Digits, Streamed, Synthetic
from paceline.job.job import Job
from paceline.job.loss import build_metrics
from paceline.job.partition import PartitionSpec
from paceline.job.samples import DataSets
from paceline.job.streams import Stream
from paceline.job.zoo.quantized import packed_weights, round_weights
from paceline.planning.plan import Plan
from paceline.run.build import load_published, loader_of, seed_all
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline.split.mesh import Mesh
from paceline.state.checkpoint import digest_of_frozen, refuse_other_base
from paceline.state.reader import NEWEST, chosen_checkpoint

SETS = ("train", "held_out", "test")


class SavedModel:
    """A run's whole model on one device, with the weights that the run evaluates.

    Attributes:
        job: the run's job.
        engine: an engine with one rank, independent of the run's plan.
    """

    def __init__(self, run: Run, dataset: Dataset[Any], checkpoint: str = NEWEST) -> None:
        """Build the model and read its weights.

        Args:
            dataset: data set with inputs of the model's shape.
            checkpoint: see `paceline.state.reader.chosen_checkpoint`.

        Raises:
            RunError: the checkpoint does not exist, or belongs to another model.
        """
        self.job = job = run.job
        precision = run.plan.precision or job.precision
        alone = Plan(precision=run.plan.precision)
        model = whole_model(run, checkpoint)
        group = Group(device=device_of_models())
        samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare __len__
        fitting = {"global_batch": max(1, min(job.global_batch, samples)), "partition": PartitionSpec()}
        loader = loader_of(job.model_copy(update=fitting), Mesh.of(alone, group), DataSets(dataset, None))
        # the optimizer never steps
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        settings = Settings(precision=precision, seed=job.seed)
        self.engine = RankEngine(model, optimizer, job.loss.build(), loader, alone, group, settings)

    def measure(self, dataset: Dataset[Any]) -> dict[str, float]:
        """Measure the loss and the job's metrics on a data set, as the run does."""
        batches = batches_of(self.engine.compute, dataset, self.job.global_batch)
        return self.engine.evaluate(batches, build_metrics(self.job.metrics, self.engine.loss))

    def outputs(self, batches: Iterable[Batch]) -> Iterator[Any]:
        """Return the model's output for each batch, in eval mode; targets are ignored."""
        compute, evaluation = self.engine.compute, self.engine.evaluation
        compute.normalization.prepared = True  # skip the preparation of the loss normalization, which reads targets
        with evaluation.measuring(self.engine.rule):
            for i, batch in enumerate(batches):
                evaluation.begin(i)
                found = compute.output(batch)
                assert found is not None, "the only rank has every output"
                yield found[0]

    def close(self) -> None:
        """Release the model."""
        self.engine.close()


def whole_model(run: Run, checkpoint: str = NEWEST, weights: str | None = None) -> nn.Module:
    """Build the model of a run on one device, with the weights of a checkpoint.

    With adapters, the frozen base weights are read or initialised again, as at the start of a run.

    Args:
        weights: see `paceline.run.convert.export`.

    Raises:
        RunError: the checkpoint does not exist, or belongs to another model.
        CheckpointError: the adapters were trained with different base weights.
    """
    run.job.model.must_be_at_hand()
    seed_all(run.job.seed)
    model = run.job.model.build().to(device_of_models())
    if (run.plan.precision or run.job.precision) == "fp64":
        model.double()  # before the weights are read, which would lose digits
    state = model.state_dict()
    if run.job.adapter is not None:
        state = _with_base(run, model, checkpoint)
    with tempfile.TemporaryDirectory(prefix="paceline-weights-") as folder:
        file = Path(folder) / "model.safetensors"
        export(run.path, file, checkpoint, weights)
        with safe_open(file, framework="pt") as saved, torch.no_grad():
            if missing := sorted(state.keys() - set(saved.keys())):
                raise RunError(
                    "run.other_model",
                    "the checkpoint belongs to another model. It does not contain {missing}.",
                    missing=missing[:5],
                )
            for name, tensor in state.items():
                tensor.copy_(saved.get_tensor(name))
    return model


def _with_base(run: Run, model: nn.Module, checkpoint: str) -> dict[str, Tensor]:
    """Load the base weights of adapters; return the tensors that the checkpoint has."""
    load_published(run.job, model)
    held = {**dict(model.named_parameters()), **packed_weights(model)}  # as the run holds them
    refuse_other_base(digest_of_frozen(held), chosen_checkpoint(run.path, checkpoint))
    round_weights(model)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def device_of_models() -> torch.device:
    """Return the device on which whole models run: the first accelerator, or else the CPU."""
    return device.use(0) if device.accelerator_type() is not None else torch.device("cpu")


@contextmanager
def saved_model(run: Run, dataset: Dataset[Any], checkpoint: str = NEWEST) -> Iterator[SavedModel]:
    """Load the model of a run's checkpoint within this context."""
    model = SavedModel(run, dataset, checkpoint)
    try:
        yield model
    finally:
        model.close()


def data_of(job: Job, source: str) -> Dataset[Any]:
    """Return a data set of a job, with targets.

    Args:
        source: `train`, `held_out` or `test`; or a file, folder or factory with data of the same kind.

    Raises:
        DataError: the job does not have the set, or the data cannot be read.
    """
    spec = job.data
    if source not in SETS:
        spec = spec.model_copy(update={"test": resolved_source(spec, source)})
        spec.fetch()
    sets = spec.build(input_shape=job.model.input_shape(), seed=job.seed)
    found = getattr(sets, source if source in SETS else "test")
    if found is None:
        there = [name for name in SETS if getattr(sets, name) is not None]
        raise DataError(
            "data.no_such_set",
            "the job has no {source} set. Choose one of its sets with --data ({known}), or name a file or folder.",
            source=source,
            known=there,
        )
    # a measurement reads the samples by index
    return found.first(None) if isinstance(found, Stream) else found


def evaluated(run: Run, source: str, checkpoint: str = NEWEST) -> dict[str, float]:
    """Measure the job's metrics of a run's checkpoint on a data set."""
    dataset = data_of(run.job, source)
    with saved_model(run, dataset, checkpoint) as model:
        return model.measure(dataset)


def resolved_source(spec: DataSpec, source: str) -> str:
    """Resolve `source`, data of the job's kind, to a path, URL or import path.

    Raises:
        DataError: the job's kind of data cannot be read from `source`.
    """
    if isinstance(spec, Digits | Synthetic):
        raise DataError(
            "data.source_without_files",
            "{source}: the job's data, {kind}, has no files. Name one of its sets: --data held_out, train or test.",
            source=source,
            kind=spec.kind,
        )
    if isinstance(spec, Custom | Streamed) and ":" not in source:
        raise DataError(
            "data.source_not_a_factory",
            "{source}: the job's data is {factory}. Name a class or function that makes such a data set, for example "
            "--data new.py:New.",
            source=source,
            factory=spec.factory,
        )
    try:
        return spec.resolved(source)
    except ValueError as error:
        raise DataError("data.source_invalid", "{source}: {error}", source=source, error=str(error)) from error
