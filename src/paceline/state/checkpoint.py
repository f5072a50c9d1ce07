"""Conversion between the states of all ranks and one checkpoint that any plan can load."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.split.layout import Part, ShardLayout, local, tied_names
from paceline.split.quantized import packed_layout
from paceline.state.average import drop_copies
from paceline.state.rank_state import (
    RankState,
    in_order_of,
    optimizer_state,
    parameter_and_key,
    persistent_buffers,
    restore_counters,
    restore_random,
    saved_parameters,
)
from paceline.state.reader import OWN, SYNC, Gather, Loaded, Report
from paceline.state.shard import DTYPES, MeshCoordinate
from paceline.state.writer import Snapshot

if TYPE_CHECKING:
    from paceline.engine.engine import RankEngine


def snapshot(engine: RankEngine, values: dict[str, Any]) -> Snapshot:
    """Return the engine's state as named tensors and JSON values. Every rank must call it.

    If replicas have local parameters, the snapshot has the synchronized parameters and the optimizer state of the first
    replica.

    Args:
        values: state of the training loop, saved under "loop".

    Raises:
        CheckpointError: optimizer state of a divided parameter is neither divided like the parameter nor a single
            number.
    """
    share, state = ModelShare.of(engine), RankState.of(engine, values)
    shared, parts = _agreed_parameters(engine, share)
    own = {name: value for name, value in state.tensors.items() if not name.startswith(("model/", "optimizer/"))}
    if engine.local_steps:
        own |= {f"{OWN}{name}": value for name, value in state.tensors.items() if name not in own}
    for full_name, value in state.tensors.items():
        if full_name.startswith("optimizer/") and not (engine.local_steps and share.coordinate.place.get("dp")):
            name, _ = parameter_and_key(full_name)
            shared[full_name] = value
            if share.parts is not None or engine.local_steps:
                parts[full_name] = _state_part(full_name, value, share.part(name), local_steps=engine.local_steps)
    numbers = state.values["numbers"]
    return Snapshot(
        shared=shared,
        own=own,
        values={
            "step": state.step,
            **{key: state.values[key] for key in ("loader", "items_per_sample", "rule", "loop")},
            **{key: found for key in ("last_losses", "loss_scale") if (found := state.values[key]) is not None},
            "optimizer": {"groups": state.values["groups"]},
            **({"base": base_digest(engine)} if engine.settings.keeps_base else {}),
            "sync": _sync(engine),
        },
        own_values={
            **{key: state.values[key] for key in ("python", "numpy")},
            "holds": _digest(share.parameters),
            **({"scalars": numbers} if numbers and share.coordinate.is_first_of_stage else {}),
        },
        aliases=share.aliases,
        parts=parts,
        coordinate=share.coordinate,
    )


def restore(engine: RankEngine, loaded: Loaded, report: Report = lambda *_: None) -> dict[str, Any]:
    """Load a checkpoint of any plan into the engine; return the training loop's values.

    Every rank must call this function. Random states are restored only on the mesh that saved them, and so is the local
    state of replicas with local steps. On another mesh, every data-parallel rank gets a new seed, and all ranks
    continue from the synchronized parameters.

    Args:
        report: called with a remark about each part of the state that is not restored.

    Raises:
        CheckpointError: the checkpoint has another model or optimizer. The message names the differences, and the
            engine is unchanged.
    """
    share = ModelShare.of(engine)
    _check_same_model(engine, share, loaded)
    alone = _own_tensors(engine, loaded, share.parameters, share.coordinate.sizes)
    state = _optimizer_state(share, engine.optimizer, loaded, _own_optimizer(alone, share.parameters))
    for name, parameter in share.parameters.items():
        loaded.shared.fill(f"model/{name}", local(parameter).detach(), share.part(name).layout)
    with torch.no_grad():
        for name, parameter in share.parameters.items():
            # saved only if the local parameter may differ from the synchronized parameter
            if (saved := alone.get(f"{OWN}model/{name}")) is not None:
                local(parameter).copy_(saved)
    own = loaded.own_of(share.coordinate)
    with torch.no_grad():
        for name, buffer in share.buffers.items():
            buffer.copy_(own[f"buffer/{name}"])
    engine.optimizer.load_state_dict(state)
    drop_copies(engine.optimizer, kept={copy.key for copy in engine.copies})
    values = loaded.values
    restore_counters(engine, values["step"], values)
    if said := _restore_rule(engine, loaded, alone):
        report("sync", {"said": said})
    if loaded.mesh == share.coordinate.sizes:
        if said := restore_random(engine.device, own, loaded.own_values[share.coordinate.rank]):
            report("random", {"said": said})
    else:
        torch.manual_seed(engine.settings.seed * 1_000_003 + 1 + share.coordinate.data_rank + 7919 * engine.step_count)
    loop: dict[str, Any] = values["loop"]
    return loop


def _agreed_parameters(engine: RankEngine, share: ModelShare) -> tuple[dict[str, Tensor], dict[str, Part]]:
    """Return the synchronized parameters, and this rank's part of each parameter.

    If replicas have local parameters, the parameters have the synchronized values only inside a context. The values are
    then copied.
    """
    shared: dict[str, Tensor] = {}
    with engine.rule.shared_parameters():
        for name, parameter in share.parameters.items():
            own = local(parameter).detach()
            shared[f"model/{name}"] = own.clone() if engine.local_steps else own
    return shared, {} if share.parts is None else {
        f"model/{name}": part for name, part in share.parts.items() if name in share.parameters
    }


@dataclass
class ModelShare:
    """A rank's share of the model, indexed by names in the undivided model.

    Attributes:
        parameters: tensors that the optimizer steps on.
        parts: the part of each full parameter that this rank holds; None if all parameters are whole.
    """

    parameters: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    parts: Mapping[str, Part] | None
    coordinate: MeshCoordinate
    aliases: dict[str, str]

    @classmethod
    def of(cls, engine: RankEngine) -> ModelShare:
        """Return the share of the engine's rank."""
        model, mesh = engine.model, engine.split.mesh if engine.split is not None else None
        coordinate = (
            MeshCoordinate.of(mesh) if mesh is not None else MeshCoordinate.plain(engine.group.rank, engine.group.size)
        )
        aliases = engine.split.aliases if engine.split is not None else tied_names(model)
        parameters = saved_parameters(engine)
        aliases = {name: first for name, first in aliases.items() if _bare(first) in parameters or _is_buffer(first)}
        return cls(parameters, persistent_buffers(engine), engine.parts, coordinate, aliases)

    def part(self, name: str) -> Part:
        """Return this rank's part of a parameter."""
        return Part(name, ShardLayout.whole(self.parameters[name].shape)) if self.parts is None else self.parts[name]

    def shapes(self) -> dict[str, list[int]]:
        """Return the full shapes of all parameters and buffers, indexed by names in a checkpoint."""
        shapes = {f"model/{name}": list(self.part(name).layout.full) for name in self.parameters}
        return shapes | {f"buffer/{name}": list(buffer.shape) for name, buffer in self.buffers.items()}


