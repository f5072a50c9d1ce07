"""Saving, loading, export and evaluation in users' own loops, for any plan."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from paceline.comm import Group
from paceline.data.deal import check, deal
from paceline.data.loader import Loader, changed_data
from paceline.data.samples import padded
from paceline.device import widened
from paceline.errors import CheckpointError, DataError, JobError, PacelineError, PlanError, RunError
from paceline.job.batch import on_device, rows
from paceline.job.loss_items import LossMetric
from paceline.job.samples import apart
from paceline.own_random import kept_random
from paceline.run.convert import export as export_checkpoint
from paceline.run.convert import new_folder_beside, write_weights
from paceline.split.layout import local
from paceline.state.checkpoint import restore, snapshot
from paceline.state.manifest import step_name
from paceline.state.reader import Loaded, load_latest
from paceline.state.shard import MeshCoordinate, describe
from paceline.state.writer import Checkpointer

if TYPE_CHECKING:
    from paceline.run.own_loop.engine import Engine


Made = TypeVar("Made")

_EXTRA = "extra/"  # prefix of tensor names from the user's objects


def save(engine: Engine, folder: Path, objects: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint to disk and wait for it; every rank calls it.

    Raises:
        CheckpointError: the checkpoint cannot be written, or `objects` contains a value of an unsupported type.
    """
    _check_folder(engine, folder)
    tensors: dict[str, Tensor] = {}
    states = {name: o.state_dict() if hasattr(o, "state_dict") else o for name, o in objects.items()}
    encoded = {name: encode(state, f"{_EXTRA}{name}", tensors) for name, state in states.items()}
    shared, own = _shared_and_own(engine, encoded, tensors)
    values = {
        "objects": encoded,
        "loaders": [loader.state_dict() for loader in engine.loaders[1:]],
        "data": [loader.fingerprint() for loader in engine.loaders],
        **({} if engine.compute.loss_scale is None else {"loss_scale": engine.compute.loss_scale.state_dict()}),
    }
    taken = snapshot(engine, values)
    taken.shared |= shared
    taken.own |= own
    group, deadline_s = engine.group, engine.group.deadline_s
    # rank 0 first removes files that a crash left incomplete; only then may other ranks write
    writer = _together(
        engine,
        lambda: Checkpointer(
            folder, rank=group.rank, world=group.size, keep=keep, deadline_s=deadline_s, report=lambda *_: None
        ),
    )

    def write() -> None:
        writer.save(engine.step_count, taken)
        writer.close()

    _together(engine, write)
    return folder / step_name(engine.step_count)


def _together(engine: Engine, do: Callable[[], Made]) -> Made:
    problem = made = None
    try:
        made = do()
    except CheckpointError as error:
        problem = error
    _raise_on_all(engine, problem, CheckpointError)
    return cast(Made, made)


def _raise_on_all(engine: Engine, problem: PacelineError | None, kind: type[PacelineError]) -> None:
    told = engine.group.gather_json(problem and problem.as_json())
    if first := next((one for one in told if one is not None), None):
        raise kind.of_json(first)


def load(engine: Engine, folder: Path, objects: Mapping[str, Any]) -> dict[str, Any] | None:
    """Resume from the newest complete checkpoint in `folder`; return its plain values.

    Returns None if there is no checkpoint.

    Raises:
        CheckpointError: the checkpoint has another model, optimizer or set of objects, or every checkpoint is
            damaged.
        DataError: a data set of the loop has changed.
    """
    group = engine.group
    _check_folder(engine, folder)
    for loader in engine.loaders:
        loader.fingerprint()  # take the fingerprint before training, which may change the samples of a data set
    if not any(group.gather_json(folder.is_dir())):
        return None
    loaded = load_latest(folder, rank=group.rank, world=group.size, report=lambda *_: None, gather=group.gather_json)
    if loaded is None:
        return None
    saved = loaded.values["loop"].get("objects")
    if saved is None:
        raise CheckpointError(
            "checkpoint.of_train",
            "{path} belongs to a run of paceline.train, but engine.load reads only files of engine.save",
            path=loaded.path,
        )
    _check_objects(loaded, saved, objects)
    _refuse_other_data(engine, loaded)
    engine.clear()
    values = restore(engine, loaded)
    for loader, state in zip(engine.loaders[1:], values["loaders"], strict=False):
        loader.load_state_dict(state)
    if engine.compute.loss_scale is not None and "loss_scale" in values:
        engine.compute.loss_scale.load_state_dict(values["loss_scale"])
    engine.guard.remember()
    own_tensors_here = loaded.own_of(
        MeshCoordinate.of(engine.split.mesh) if engine.split is not None else loaded.coordinate
    )

    def read(name: str) -> Tensor:
        return loaded.shared[name] if name in loaded.shared else own_tensors_here[name].clone()

    found = {name: decode(value, read) for name, value in saved.items()}
    for name, value in objects.items():
        value.load_state_dict(found[name])
    return {name: value for name, value in found.items() if name not in objects}


