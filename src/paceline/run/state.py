"""Complete state of a run: weights, optimizer, random states and data position."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.device import is_accelerator, random_state, set_random_state
from paceline.errors import CheckpointError
from paceline.run.checkpoint.reader import Loaded, Report
from paceline.run.checkpoint.rule_state import own_optimizer, own_parameters, own_tensors, restore_rule, rule_state
from paceline.run.checkpoint.shard import DTYPES
from paceline.run.checkpoint.shard_assignment import MeshCoordinate
from paceline.run.checkpoint.writer import Snapshot
from paceline.split.layout import Part, ShardLayout, local, tied_names

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


def snapshot(engine: Engine, values: dict[str, Any]) -> Snapshot:
    """The engine's state as named tensors and JSON values; every rank calls it.

    Replicas with local parameters share the agreed ones, and the optimizer state of the first replica.

    Args:
        values: the loop's own state, saved under "loop".

    Raises:
        CheckpointError: the optimizer keeps something of a divided parameter that is neither divided like it
            nor a single number.
    """
    held = RankState.by(engine)
    rule_tensors, rule_values, rule_own_values = rule_state(engine, held.parameters)
    shared, parts = _agreed_parameters(engine, held)
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in held.parameters.items():
        part = held.parts[name] if held.parts is not None else None
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            full_name = f"optimizer/{name}/{key}"
            if not isinstance(value, Tensor):
                scalars.setdefault(name, {})[key] = value
            elif not engine.local_steps or not held.coordinate.place.get("dp"):
                shared[full_name] = local(value)
                if part is not None or engine.local_steps:
                    parts[full_name] = _state_part(
                        full_name, shared[full_name], part or held.part(name), local_steps=engine.local_steps
                    )
    return Snapshot(
        shared=shared,
        own={
            **{f"buffer/{name}": b.detach() for name, b in held.buffers.items()},
            **random_tensors(engine.device),
            **rule_tensors,
        },
        values={
            "step": engine.step_count,
            "loader": engine.loader.state_dict(),
            "items_per_sample": engine.compute.normalization.items_per_sample,
            **({} if engine.guard.spikes is None else {"last_losses": engine.guard.spikes.state_dict()}),
            "optimizer": {
                "groups": [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
            },
            **rule_values,
            "loop": values,
        },
        own_values={
            "python": python_state(),
            "numpy": numpy_state(),
            **rule_own_values,
            **({"scalars": scalars} if scalars and held.coordinate.is_first_of_stage else {}),
        },
        aliases=held.aliases,
        parts=parts,
        coordinate=held.coordinate,
    )


def restore(engine: Engine, loaded: Loaded, report: Report = lambda *_: None) -> dict[str, Any]:
    """Load a checkpoint of any plan into the engine; returns the loop's values.

    Every rank calls it. Random states, and local state of replicas with local steps, return only on the
    same mesh; on another, every data-parallel rank draws from a fresh seed of its own, and all go on from the
    parameters that they agreed on.

    Args:
        report: called with what is left behind.

    Raises:
        CheckpointError: it is of another model or optimizer. Names what differs, and nothing was changed.
    """
    held = RankState.by(engine)
    _check_same_model(engine, held, loaded)
    alone = own_tensors(engine, loaded, held.parameters, held.coordinate.sizes)
    state = _optimizer_state(held, engine.optimizer, loaded, own_optimizer(alone, held.parameters))
    for name, parameter in held.parameters.items():
        loaded.shared.fill(f"model/{name}", local(parameter).detach(), held.part(name).layout)
    own_parameters(alone, held.parameters)
    own = loaded.own_of(held.coordinate)
    with torch.no_grad():
        for name, buffer in held.buffers.items():
            buffer.copy_(own[f"buffer/{name}"])
    engine.optimizer.load_state_dict(state)
    values = loaded.values
    engine.step_count = values["step"]
    engine.compute.normalization.items_per_sample = values["items_per_sample"]
    if engine.guard.spikes is not None:
        engine.guard.spikes.load_state_dict(values.get("last_losses", []))
    engine.loader.load_state_dict(values["loader"])
    if said := restore_rule(engine, loaded, alone):
        report("sync", {"said": said})
    if loaded.mesh == held.coordinate.sizes:
        if said := restore_random(engine.device, own, loaded.own_values[held.coordinate.rank]):
            report("random", {"said": said})
    else:
        torch.manual_seed(engine.settings.seed * 1_000_003 + 1 + held.coordinate.data_rank + 7919 * engine.step_count)
    loop: dict[str, Any] = values["loop"]
    return loop


def _agreed_parameters(engine: Engine, held: RankState) -> tuple[dict[str, Tensor], dict[str, Part]]:
    """Parameters that all replicas agree on, and this rank's part of each.

    Where replicas have local parameters, these hold the agreed values only for a moment, and are copied.
    """
    shared: dict[str, Tensor] = {}
    with engine.rule.in_agreement():
        for name, parameter in held.parameters.items():
            own = local(parameter).detach()
            shared[f"model/{name}"] = own.clone() if engine.local_steps else own
    return shared, {} if held.parts is None else {
        f"model/{name}": part for name, part in held.parts.items() if name in held.parameters
    }


@dataclass
class RankState:
    """A rank's share of the model, by the names in the undivided one.

    Attributes:
        parameters: tensors that the optimizer steps on.
        parts: the part that each of them is; None where all are whole.
    """

    parameters: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    parts: Mapping[str, Part] | None
    coordinate: MeshCoordinate
    aliases: dict[str, str]

    @classmethod
    def by(cls, engine: Engine) -> RankState:
        """The share of an engine's rank."""
        model, mesh = engine.model, engine.split.mesh if engine.split is not None else None
        persistent = {id(tensor) for tensor in (*model.state_dict(keep_vars=True).values(), *engine.extra.values())}
        buffers = {name: buffer for name, buffer in engine.named_buffers().items() if id(buffer) in persistent}
        coordinate = (
            MeshCoordinate.of(mesh) if mesh is not None else MeshCoordinate.plain(engine.group.rank, engine.group.size)
        )
        aliases = engine.split.aliases if engine.split is not None else tied_names(model)
        return cls(engine.named_parameters(), buffers, engine.parts, coordinate, aliases)

    def part(self, name: str) -> Part:
        """This rank's part of a parameter."""
        return Part(name, ShardLayout.whole(self.parameters[name].shape)) if self.parts is None else self.parts[name]

    def shapes(self) -> dict[str, list[int]]:
        """Full shapes of all parameters and buffers, by the names in a checkpoint."""
        shapes = {f"model/{name}": list(self.part(name).layout.full) for name in self.parameters}
        return shapes | {f"buffer/{name}": list(buffer.shape) for name, buffer in self.buffers.items()}


