"""What a checkpoint keeps of how the replicas agree: the rule's own state and, where they train apart, what each of them holds.

Neither means anything under another rule, or on a mesh where the ranks hold other parts. There, a run goes on from what all agreed on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.split.parts import local
from paceline.training.checkpoint.reader import OWN, SYNC, Loaded

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


def rule_state(engine: Engine, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """This rank's tensors (copied before they change), values that are the same on all ranks, and values of this rank.

    Args:
        parameters: what this rank's optimizer steps on, by the names in the undivided model.
    """
    state = engine.rule.state_dict()
    tensors = {f"{SYNC}{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    if engine.apart:
        for name, parameter in parameters.items():
            tensors[f"{OWN}model/{name}"] = local(parameter).detach()
            for key, value in engine.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{OWN}optimizer/{name}/{key}"] = local(value)
    values = {"rule": {key: value for key, value in state.items() if not isinstance(value, Tensor)}, "sync": _sync(engine)}
    return tensors, values, {"holds": _holds(parameters)}


def own_tensors(engine: Engine, loaded: Loaded, parameters: Mapping[str, Tensor], mesh: dict[str, int]) -> dict[str, Tensor]:
    """What `rule_state` had saved of this rank; nothing where the rule, the mesh or what this rank holds is another one now."""
    rank = engine.group.rank
    if _other_rule(engine, loaded) or loaded.mesh != mesh or loaded.own_values[rank].get("holds") != _holds(parameters):
        return {}
    return loaded.of_rank(rank)


def restore_rule(engine: Engine, loaded: Loaded, own: Mapping[str, Tensor]) -> list[str]:
    """Give the rule its state back, after the parameters; returns what is left behind, a sentence each."""
    other = _other_rule(engine, loaded)
    values = {} if other else loaded.values["rule"]
    engine.rule.load_state_dict({**values, **{key.removeprefix(SYNC): value for key, value in own.items() if key.startswith(SYNC)}})
    kept = sorted({name.split("/", 1)[0] + "/" for shard in loaded.shards for name in shard.own} & {SYNC, OWN})
    if not kept or own:
        return []
    why = f"{other} saved it" if other else "the ranks hold other parts of the model now"
    return [
        f"the state that each rank had of its own in step {loaded.step} is left behind: {why}. Training goes on from what all agreed on"
    ]


def own_parameters(own: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Give the parameters the values that this rank had, where those were not the ones that all agreed on."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if (saved := own.get(f"{OWN}model/{name}")) is not None:
                local(parameter).copy_(saved)


def own_optimizer(own: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]] | None:
    """What the optimizer of this rank had kept, by the name of the parameter; None where nothing says that it was this rank's own."""
    if not any(name.startswith(OWN) for name in own):
        return None
    found: dict[str, dict[str, Tensor]] = {}
    for full_name, value in own.items():
        if full_name.startswith(f"{OWN}optimizer/"):
            name, _, key = full_name.removeprefix(f"{OWN}optimizer/").rpartition("/")
            found.setdefault(name, {})[key] = _in_order_of(local(parameters[name]), value)
    return found


def _in_order_of(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` with the strides of the parameter, where it has its shape."""
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value) if value.shape == parameter.shape else value


def _sync(engine: Engine) -> str:
    """How the replicas agree, in the words of the plan."""
    compress = f" compress={engine.plan.compress}" if engine.plan.compress != "none" else ""
    return f"sync={engine.plan.sync}{compress}"


def _other_rule(engine: Engine, loaded: Loaded) -> str | None:
    """The rule that saved the checkpoint, where that is not this plan's."""
    saved: str = loaded.values.get("sync", "sync=allreduce")
    return saved if saved != _sync(engine) else None


def _holds(parameters: Mapping[str, Tensor]) -> str:
    """Which parameters a rank has, and in which shapes."""
    listed = json.dumps([[name, list(local(parameter).shape)] for name, parameter in parameters.items()])
    return hashlib.sha256(listed.encode()).hexdigest()
