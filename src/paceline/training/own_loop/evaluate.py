"""Evaluation of a validation set in a user's own loop.

The batches are those of one process, dealt to the ranks in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from paceline.comm import Group
from paceline.data.deal import check, deal
from paceline.data.held_out import padded
from paceline.device import widened
from paceline.errors import JobError, PlanError
from paceline.job.batch import Batch, on_device, rows
from paceline.job.zoo.metrics import LossMetric

if TYPE_CHECKING:
    from paceline.training.own_loop.loop import OwnLoop

Measure = Callable[[Any], Mapping[str, Any]]


def evaluate(engine: OwnLoop, data: DataLoader[Any] | Iterable[Any], measure: Measure | None) -> dict[str, float]:
    """Mean of each number from `measure` over all samples; see `OwnLoop.evaluate`."""
    if measure is not None and (engine.plan.pp > 1 or engine.plan.cp > 1):
        raise PlanError(
            f"plan {engine.plan} runs the forward pass itself: leave `measure` out, and evaluate the loss "
            "given to setup"
        )
    sums: dict[str, tuple[float, float]] = {}
    batches = own_batches(data, engine)  # before inference mode: ranks cannot reduce its tensors
    with engine.evaluation.measuring(engine.rule):
        for i, batch in enumerate(batches):
            engine.evaluation.begin(i)
            found = _measured(engine, batch, measure)
            for name, value in found.items():
                total, count = _sum_and_count(name, value, batch)
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + count)
    return _means(engine.group.gather_json(sums))


def _measured(engine: OwnLoop, batch: Any, measure: Measure | None) -> Mapping[str, Any]:
    if measure is not None:
        found = measure(engine.example if batch is None else on_device(batch, engine.device))
        if not isinstance(found, Mapping):
            raise JobError(
                f'measure(batch) returns a dict of numbers such as {{"loss": loss}}; this one returned a '
                f"{type(found).__name__}"
            )
        return {} if batch is None or not engine.counts_measures else found
    if not engine.has_loss:
        raise JobError(
            "setup was given no loss: say what to measure, engine.evaluate(loader, measure) with measure(batch) -> dict"
        )
    computed = engine.compute.output(batch)
    if computed is None or batch is None:
        return {}
    output, placed = computed
    return {"loss": engine.compute.weighing.measured(LossMetric(engine.loss), output, placed)}


def _sum_and_count(name: str, value: Any, batch: Any) -> tuple[float, float]:
    if isinstance(value, tuple):
        total, count = value
        return float(total), float(count)
    if isinstance(value, Tensor) and value.dim() == 1:
        return float(widened(value).sum()), float(len(value))
    if isinstance(value, Tensor) and value.dim() > 1:
        raise JobError(
            f"measure gives {name} of shape {tuple(value.shape)}: give a number, one value per sample, or (sum, count)"
        )
    samples = _samples(batch)
    return float(value) * samples, float(samples)


def _means(everyones: list[dict[str, list[float]]]) -> dict[str, float]:
    """Means over all ranks, summed in rank order for equal bits on every rank."""
    together: dict[str, list[float]] = {}
    for sums in everyones:
        for name, (total, count) in sums.items():
            before = together.setdefault(name, [0.0, 0.0])
            before[0] += total
            before[1] += count
    return {name: total / count if count else float("nan") for name, (total, count) in sorted(together.items())}


def own_batches(data: Any, engine: OwnLoop) -> Iterator[Any]:
    """Every n-th batch of `data`, padded with None where a replica's ranks must compute together."""
    group: Group = engine.data_group
    own, count = (
        _dealt(data, engine) if isinstance(data, DataLoader) else (islice(data, group.rank, None, group.size), None)
    )
    if engine.split is None or not engine.split.all_must_compute:
        return iter(own)
    if count is None or not isinstance(data, DataLoader):
        raise PlanError(
            f"plan {engine.plan} needs as many batches on every rank: evaluate a DataLoader whose dataset has a length"
        )
    first = data.dataset[0]
    engine.example = on_device(first if data.batch_sampler is None else data.collate_fn([first]), engine.device)
    return padded(iter(own), count)


def _dealt(loader: DataLoader[Any], engine: OwnLoop) -> tuple[Iterable[Any], int | None]:
    """This rank's batches, and the most that any rank has."""
    group: Group = engine.data_group
    check(loader, engine.group)
    if isinstance(loader.dataset, IterableDataset):  # read by every rank, which keeps its part of each batch
        dealt = deal(loader, group, engine.group, engine.settings.seed)
        return (batch for batch in dealt if batch is not None), None
    if group.size == 1:
        return loader, len(loader)
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if isinstance(loader.sampler, SequentialSampler):
        drawn = list(sampler)
    else:  # the ranks' random states differ: the first one draws
        drawn = group.gather_json(list(sampler) if group.rank == 0 else [])[0]
    own: Any = drawn[group.rank :: group.size]
    arguments: dict[str, Any] = (
        {"batch_sampler": own} if loader.batch_sampler is not None else {"sampler": own, "batch_size": None}
    )
    kept = (
        "collate_fn",
        "num_workers",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "prefetch_factor",
    )
    arguments |= {name: getattr(loader, name) for name in kept}
    # A generator of its own, so that nothing is drawn from the rank's random state.
    return DataLoader(loader.dataset, generator=torch.Generator(), **arguments), -(-len(drawn) // group.size)


def _samples(batch: Batch) -> int:
    return len(batch) if isinstance(batch, Tensor) else rows(batch)