def _state_part(name: str, value: Tensor, part: Part, *, local_steps: bool) -> Part:
    """The part that a rank holds of an optimizer state tensor.

    It is divided like its parameter, or whole on all ranks that hold some of the parameter.

    Args:
        local_steps: True where replicas have local parameters: only one saves the state, as if the others held
            other parts.
    """
    sharded = part.sharded | {"dp"} if local_steps else part.sharded
    if value.shape == part.layout.shape:
        return replace(part, sharded=sharded)
    if not part.sharded or value.numel() == 1:
        return Part(name, ShardLayout.whole(value.shape), sharded, set(), part.stages, part.writes)
    raise CheckpointError(
        f"{name} has shape {tuple(value.shape)}, and this rank's part of the parameter {part.layout.shape}: of a "
        "divided parameter, only what is divided in the same way and single numbers can be saved. Use an optimizer "
        f"that works elementwise, or a plan that does not divide the parameter along {', '.join(sorted(part.sharded))}"
    )


def _check_same_model(engine: Engine, held: RankState, loaded: Loaded) -> None:
    wanted = held.shapes()
    if held.coordinate.sizes.get("pp", 1) > 1:  # no stage has all names
        wanted = {name: shape for shapes in engine.group.gather_json(wanted) for name, shape in shapes.items()}
    saved = {name: entry.shape for name, entry in loaded.shared.entries.items() if name.startswith("model/")}
    saved |= {
        name: own.shape for shard in loaded.shards for name, own in shard.own.items() if name.startswith("buffer/")
    }
    wrong = [f"{_bare(n)} is missing" for n in wanted if n not in saved]
    wrong += [f"{_bare(n)} is unknown to the model" for n in saved if n not in wanted]
    wrong += [
        f"{_bare(n)} has shape {tuple(saved[n])}, the model wants {tuple(shape)}"
        for n, shape in wanted.items()
        if n in saved and saved[n] != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"the checkpoint of step {loaded.step} is of another model: {'; '.join(wrong[:5])}{more}")


