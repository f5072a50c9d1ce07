"""State of the sync rule in a checkpoint, and of replicas with local parameters.

It is restored only under the same rule and on the same mesh. Otherwise a run goes on from the parameters that
all replicas agreed on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.run.checkpoint.reader import OWN, SYNC, Loaded
from paceline.split.layout import local

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


def rule_state(
    engine: Engine, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """State of the rule and this replica: (tensors, shared values, values of this rank).

    The tensors are copied before they change; the shared values are equal on all ranks.

    Args:
        parameters: what this rank's optimizer steps on, by the names in the undivided model.
    """
    state = engine.rule.state_dict()
    tensors = {f"{SYNC}{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    if engine.local_steps:
        for name, parameter in parameters.items():
            tensors[f"{OWN}model/{name}"] = local(parameter).detach()
            for key, value in engine.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{OWN}optimizer/{name}/{key}"] = local(value)
    values = {
        "rule": {key: value for key, value in state.items() if not isinstance(value, Tensor)},
        "sync": _sync(engine),
    }
    return tensors, values, {"holds": _holds(parameters)}


def own_tensors(
    engine: Engine, loaded: Loaded, parameters: Mapping[str, Tensor], mesh: dict[str, int]
) -> dict[str, Tensor]:
    """This rank's tensors from `rule_state`; empty where rule, mesh or parameters differ."""
    rank = engine.group.rank
    if _other_rule(engine, loaded) or loaded.mesh != mesh or loaded.own_values[rank].get("holds") != _holds(parameters):
        return {}
    return loaded.of_rank(rank)


def restore_rule(engine: Engine, loaded: Loaded, own: Mapping[str, Tensor]) -> list[str]:
    """Restore the rule's state, after the parameters; returns a sentence per thing left behind."""
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


def own_parameters(own: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Restore this rank's local parameter values, where they differed from the agreed ones."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if (saved := own.get(f"{OWN}model/{name}")) is not None:
                local(parameter).copy_(saved)


def own_optimizer(own: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]] | None:
    """This rank's local optimizer state by parameter name; None where none was saved."""
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
    """The sync keys of the plan as text, e.g. `sync=diloco:20 compress=int8`."""
    compress = f" compress={engine.plan.compress}" if engine.plan.compress != "none" else ""
    return f"sync={engine.plan.sync}{compress}"


def _other_rule(engine: Engine, loaded: Loaded) -> str | None:
    """The rule that saved the checkpoint, where that is not this plan's."""
    saved: str = loaded.values.get("sync", "sync=allreduce")
    return saved if saved != _sync(engine) else None


def _holds(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names and shapes of a rank's parameters."""
    listed = json.dumps([[name, list(local(parameter).shape)] for name, parameter in parameters.items()])
    return hashlib.sha256(listed.encode()).hexdigest()