def _state_part(name: str, value: Tensor, part: Part, *, local_steps: bool) -> Part:
    """Return the part of an optimizer state tensor that a rank holds.

    The tensor is divided like its parameter, or it is whole on all ranks that hold a part of the parameter.

    Args:
        local_steps: True if replicas have local parameters. Only one replica then saves the state.
    """
    sharded = part.sharded | {"dp"} if local_steps else part.sharded
    if value.shape == part.layout.shape:
        return replace(part, sharded=sharded)
    if (packed := packed_layout(value.shape, value.dtype, part.layout, whole=False)) is not None:
        return Part(name, packed, sharded, set(), part.stages, part.writes)
    if not part.sharded or value.numel() == 1:
        return Part(name, ShardLayout.whole(value.shape), sharded, set(), part.stages, part.writes)
    raise CheckpointError(
        "checkpoint.state_shape",
        "{name} has shape {shape}, but this rank's part of the parameter has shape {part}. If a plan divides a "
        "parameter, its optimizer state must be divided in the same way or be a single number. Use an optimizer "
        "that works elementwise, or a plan that does not divide the parameter along {axes}.",
        name=name,
        shape=tuple(value.shape),
        part=part.layout.shape,
        axes=sorted(part.sharded),
    )


def _check_same_model(engine: RankEngine, share: ModelShare, loaded: Loaded) -> None:
    if engine.settings.keeps_base:
        refuse_other_base(base_digest(engine), loaded)
    wanted = share.shapes()
    if share.coordinate.sizes.get("pp", 1) > 1:  # no pipeline stage knows all names
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
        raise CheckpointError(
            "checkpoint.of_other_model",
            "the checkpoint of step {step} belongs to another model: {wrong}{more}",
            step=loaded.step,
            wrong="; ".join(wrong[:5]),
            more=more,
        )