def _bare(name: str) -> str:
    return name.split("/", 1)[1]


# The optimizer


def _optimizer_state(
    held: RankState, optimizer: torch.optim.Optimizer, loaded: Loaded, alone: Mapping[str, dict[str, Tensor]] | None
) -> dict[str, Any]:
    """This rank's part of the saved state, for the optimizer's `load_state_dict`.

    Args:
        alone: what this rank had of its own, by parameter; None where what is shared is every rank's.
    """
    groups, saved_groups = optimizer.state_dict()["param_groups"], loaded.values["optimizer"]["groups"]
    if len(saved_groups) != len(groups):
        raise CheckpointError(
            f"the checkpoint of step {loaded.step} has {len(saved_groups)} groups of parameters in its optimizer, "
            f"this optimizer {len(groups)}"
        )
    names = {parameter: name for name, parameter in held.parameters.items()}
    numbers = {names.get(p, ""): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state: dict[int, dict[str, Any]] = {}
    for full_name, name, key in _saved_states(loaded):
        if name not in held.parameters:
            continue  # of another pipeline stage
        if name not in numbers:
            raise CheckpointError(
                f"the checkpoint of step {loaded.step} has optimizer state for {name!r}, which this optimizer "
                "does not hold"
            )
        if alone is None:
            own = _read_state(full_name, local(held.parameters[name]), held.part(name), loaded)
            state.setdefault(numbers[name], {})[key] = own
    state |= {numbers[name]: values for name, values in (alone or {}).items()}
    for own_values in loaded.own_values:
        for name, scalars in own_values.get("scalars", {}).items():
            if name in numbers:
                state.setdefault(numbers[name], {}).update(scalars)
    for group, old in zip(groups, saved_groups, strict=True):
        for key, value in old.items():
            if key not in ("params", "fused", "foreach"):  # how the step is computed belongs to the plan of today
                group[key] = tuple(value) if isinstance(value, list) else value
    return {"state": state, "param_groups": groups}


def _saved_states(loaded: Loaded) -> Iterator[tuple[str, str, str]]:
    for full_name in loaded.shared:
        if full_name.startswith("optimizer/"):
            name, _, key = full_name.removeprefix("optimizer/").rpartition("/")
            yield full_name, name, key


def _read_state(full_name: str, parameter: Tensor, part: Part, loaded: Loaded) -> Tensor:
    """Saved optimizer state of a parameter: this rank's part, with the parameter's strides.

    State that is not divided is returned whole.
    """
    entry = loaded.shared.entries[full_name]
    if entry.shape and tuple(entry.shape) == part.layout.full:
        own = torch.empty_like(parameter, dtype=DTYPES[entry.dtype])
        loaded.shared.fill(full_name, own, part.layout)
        return own
    if part.sharded and math.prod(entry.shape) != 1:
        raise CheckpointError(
            f"the checkpoint of step {loaded.step} has {full_name} of shape {tuple(entry.shape)} for a parameter of "
            f"shape {part.layout.full}, which this plan divides along {', '.join(sorted(part.sharded))}; how to divide "
            "the state is not known. Resume under a plan that does not divide the parameter"
        )
    return loaded.shared[full_name]


# Random numbers


def _random_name(device: torch.device) -> str:
    return f"rng/{device.type}"


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """This rank's random states of torch, by the names in a checkpoint."""
    tensors = {"rng/torch": torch.get_rng_state()}
    if is_accelerator(device):
        tensors[_random_name(device)] = random_state(device)
    return tensors


def python_state() -> list[Any]:
    """State of `random`, as JSON values."""
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def numpy_state() -> list[Any]:
    """State of NumPy's global generator, as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [kind, np.asarray(keys).tolist(), *rest]


def restore_random(device: torch.device, own: Mapping[str, Tensor], own_values: Mapping[str, Any]) -> list[str]:
    """Restore this rank's random states; returns remarks on what is left behind."""
    # a copy, as torch reads from where the memory of a view begins
    torch.set_rng_state(own["rng/torch"].clone())
    version, numbers, gauss = own_values["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = own_values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if not is_accelerator(device):
        return []
    if _random_name(device) in own:
        set_random_state(device, own[_random_name(device)])
        return []
    return [f"the checkpoint is not of a {device.type} device: random numbers that are drawn on it begin anew"]