def export(engine: Engine, path: Path) -> None:
    """Write the model that `evaluate` measures to a safetensors file.

    Every rank calls this function; rank 0 writes the file.

    Raises:
        RunError: the file exists or cannot be written.
    """
    exists = RunError(
        "export.file_exists",
        "{file} exists already and is not overwritten. Remove it, or name another file.",
        file=path,
    )
    _raise_on_all(engine, exists if engine.is_main and path.exists() else None, RunError)
    with engine.rule.shared_parameters(), engine.evaluation.averaged_buffers(), ExitStack() as held:
        folder = None if engine.split is None else _saved_beside(engine, path, held)
        problem = None
        if engine.is_main:
            try:
                _write_whole(engine, path) if folder is None else export_checkpoint(folder, path)
            except RunError as error:
                problem = error
        _raise_on_all(engine, problem, RunError)


def _saved_beside(engine: Engine, path: Path, held: ExitStack) -> Path:
    """Save a divided model as a temporary checkpoint beside `path`.

    `export` assembles the model from the checkpoint. Closing `held` deletes the checkpoint.
    """
    problem, own = None, ""
    try:
        own = str(held.enter_context(new_folder_beside(path))) if engine.is_main else ""
    except OSError as error:
        problem = RunError(
            "export.file_unwritable",
            "{file} cannot be written: {reason}. Name a file in a writable folder.",
            file=path,
            reason=error.strerror or error,
        )
    _raise_on_all(engine, problem, RunError)
    folder = Path(engine.group.gather_json(own)[0])
    save(engine, folder, {}, keep=1)
    return folder


def _write_whole(engine: Engine, path: Path) -> None:
    state = {name: tensor.detach() for name, tensor in engine.model.state_dict().items() if isinstance(tensor, Tensor)}
    described = {name: describe(name, tensor) for name, tensor in state.items()}
    write_weights(path, described, lambda name: state[name].cpu())


def _check_folder(engine: Engine, folder: Path) -> None:
    """Raise an error if the ranks name different folders.

    Otherwise the parts of a checkpoint would be in several folders.
    """
    everyones = engine.group.gather_json(str(folder.absolute()))
    for rank, other in enumerate(everyones):
        if other != everyones[0]:
            raise CheckpointError(
                "checkpoint.folders_differ",
                "the checkpoint folder is {first} on rank 0 and {other} on rank {rank}, but all ranks must write "
                "into one folder. Give the same name on each rank (a temporary folder has a different name on "
                "every rank).",
                first=everyones[0],
                other=other,
                rank=rank,
            )