def _bare(name: str) -> str:
    return name.split("/", 1)[1]


def _is_buffer(name: str) -> bool:
    return name.startswith("buffer/")


def base_digest(engine: RankEngine) -> str:
    """Return a digest of the frozen parameters of a model with adapters.

    It does not depend on the plan. All ranks call this function; the digest is computed once.
    """
    if engine.base_digest is None:
        engine.base_digest = digest_of_frozen(engine.named_parameters(), engine.parts, engine.group.gather_json)
    return engine.base_digest


def digest_of_frozen(
    parameters: Mapping[str, Tensor], parts: Mapping[str, Part] | None = None, gather: Gather = lambda own: [own]
) -> str:
    """Return a digest of all frozen parameters of a model.

    Args:
        parameters: this rank's parameters.
        parts: the part of each parameter that this rank holds; None if all are whole.
        gather: function that gathers a value of every rank.
    """
    own = []
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            tensor = local(parameter).detach()
            layout = ShardLayout.whole(tensor.shape) if parts is None else parts[name].layout
            own += [
                (f"{name} {box.full} {box.shape}", _sum_of_words(box.of(tensor), box.full)) for box in layout.boxes()
            ]
    found: dict[str, int] = {}
    # several ranks may hold the same block, which counts once
    for block, digest in dict(entry for told in gather(own) for entry in told).items():
        name = block.partition(" ")[0]
        found[name] = (found.get(name, 0) + digest) % 2**64
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


_WORDS_AT_ONCE = 2**20


