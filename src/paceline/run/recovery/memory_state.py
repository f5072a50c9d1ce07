"""One rank's whole training state, kept in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.run.checkpoint.manifest import plain
from paceline.run.state import RankState, numpy_state, python_state, random_tensors, restore_random
from paceline.split.layout import local

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


@dataclass
class MemoryState:
    """Tensors and values of one rank at a step boundary.

    Only what the rank holds itself: neither `of` nor `restore` speaks with other ranks. A run is at one step again when
    all of them restore states of the same step. Under a rule with local steps these are the replica's own parameters.

    Attributes:
        step: optimizer steps that it stands for.
        tensors: on the CPU, named `model/<fqn>`, `optimizer/<fqn>/<key>`, `buffer/<fqn>`, `rng/torch`, `sync/<key>`.
        values: JSON.
    """

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @classmethod
    def of(cls, engine: Engine, values: Mapping[str, Any], reuse: MemoryState | None = None) -> MemoryState:
        """Copy the state of an engine between two steps.

        Args:
            values: the loop's own state, JSON; `restore` returns it.
            reuse: an older state that is not needed any more; its memory is written over.
        """
        tensors, numbers = _held(engine)
        rule = engine.rule.state_dict()
        tensors |= {f"sync/{key}": value.detach() for key, value in rule.items() if isinstance(value, Tensor)}
        tensors |= random_tensors(engine.device)
        scale = engine.compute.loss_scale
        kept = {
            "updates": engine.updates,
            "loader": engine.loader.state_dict(),
            "items_per_sample": engine.compute.normalization.items_per_sample,
            "last_losses": engine.guard.spikes.state_dict() if engine.guard.spikes is not None else None,
            "loss_scale": scale.state_dict() if scale is not None else None,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups],
            "numbers": numbers,
            "rule": {key: value for key, value in rule.items() if not isinstance(value, Tensor)},
            "python": python_state(),
            "numpy": numpy_state(),
            "loop": dict(values),
        }
        memory = reuse.tensors if reuse is not None else {}
        return cls(
            engine.step_count,
            {name: _copied(value, memory.get(name)) for name, value in tensors.items()},
            plain(kept, "values"),
        )

    def restore(self, engine: Engine) -> dict[str, Any]:
        """Load the state into an engine; returns the loop's values.

        The engine holds the same part of the same model as the one that it is of.

        Raises:
            CheckpointError: the engine holds other tensors. Names one, and nothing was changed.
        """
        held, values = RankState.by(engine), self.values
        targets = {f"model/{name}": local(parameter).detach() for name, parameter in held.parameters.items()}
        targets |= {f"buffer/{name}": buffer.detach() for name, buffer in held.buffers.items()}
        self._check(targets, len(engine.optimizer.param_groups))
        for name, target in targets.items():
            target.copy_(self.tensors[name])
        engine.optimizer.load_state_dict(self._optimizer_state(engine.optimizer, held.parameters))
        engine.step_count, engine.updates = self.step, values["updates"]
        engine.compute.normalization.items_per_sample = values["items_per_sample"]
        if engine.guard.spikes is not None:
            engine.guard.spikes.load_state_dict(values["last_losses"])
        if engine.compute.loss_scale is not None:
            engine.compute.loss_scale.load_state_dict(values["loss_scale"])
        engine.loader.load_state_dict(values["loader"])
        rule = {k.removeprefix("sync/"): t.clone() for k, t in self.tensors.items() if k.startswith("sync/")}
        engine.rule.load_state_dict({**values["rule"], **rule})
        restore_random(engine.device, self.tensors, values)
        loop: dict[str, Any] = values["loop"]
        return loop

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def _check(self, targets: Mapping[str, Tensor], groups: int) -> None:
        shapes = {n: tuple(t.shape) for n, t in self.tensors.items() if n.startswith(("model/", "buffer/"))}
        wanted = {name: tuple(target.shape) for name, target in targets.items()}
        for name in (*wanted, *shapes):
            if shapes.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"the state of step {self.step} in memory is of another model: it has {name} as "
                    f"{shapes.get(name, 'nothing')}, this rank as {wanted.get(name, 'nothing')}"
                )
        if len(self.values["groups"]) != groups:
            raise CheckpointError(
                f"the state of step {self.step} in memory has {len(self.values['groups'])} groups of parameters in its "
                f"optimizer, this optimizer {groups}"
            )

    def _optimizer_state(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Argument of the optimizer's `load_state_dict`, in memory of its own."""
        numbers = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        state: dict[int, dict[str, Any]] = {}
        for full_name, value in self.tensors.items():
            if full_name.startswith("optimizer/"):
                name, _, key = full_name.removeprefix("optimizer/").rpartition("/")
                own = local(parameters[name])
                # with the strides of the parameter, as fused steps want it
                kept = torch.empty_like(own, dtype=value.dtype) if value.shape == own.shape else torch.empty_like(value)
                state.setdefault(numbers[parameters[name]], {})[key] = kept.copy_(value)
        for name, plain_values in self.values["numbers"].items():
            state.setdefault(numbers[parameters[name]], {}).update(plain_values)
        groups = optimizer.state_dict()["param_groups"]
        for group, old in zip(groups, self.values["groups"], strict=True):
            group |= {k: tuple(v) if isinstance(v, list) else v for k, v in old.items() if k not in _HOW_TO_STEP}
        return {"state": state, "param_groups": groups}


# settings of an optimizer that belong to the plan of today
_HOW_TO_STEP = ("fused", "foreach")


def state_bytes(engine: Engine) -> int:
    """Memory that the weights, buffers and optimizer state of this rank take in a `MemoryState`."""
    return sum(tensor.nbytes for tensor in _held(engine)[0].values())


def _held(engine: Engine) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors of this rank's weights, buffers and optimizer, not copied.

    And the optimizer's numbers, by parameter.
    """
    held = RankState.by(engine)
    tensors = {f"model/{name}": local(parameter).detach() for name, parameter in held.parameters.items()}
    tensors |= {f"buffer/{name}": buffer.detach() for name, buffer in held.buffers.items()}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in held.parameters.items():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = local(value).detach()
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def _copied(value: Tensor, memory: Tensor | None) -> Tensor:
    """A copy on the CPU, in `memory` where that fits."""
    if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
        memory = torch.empty_like(value, device="cpu")
    return memory.copy_(value)