def _shared_and_own(
    engine: Engine, encoded: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that are equal on all ranks, and this rank's own tensors.

    Averages of batch-norm statistics, for example, differ between ranks.

    Raises:
        CheckpointError: plain values differ between the ranks, or the plan divides a tensor.
    """
    for name, tensor in tensors.items():
        if local(tensor) is not tensor:
            raise CheckpointError(
                "checkpoint.value_divided",
                "the plan divides {name} over the ranks. Do not pass such state to engine.save, or use dp.",
                name=name,
            )
    # To find tensors that differ between ranks, compare only sums and sums of squares.
    marks = {
        name: [float(widened(t).sum()), float(widened(t).square().sum()), list(t.shape)] for name, t in tensors.items()
    }
    everyones = engine.group.gather_json([encoded, {name: repr(mark) for name, mark in marks.items()}])
    for rank, (other, _) in enumerate(everyones):
        if differs := [
            name for name in encoded if json.dumps(other.get(name)) != json.dumps(everyones[0][0].get(name))
        ]:
            raise CheckpointError(
                "checkpoint.values_differ",
                "{name} differs between rank 0 and rank {rank}, but values that are saved by name must be equal on "
                "all ranks. Compute it with engine.mean(…) or from numbers that all ranks have.",
                name=differs[0],
                rank=rank,
            )
    alike = {name for name in tensors if len({other.get(name) for _, other in everyones}) == 1}
    shared = {name: tensor for name, tensor in tensors.items() if name in alike}
    return shared, {name: tensor.clone() for name, tensor in tensors.items() if name not in alike}


def _check_objects(loaded: Loaded, saved: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    if unknown := [name for name in objects if name not in saved]:
        there = ", ".join(saved) or "nothing by name"
        raise CheckpointError(
            "checkpoint.name_missing",
            "{path} contains no {name!r}; engine.save was given {there}",
            path=loaded.path,
            name=unknown[0],
            there=there,
        )
    if plain := [name for name, value in objects.items() if not hasattr(value, "load_state_dict")]:
        raise CheckpointError(
            "checkpoint.value_not_loadable",
            "engine.load was given {name!r}, which has no load_state_dict. Leave it out, and read its value from "
            "the result of engine.load.",
            name=plain[0],
        )


def _refuse_other_data(engine: Engine, loaded: Loaded) -> None:
    """Refuse a changed data set on all ranks, even if only one rank's changed."""
    problem = None
    for loader, saved in zip(engine.loaders, loaded.values["loop"].get("data", ()), strict=False):
        if what := changed_data(saved, loader.fingerprint()):
            problem = DataError(
                "data.changed_since_saved",
                "the data set {dataset} has changed since {path} was written: {change}. The saved position and "
                "order belong to the earlier data set. Restore that data set. To train on the new data set from "
                "these weights, call engine.export(file) in the earlier loop. Then call "
                "model.load_state_dict(safetensors.torch.load_file(file)) before paceline.setup, without "
                "engine.load",
                dataset=loader.name,
                path=loaded.path,
                change=what,
            )
            break
    _raise_on_all(engine, problem, DataError)


_KIND = "!"  # key that marks a JSON object of another kind than a dict with string keys
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "Size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
    "defaultdict": dict,
}


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert `value` to JSON, and collect its tensors in `tensors`.

    The tensors' names begin with `name`.

    Raises:
        CheckpointError: a part of `value` has an unsupported type; the message has the part's position.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {_KIND: "tensor", "name": name}
    if isinstance(value, (np.ndarray, np.generic)):
        tensors[name] = torch.from_numpy(np.array(value))
        return {_KIND: "number" if isinstance(value, np.generic) else "array", "name": name}
    kind = type(value).__name__
    if isinstance(value, (list, tuple, set, frozenset, deque)) and (kind == "list" or kind in _SEQUENCES):
        entries = [encode(entry, f"{name}.{i}", tensors) for i, entry in enumerate(value)]
        return entries if kind == "list" else {_KIND: kind, "entries": entries}
    if isinstance(value, (dict, Counter, OrderedDict, defaultdict)) and kind in _MAPPINGS:
        if kind == "dict" and all(type(key) is str and key != _KIND for key in value):
            return {key: encode(entry, f"{name}.{key}", tensors) for key, entry in value.items()}
        pairs = [
            [encode(key, f"{name}.key{i}", tensors), encode(entry, f"{name}.{i}", tensors)]
            for i, (key, entry) in enumerate(value.items())
        ]
        return {_KIND: kind, "entries": pairs}
    raise CheckpointError(
        "checkpoint.value_unsupported",
        "{name} is a {module}.{kind}, which a checkpoint cannot hold. Give numbers, text, lists, dicts and "
        "tensors, or an object whose state_dict has only these.",
        name=name,
        module=type(value).__module__,
        kind=kind,
    )


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Rebuild a value that `encode` has converted; `read` returns a tensor by name."""
    if isinstance(value, list):
        return [decode(entry, read) for entry in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(entry, read) for key, entry in value.items()}
    if kind == "tensor":
        return read(value["name"])
    if kind in ("array", "number"):
        array = read(value["name"]).numpy()
        return array if kind == "array" else array[()]
    entries = [decode(entry, read) for entry in value["entries"]]
    return _SEQUENCES[kind](entries) if kind in _SEQUENCES else _MAPPINGS[kind](entries)


Measure = Callable[[Any], Mapping[str, Any]]


def evaluate(engine: Engine, data: DataLoader[Any] | Iterable[Any], measure: Measure) -> dict[str, float]:
    """Average each number from `measure` over all samples; see `Engine.evaluate`."""
    if engine.plan.pp > 1 or engine.plan.cp > 1:
        raise PlanError(
            "loop.measure_by_engine",
            "plan {plan} runs the forward pass itself. Leave `measure` out to evaluate the loss that setup was given.",
            plan=engine.plan,
        )
    sums: dict[str, tuple[float, float]] = {}
    batches = 0
    dealt = _dealt(data, engine)
    with engine.evaluation.measuring(engine.rule):
        for i, batch in enumerate(dealt.batches):
            engine.evaluation.begin(i)
            with engine.compute.reads or nullcontext():
                found = measure(engine.example if batch is None else on_device(batch, engine.device))
            if not isinstance(found, Mapping):
                raise JobError(
                    "loop.measure_not_a_dict",
                    'measure(batch) must return a dict of numbers such as {{"loss": loss}}, but it returned a '
                    "{class_name}",
                    class_name=type(found).__name__,
                )
            batches += batch is not None
            if batch is not None and engine.counts_measures:
                for name, value in found.items():
                    total, count = _sum_and_count(name, value, batch, dealt.loader)
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = (before[0] + total, before[1] + count)
    everyones = engine.group.gather_json([batches, sums])
    if not any(count for count, _ in everyones):
        raise _nothing_to_measure(data)
    return _means([sums for _, sums in everyones])


def mean_loss(engine: Engine, data: DataLoader[Any] | Iterable[Any]) -> dict[str, float]:
    """Average the loss given to `setup` over all samples."""
    if not engine.has_loss:
        raise JobError(
            "loop.evaluate_without_loss",
            "setup was called without a loss. Pass a function that measures: engine.evaluate(loader, measure) with "
            "measure(batch) -> dict",
        )
    batches = 0

    def counted() -> Iterator[Any]:
        nonlocal batches
        for batch in own_batches(data, engine):
            batches += batch is not None
            yield batch

    found = engine.evaluate(counted(), [LossMetric(engine.loss)])
    if not any(engine.group.gather_json(batches)):
        raise _nothing_to_measure(data)
    return found


def _nothing_to_measure(data: Any) -> DataError:
    if isinstance(data, DataLoader) and getattr(data, "drop_last", False) and data.batch_size:
        return DataError(
            "loop.evaluation_dropped",
            "the validation loader has drop_last=True and fewer samples than its batch_size={size}, so it has no "
            "batch. Set drop_last=False.",
            size=data.batch_size,
        )
    return DataError(
        "loop.nothing_to_evaluate",
        "the validation data has no batch, so there is nothing to measure. Give engine.evaluate a loader with at least "
        "one sample, or leave the evaluation out.",
    )


def _sum_and_count(name: str, value: Any, batch: Any, loader: Loader | None) -> tuple[float, float]:
    if isinstance(value, tuple):
        total, count = value
        return float(total), float(count)
    if isinstance(value, Tensor) and value.dim() == 1:
        return float(widened(value).sum()), float(len(value))
    if isinstance(value, Tensor) and value.dim() > 1:
        raise JobError(
            "loop.measure_shape",
            "measure returns {name} of shape {shape}. Return a number, one value per sample, or (sum, count).",
            name=name,
            shape=tuple(value.shape),
        )
    if loader is not None and loader.position is not None:
        samples = loader.position.local
    else:
        samples = len(batch) if isinstance(batch, Tensor) else rows(batch)
    return float(value) * samples, float(samples)


def _means(everyones: list[dict[str, list[float]]]) -> dict[str, float]:
    """Return means over all ranks.

    Values are summed in rank order, so all ranks get bitwise equal results.
    """
    together: dict[str, list[float]] = {}
    for sums in everyones:
        for name, (total, count) in sums.items():
            before = together.setdefault(name, [0.0, 0.0])
            before[0] += total
            before[1] += count
    return {name: total / count if count else float("nan") for name, (total, count) in sorted(together.items())}


def own_batches(data: Any, engine: Engine) -> Iterator[Any]:
    """Yield this rank's batches of `data`: every n-th batch for n data-parallel ranks.

    If a replica's ranks compute together, None follows the batches, up to the largest number of batches on any rank.
    """
    return _dealt(data, engine).batches


class _Dealt(NamedTuple):
    batches: Iterator[Any]
    loader: Loader | None


def _dealt(data: Any, engine: Engine) -> _Dealt:
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
            "loop.evaluate_uneven",
            "plan {plan} needs the same number of batches on every rank. Evaluate a DataLoader whose dataset has a "
            "length.",
            plan=engine.plan,
        )
    return _Dealt(islice(data, group.rank, None, group.size), None)


def _loader_of(loader: DataLoader[Any], engine: Engine) -> tuple[Loader, int]:
    """Return this rank's loader, and the largest number of batches on any rank.

    The number is 0 for a stream, because every rank then gets a part of each batch.
    """
    group, seed = engine.data_group, engine.settings.seed
    check(loader, engine.group)
    if isinstance(loader.dataset, IterableDataset):  # every rank reads each batch and keeps its part
        return deal(loader, group, engine.group, seed, tells_epochs=False), 0
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    in_order = type(loader.sampler) is SequentialSampler and type(loader.batch_sampler) in (BatchSampler, type(None))
    if in_order:
        own = sampler if group.size == 1 else list(islice(sampler, group.rank, None, group.size))
        drawn = len(sampler)
    else:  # the ranks' random states differ, so rank 0 draws the batches; its random state is restored afterwards
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
    alone = Group()  # as the only rank of a group, each rank reads whole batches
    return deal(DataLoader(loader.dataset, **arguments), alone, alone, seed, tells_epochs=False), -(
        -drawn // group.size
    )
