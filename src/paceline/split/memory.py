"""How many bytes of training state a rank holds: as counted, and as predicted from shapes before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.job.optimizer import OptimizerSpec
from paceline.split.parts import Parts, local

_STEP_BYTES = 4  # Adam's and LAMB's count of steps: one float32 per parameter


class StateBytes(NamedTuple):
    """What stays on one rank from the end of a backward pass to that of the optimizer step: no activations, no buffers of modules."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return sum(self)


def held_bytes(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> StateBytes:
    """What this rank holds, by the memory behind the tensors: of an FSDP2 parameter its shard, and what several tensors share once.

    Args:
        parameters: all of this rank's, as it holds them.
        optimizer: over them, or over their local tensors.
    """
    own = list(parameters)
    gradients = [p.grad for p in own if p.grad is not None]
    state = [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, Tensor)]
    return StateBytes(_bytes(own), _bytes(gradients), _bytes(state))


def predicted_bytes(parts: Parts, like: Mapping[str, Tensor], optimizer: OptimizerSpec) -> StateBytes:
    """What this rank is going to hold, from the layout of its parts alone.

    Exact but for FSDP2's padding: where a dimension does not divide, its later ranks allocate parameters and gradients as long as those
    of the first.

    Args:
        parts: of the parameters that this rank holds.
        like: the same parameters, full or divided, on any device: for their types, and whether they are trained.
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
    """Per parameter: how many tensors of its shape and type the optimizer keeps, and how many bytes besides."""
    match optimizer.name:
        case "sgd":
            return (1 if optimizer.momentum else 0), 0
        case "lars":
            return 1, 0
        case "adam" | "adamw" | "lamb":
            return 2, _STEP_BYTES


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage._cdata: storage for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
