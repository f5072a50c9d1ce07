"""Bytes of training state on a rank: measured, and predicted from shapes before allocation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.job.optimizer import OptimizerSpec
from paceline.split.parts import Parts, local

# Adam's and LAMB's step counter: one float32 per parameter
_STEP_BYTES = 4


class StateBytes(NamedTuple):
    """Bytes that a rank holds between backward pass and optimizer step.

    Activations and module buffers are not counted.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Sum of all three."""
        return sum(self)


def held_bytes(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> StateBytes:
    """Bytes of training state that this rank holds, counted by the memory behind its tensors.

    An FSDP2 parameter counts by its shard; memory that several tensors share counts once.

    Args:
        parameters: all parameters of this rank, as it holds them.
        optimizer: over them, or over their local tensors.
    """
    own = list(parameters)
    gradients = [part for p in own if p.grad is not None for part in _parts(p.grad)]
    state = [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, Tensor)]
    return StateBytes(_bytes(own), _bytes(gradients), _bytes(state))


def predicted_bytes(parts: Parts, like: Mapping[str, Tensor], optimizer: OptimizerSpec) -> StateBytes:
    """Bytes of training state that this rank will hold, from the layouts of its parts.

    Exact but for FSDP2's padding: where a dimension does not divide evenly, the later ranks allocate parameters and
    gradients as long as those of the first.

    Args:
        parts: the parts of the parameters that this rank holds.
        like: the same parameters, full or divided, on any device; their dtype and `requires_grad` are read.
        optimizer: the job's.
    """
    copies, steps = _state_of(optimizer)
    parameters = gradients = state = 0
    for name, part in parts.items():
        own = part.layout.numel * like[name].element_size()
        parameters += own
        if like[name].requires_grad:
            gradients += own
            state += copies * own + steps
    return StateBytes(parameters, gradients, state)


def _state_of(optimizer: OptimizerSpec) -> tuple[int, int]:
    """Optimizer state per parameter: number of tensors of its shape and type, and further bytes."""
    match optimizer.name:
        case "sgd":
            return (1 if optimizer.momentum else 0), 0
        case "lars":
            return 1, 0
        case "adam" | "adamw" | "lamb":
            return 2, _STEP_BYTES


def _parts(gradient: Tensor) -> tuple[Tensor, ...]:
    """The tensors behind a gradient: of a sparse one its rows and their numbers."""
    return (gradient._values(), gradient._indices()) if gradient.is_sparse else (gradient,)


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage._cdata: storage for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
