"""State of one rank: its content, and its copies in memory.

A state can be copied to the rank's own memory (`RankState.copied`), received from a peer (`RankState.empty`) or saved
in a checkpoint (`checkpoint.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.device import current_stream, event, is_accelerator, on_accelerator, random_state, set_random_state
from paceline.errors import CheckpointError
from paceline.split.layout import local
from paceline.state.average import drop_copies
from paceline.state.manifest import plain
from paceline.state.shard import CODES, DTYPES

if TYPE_CHECKING:
    from paceline.engine.engine import RankEngine

_ALIGNED = 16  # alignment of tensors in a memory block, in bytes
# settings of an optimizer that depend on the current plan and are not restored
_HOW_TO_STEP = ("params", "fused", "foreach")

Shapes = Mapping[str, tuple[str, Sequence[int]]]  # dtype and shape of each tensor, indexed by name


@dataclass
class RankState:
    """Tensors and values of one rank at a step boundary.

    The state contains only the rank's own tensors, and no method communicates with other ranks. To return to a step,
    all ranks must restore states of the same step. If the sync rule has local steps, the parameters are those of the
    rank's own replica.

    Attributes:
        step: number of optimizer steps taken.
        tensors: named `model/<fqn>`, `optimizer/<fqn>/<key>`, `buffer/<fqn>`, `rng/torch`, `sync/<key>`.
        values: all other state, as JSON values.
        memory: memory block that contains all tensors; None if each tensor has its own memory.
        arrived: event after which a copy from an accelerator is complete; None if the copy is complete.
    """

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    memory: Tensor | None = None
    arrived: torch.Event | None = None

    @classmethod
    def of(cls, engine: RankEngine, loop: Mapping[str, Any] | None = None) -> RankState:
        """Collect the state of an engine between two steps.

        The tensors are the tensors of the engine, not copies.

        Args:
            loop: state of the training loop as JSON values, which `restore` returns.
        """
        parameters = saved_parameters(engine)
        tensors = {f"model/{name}": local(parameter).detach() for name, parameter in parameters.items()}
        tensors |= {f"buffer/{name}": buffer.detach() for name, buffer in persistent_buffers(engine).items()}
        numbers: dict[str, dict[str, Any]] = {}
        for name, parameter in parameters.items():
            for key, value in engine.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{name}/{key}"] = local(value).detach()
                else:
                    numbers.setdefault(name, {})[key] = value
        rule = engine.rule.state_dict()
        tensors |= {f"sync/{key}": value.detach() for key, value in rule.items() if isinstance(value, Tensor)}
        tensors |= random_tensors(engine.device)
        scale, spikes = engine.compute.loss_scale, engine.guard.spikes
        values = {
            "updates": engine.updates,
            "loader": engine.loader.state_dict(),
            "items_per_sample": engine.compute.normalization.items_per_sample,
            "last_losses": spikes.state_dict() if spikes is not None else None,
            "loss_scale": scale.state_dict() if scale is not None else None,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups],
            "numbers": numbers,
            "rule": {key: value for key, value in rule.items() if not isinstance(value, Tensor)},
            "python": python_state(),
            "numpy": numpy_state(),
            "loop": dict(loop or {}),
        }
        return cls(engine.step_count, tensors, values)

    def copied(
        self, reuse: RankState | None = None, *, in_one_piece: bool = False, beside: torch.Stream | None = None
    ) -> RankState:
        """Copy the state to memory on the CPU.

        Args:
            reuse: older copy that is no longer needed. If the memory of this copy fits, it is overwritten.
            in_one_piece: True to copy all tensors into one memory block, which can be sent to a peer.
            beside: stream of an accelerator that makes the copies during the next forward and backward passes. The next
                update must wait for the event `arrived` of the result. None copies immediately.
        """
        values = plain(self.values, "values")
        memory = None
        if in_one_piece:
            memory = None if reuse is None else reuse.memory
            tensors, memory = _in_one_piece(self.shapes, memory, pinned=beside is not None)
        else:
            before = {} if reuse is None else reuse.tensors
            tensors = {name: _room_for(value, before.get(name)) for name, value in self.tensors.items()}
        if beside is not None:
            return RankState(self.step, tensors, values, memory, _copy_beside(tensors, self.tensors, beside))
        for name, value in self.tensors.items():
            tensors[name].copy_(value)
        return RankState(self.step, tensors, values, memory)

    @classmethod
    def empty(cls, header: Mapping[str, Any], memory: Tensor | None = None) -> RankState:
        """Allocate one memory block for the state that a peer's header describes.

        Args:
            memory: memory block to reuse if it has the right size.
        """
        tensors, memory = _in_one_piece(header["shapes"], memory)
        return cls(header["step"], tensors, header["values"], memory)

    @property
    def header(self) -> dict[str, Any]:
        """Everything except the contents of the tensors, as JSON values."""
        return {"step": self.step, "values": self.values, "shapes": self.shapes}

    @property
    def shapes(self) -> Shapes:
        """Type and shape of each tensor."""
        return {name: (CODES[tensor.dtype], list(tensor.shape)) for name, tensor in self.tensors.items()}

    def restore(self, engine: RankEngine) -> dict[str, Any]:
        """Load the state into an engine; return the training loop's values.

        The engine must hold the same part of the same model as the engine that this state comes from.

        Raises:
            CheckpointError: the tensors of the engine differ. The message names one of them, and the engine is
                unchanged.
        """
        parameters, values = saved_parameters(engine), self.values
        targets = {f"model/{name}": local(parameter).detach() for name, parameter in parameters.items()}
        targets |= {f"buffer/{name}": buffer.detach() for name, buffer in persistent_buffers(engine).items()}
        self._check(targets, len(engine.optimizer.param_groups))
        for name, target in targets.items():
            target.copy_(self.tensors[name])
        engine.optimizer.load_state_dict(self._optimizer_state(engine.optimizer, parameters))
        drop_copies(engine.optimizer, kept={copy.key for copy in engine.copies})
        restore_counters(engine, self.step, values)
        engine.updates = values["updates"]
        rule = {k.removeprefix("sync/"): t.clone() for k, t in self.tensors.items() if k.startswith("sync/")}
        engine.rule.load_state_dict({**values["rule"], **rule})
        restore_random(engine.device, self.tensors, values)
        loop: dict[str, Any] = values["loop"]
        return loop

    def _check(self, targets: Mapping[str, Tensor], groups: int) -> None:
        shapes = {n: tuple(t.shape) for n, t in self.tensors.items() if n.startswith(("model/", "buffer/"))}
        wanted = {name: tuple(target.shape) for name, target in targets.items()}
        for name in (*wanted, *shapes):
            if shapes.get(name) != wanted.get(name):
                raise CheckpointError(
                    "recovery.state_of_other_model",
                    "the state of step {step} in memory belongs to another model: it has {held} as the shape of "
                    "{name}, but this rank has {here}",
                    step=self.step,
                    name=name,
                    held=shapes.get(name, "nothing"),
                    here=wanted.get(name, "nothing"),
                )
        if len(self.values["groups"]) != groups:
            raise CheckpointError(
                "recovery.groups_differ",
                "the optimizer state of step {step} in memory has {held} parameter groups, but this optimizer "
                "has {here}",
                step=self.step,
                held=len(self.values["groups"]),
                here=groups,
            )

    def _optimizer_state(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        state: dict[str, dict[str, Any]] = {}
        for full_name, value in self.tensors.items():
            if full_name.startswith("optimizer/"):
                name, key = parameter_and_key(full_name)
                state.setdefault(name, {})[key] = in_order_of(local(parameters[name]), value)
        for name, numbers in self.values["numbers"].items():
            state.setdefault(name, {}).update(numbers)
        return optimizer_state(optimizer, parameters, state, self.values["groups"])


def state_bytes(engine: RankEngine) -> int:
    """Return the size in bytes of this rank's weights, buffers and optimizer state."""
    tensors = RankState.of(engine).tensors
    return sum(t.nbytes for name, t in tensors.items() if name.startswith(("model/", "buffer/", "optimizer/")))