def _sum_of_words(block: Tensor, offset: Sequence[int]) -> int:
    """Return the sum of a block's elements as integers, weighted by position, modulo 2^64."""
    if block.is_floating_point():  # in float64, weights of a file in float32 are the same
        block = block.to(torch.float32).view(torch.int32)
    if block.dim() == 0:
        return int(block) % 2**64
    rows = max(1, _WORDS_AT_ONCE // max(block[0].numel(), 1))
    total = 0
    for first in range(0, len(block), rows):
        words = block[first : first + rows].to(torch.int64)
        for dim in reversed(range(block.dim())):
            start = offset[dim] + (0 if dim else first)
            words = (words * _weights(dim, start, words.shape[-1], block.device)).sum(-1)
        total += int(words)
    return total % 2**64


def _weights(dim: int, start: int, length: int, device: torch.device) -> Tensor:
    """Return odd numbers that the dimension and the index determine."""
    index = torch.arange(start, start + length, dtype=torch.int64, device=device)
    return (index * 0x5851F42D4C957F2D + (dim + 1) * 0x14057B7EF767814F) | 1


def refuse_other_base(digest: str, loaded: Loaded) -> None:
    """Refuse adapters of a checkpoint that were trained with different base weights.

    Args:
        digest: `base_digest` of the model.

    Raises:
        CheckpointError: the base differs.
    """
    if loaded.values.get("base") != digest:
        raise CheckpointError(
            "checkpoint.of_other_base",
            "the adapters in the checkpoint of step {step} were trained with different base weights: the model's "
            "folder, its code or its initialisation has changed. Restore the base weights, or start a new run.",
            step=loaded.step,
        )


# Optimizer


def _optimizer_state(
    share: ModelShare, optimizer: torch.optim.Optimizer, loaded: Loaded, alone: Mapping[str, dict[str, Tensor]] | None
) -> dict[str, Any]:
    """Return this rank's part of the saved optimizer state, for `load_state_dict`.

    Args:
        alone: local optimizer state of this rank, indexed by parameter name. None to use the shared state.
    """
    groups, saved_groups = optimizer.param_groups, loaded.values["optimizer"]["groups"]
    if len(saved_groups) != len(groups):
        raise CheckpointError(
            "checkpoint.groups_differ",
            "the optimizer in the checkpoint of step {step} has {saved} parameter groups, but this "
            "optimizer has {here}",
            step=loaded.step,
            saved=len(saved_groups),
            here=len(groups),
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[str, dict[str, Any]] = {}
    for full_name in loaded.shared:
        name, key = parameter_and_key(full_name)
        if not full_name.startswith("optimizer/") or name not in share.parameters:
            continue  # this is a tensor of the model, or state of another pipeline stage
        if id(share.parameters[name]) not in held:
            raise CheckpointError(
                "checkpoint.state_unknown",
                "the checkpoint of step {step} has optimizer state for {name!r}, which this optimizer does not have",
                step=loaded.step,
                name=name,
            )
        if alone is None:
            own = _read_state(full_name, local(share.parameters[name]), share.part(name), loaded)
            state.setdefault(name, {})[key] = own
    state |= alone or {}
    for own_values in loaded.own_values:
        for name, scalars in own_values.get("scalars", {}).items():
            state.setdefault(name, {}).update(scalars)
    return optimizer_state(optimizer, share.parameters, state, saved_groups)


def _read_state(full_name: str, parameter: Tensor, part: Part, loaded: Loaded) -> Tensor:
    """Read this rank's part of a parameter's optimizer state.

    State that has the same shape as the parameter also gets its strides. Any other state is read whole.
    """
    entry = loaded.shared.entries[full_name]
    if entry.shape and tuple(entry.shape) == part.layout.full:
        own = torch.empty_like(parameter, dtype=DTYPES[entry.dtype])
        loaded.shared.fill(full_name, own, part.layout)
        return own
    packed = packed_layout(entry.shape, DTYPES[entry.dtype], part.layout, whole=True)
    if packed is not None:
        own = torch.empty(packed.shape, dtype=torch.uint8, device=parameter.device)
        loaded.shared.fill(full_name, own, packed)
        return own
    if part.sharded and math.prod(entry.shape) != 1:
        raise CheckpointError(
            "checkpoint.state_not_divisible",
            "the checkpoint of step {step} has {name} of shape {shape} for a parameter of shape {full}, which this "
            "plan divides along {axes}. paceline does not know how to divide this state. Resume under a plan that "
            "does not divide the parameter.",
            step=loaded.step,
            name=full_name,
            shape=tuple(entry.shape),
            full=part.layout.full,
            axes=sorted(part.sharded),
        )
    return loaded.shared[full_name]


def _own_tensors(
    engine: RankEngine, loaded: Loaded, parameters: Mapping[str, Tensor], mesh: dict[str, int]
) -> dict[str, Tensor]:
    """Return the saved tensors of this rank alone, if sync rule, mesh and parameters match."""
    rank = engine.group.rank
    if (
        _other_rule(engine, loaded)
        or loaded.mesh != mesh
        or loaded.own_values[rank].get("holds") != _digest(parameters)
    ):
        return {}
    return loaded.of_rank(rank)


def _restore_rule(engine: RankEngine, loaded: Loaded, own: Mapping[str, Tensor]) -> list[str]:
    """Restore the state of the sync rule. Return a remark if local state is not restored.

    The parameters must already be restored.
    """
    other = _other_rule(engine, loaded)
    values = {} if other else loaded.values["rule"]
    engine.rule.load_state_dict(
        {**values, **{key.removeprefix(SYNC): value for key, value in own.items() if key.startswith(SYNC)}}
    )
    kept = sorted({name.split("/", 1)[0] + "/" for shard in loaded.shards for name in shard.own} & {SYNC, OWN})
    if not kept or own:
        return []
    why = f"{other} saved it" if other else "the ranks hold other parts of the model now"
    return [
        (
            f"the state that each rank had of its own in step {loaded.step} is left behind: {why}. Training goes "
            "on from what all agreed on"
        )
    ]


def _own_optimizer(own: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]] | None:
    """Return this rank's local optimizer state by parameter name, or None if none was saved."""
    if not any(name.startswith(OWN) for name in own):
        return None
    found: dict[str, dict[str, Tensor]] = {}
    for full_name, value in own.items():
        if full_name.startswith(f"{OWN}optimizer/"):
            name, key = parameter_and_key(full_name.removeprefix(OWN))
            found.setdefault(name, {})[key] = in_order_of(local(parameters[name]), value)
    return found


def _sync(engine: RankEngine) -> str:
    compress = f" compress={engine.plan.compress}" if engine.plan.compress != "none" else ""
    return f"sync={engine.plan.sync}{compress}"


def _other_rule(engine: RankEngine, loaded: Loaded) -> str | None:
    saved: str = loaded.values.get("sync", "sync=allreduce")
    return saved if saved != _sync(engine) else None


def _digest(parameters: Mapping[str, Tensor]) -> str:
    listed = json.dumps([[name, list(local(parameter).shape)] for name, parameter in parameters.items()])
    return hashlib.sha256(listed.encode()).hexdigest()
