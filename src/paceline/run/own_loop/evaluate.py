"""Evaluation of a validation set in a user's own loop.

The batches are those of one process, dealt to the ranks in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from paceline.comm import Group
from paceline.data.deal import check, deal
from paceline.data.loader import Loader
from paceline.data.whole import padded
from paceline.device import widened
from paceline.errors import DataError, JobError, PlanError
from paceline.job.batch import on_device, rows
from paceline.job.loss_items import LossMetric
from paceline.job.samples import apart
from paceline.own_random import kept_random

if TYPE_CHECKING:
    from paceline.run.own_loop.loop import OwnLoop

Measure = Callable[[Any], Mapping[str, Any]]


def evaluate(engine: OwnLoop, data: DataLoader[Any] | Iterable[Any], measure: Measure | None) -> dict[str, float]:
    """Mean of each number from `measure` over all samples; see `OwnLoop.evaluate`."""
    if measure is not None and (engine.plan.pp > 1 or engine.plan.cp > 1):
        raise PlanError(
            f"plan {engine.plan} runs the forward pass itself: leave `measure` out, and evaluate the loss "
            "given to setup"
        )
    sums: dict[str, tuple[float, float]] = {}
    batches = 0
    dealt = _dealt(data, engine)
    with engine.evaluation.measuring(engine.rule):
        for i, batch in enumerate(dealt.batches):
            engine.evaluation.begin(i)
            found = _measured(engine, batch, measure)
            batches += batch is not None
            for name, value in found.items():
                total, count = _sum_and_count(name, value, batch, dealt.loader)
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + count)
    everyones = engine.group.gather_json([batches, sums])
    if not any(count for count, _ in everyones):
        raise DataError(_nothing_to_measure(data))
    return _means([sums for _, sums in everyones])


def _measured(engine: OwnLoop, batch: Any, measure: Measure | None) -> Mapping[str, Any]:
    if measure is not None:
        with engine.compute.reads or nullcontext():
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
    return {"loss": engine.compute.normalization.measured(LossMetric(engine.loss), output, placed)}


def _nothing_to_measure(data: Any) -> str:
    found = "the validation data has no batch, so there is nothing to measure"
    if isinstance(data, DataLoader) and getattr(data, "drop_last", False) and data.batch_size:
        return f"{found}. The loader has drop_last=True and batch_size={data.batch_size}: set drop_last=False"
    return f"{found}. Give engine.evaluate a loader with at least one sample, or leave the evaluation out"


def _sum_and_count(name: str, value: Any, batch: Any, loader: Loader | None) -> tuple[float, float]:
    if isinstance(value, tuple):
        total, count = value
        return float(total), float(count)
    if isinstance(value, Tensor) and value.dim() == 1:
        return float(widened(value).sum()), float(len(value))
    if isinstance(value, Tensor) and value.dim() > 1:
        raise JobError(
            f"measure gives {name} of shape {tuple(value.shape)}: give a number, one value per sample, or (sum, count)"
        )
    if loader is not None and loader.position is not None:
        samples = loader.position.local
    else:
        samples = len(batch) if isinstance(batch, Tensor) else rows(batch)
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
    return _dealt(data, engine).batches


class _Dealt(NamedTuple):
    """This rank's batches and their loader; None if the caller reads the batches."""

    batches: Iterator[Any]
    loader: Loader | None


def _dealt(data: Any, engine: OwnLoop) -> _Dealt:
    group: Group = engine.data_group
    together = engine.split is not None and engine.split.all_must_compute
    if isinstance(data, DataLoader) and not (together and isinstance(data.dataset, IterableDataset)):
        loader, count = _loader_of(data, engine)
        batches = (batch for batch in loader if batch is not None)
        if not together:
            return _Dealt(batches, loader)
        with kept_random():
            first = apart(data.dataset)[0]
            engine.example = on_device(first if data.batch_sampler is None else data.collate_fn([first]), engine.device)
        return _Dealt(padded(batches, count), loader)
    if together:
        raise PlanError(
            f"plan {engine.plan} needs as many batches on every rank: evaluate a DataLoader whose dataset has a length"
        )
    return _Dealt(islice(data, group.rank, None, group.size), None)


def _loader_of(loader: DataLoader[Any], engine: OwnLoop) -> tuple[Loader, int]:
    """Return this rank's loader, and the largest number of batches of any rank (0 for a stream)."""
    group, seed = engine.data_group, engine.settings.seed
    check(loader, engine.group)
    if isinstance(loader.dataset, IterableDataset):  # read by every rank, which keeps its part of each batch
        return deal(loader, group, engine.group, seed, tells_epochs=False), 0
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    in_order = type(loader.sampler) is SequentialSampler and type(loader.batch_sampler) in (BatchSampler, type(None))
    if in_order:
        own = sampler if group.size == 1 else list(islice(sampler, group.rank, None, group.size))
        drawn = len(sampler)
    else:  # the ranks' random states differ, so the first rank draws; its own random state is restored
        with kept_random():
            everyones = group.gather_json(list(sampler) if group.rank == 0 else [])[0]
        own, drawn = everyones[group.rank :: group.size], len(everyones)
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
    alone = Group()  # each rank reads whole batches
    return deal(DataLoader(loader.dataset, **arguments), alone, alone, seed, tells_epochs=False), -(
        -drawn // group.size
    )