def saved_parameters(engine: RankEngine) -> dict[str, nn.Parameter]:
    """Return the parameters that belong to a state; the frozen base of adapters does not."""
    named = engine.named_parameters()
    return {name: p for name, p in named.items() if p.requires_grad} if engine.settings.keeps_base else named


def persistent_buffers(engine: RankEngine) -> dict[str, Tensor]:
    """Return the buffers that belong to a state, indexed by names in the undivided model."""
    persistent = {id(t) for t in (*engine.model.state_dict(keep_vars=True).values(), *engine.extra.values())}
    return {name: buffer for name, buffer in engine.named_buffers().items() if id(buffer) in persistent}


def parameter_and_key(full_name: str) -> tuple[str, str]:
    """Split a name `optimizer/<fqn>/<key>` into the parameter's name and the key."""
    name, _, key = full_name.removeprefix("optimizer/").rpartition("/")
    return name, key


def in_order_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Copy optimizer state with the strides of the parameter, which fused optimizer steps require."""
    kept = torch.empty_like(parameter, dtype=value.dtype) if value.shape == parameter.shape else torch.empty_like(value)
    return kept.copy_(value)


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Build the argument of an optimizer's `load_state_dict`.

    Args:
        state: saved state of each parameter, indexed by parameter name. Names that the optimizer does not have are
            skipped.
        groups: saved settings of each parameter group.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    numbers = {names.get(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    now: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    for group, old in zip(now, groups, strict=True):
        group |= {k: tuple(v) if isinstance(v, list) else v for k, v in old.items() if k not in _HOW_TO_STEP}
    return {"state": {numbers[name]: dict(s) for name, s in state.items() if name in numbers}, "param_groups": now}


def restore_counters(engine: RankEngine, step: int, values: Mapping[str, Any]) -> None:
    """Restore the step, data position, last losses, loss scale and items per sample."""
    engine.step_count = step
    engine.compute.normalization.items_per_sample = values["items_per_sample"]
    if engine.guard.spikes is not None:
        engine.guard.spikes.load_state_dict(values.get("last_losses") or [])
    if engine.compute.loss_scale is not None and values.get("loss_scale") is not None:
        engine.compute.loss_scale.load_state_dict(values["loss_scale"])
    engine.loader.load_state_dict(values["loader"])


def _room_for(value: Tensor, memory: Tensor | None) -> Tensor:
    fits = memory is not None and memory.shape == value.shape and memory.dtype == value.dtype
    return memory if memory is not None and fits else torch.empty_like(value, device="cpu")


def _copy_beside(copies: Mapping[str, Tensor], tensors: Mapping[str, Tensor], beside: torch.Stream) -> torch.Event:
    """Copy tensors from an accelerator on the stream `beside`; return an event after the copies.

    Buffers may change in the next forward pass, so their copies are queued before the pass.
    """
    now = current_stream(beside.device)
    for name, tensor in tensors.items():
        if name.startswith("buffer/") or not on_accelerator(tensor):
            copies[name].copy_(tensor, non_blocking=True)
    beside.wait_stream(now)
    with beside:
        for name, tensor in tensors.items():
            if not name.startswith("buffer/") and on_accelerator(tensor):
                copies[name].copy_(tensor, non_blocking=True)
        ended = event(beside.device)
        ended.record()
    return ended


def _in_one_piece(shapes: Shapes, memory: Tensor | None, *, pinned: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Return tensors in one memory block, which is `memory` if the size matches."""
    size = sum(_padded(dtype, shape) for dtype, shape in shapes.values())
    if memory is None or len(memory) != size:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    found, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        found[name] = memory[at:end].view(DTYPES[dtype]).view(list(shape))
        at += _padded(dtype, shape)
    return found, memory


def _padded(dtype: str, shape: Sequence[int]) -> int:
    return math.ceil(math.prod(shape) * DTYPES[dtype].itemsize / _ALIGNED) * _ALIGNED


# Random numbers


def _random_name(device: torch.device) -> str:
    return f"rng/{device.type}"


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this rank's torch generators, indexed by names in a checkpoint."""
    tensors = {"rng/torch": torch.get_rng_state()}
    if is_accelerator(device):
        tensors[_random_name(device)] = random_state(device)
    return tensors


def python_state() -> list[Any]:
    """Return the state of Python's `random` module as JSON values."""
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def numpy_state() -> list[Any]:
    """Return the state of NumPy's global generator as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [kind, np.asarray(keys).tolist(), *rest]


def restore_random(device: torch.device, own: Mapping[str, Tensor], own_values: Mapping[str, Any]) -> list[str]:
    """Restore this rank's random generators; return remarks about states that are not restored."""
    # copied, because torch ignores the offset of a view and reads from the start of its memory
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
