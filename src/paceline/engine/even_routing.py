"""Even routing of tokens to experts, for dry runs, where no router has values."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from paceline.comm import Group
from paceline.job.zoo.models.moe import by_expert
from paceline.split.expert import sent_to_experts


def route_evenly(experts: Iterable[Any], ep: Group, watch: TorchDispatchMode) -> None:
    """Have `experts`, split over `ep` or not, take tokens in turn instead of by router.

    The indices are real, so the module's own code can look at them, for which the modes of tensors without values are
    left; `watch` stays.
    """
    for module in experts:
        if ep.size > 1:
            own, signature, total, _ = module.forward.args  # as `divide_experts` leaves it
        else:
            own, signature, total = module.forward, inspect.signature(module.forward), module.num_experts
        module.__dict__["forward"] = partial(_in_turn, own, signature, total, ep, watch)


def _in_turn(
    own: Any, signature: inspect.Signature, total: int, ep: Group, watch: TorchDispatchMode, *args: Any, **kwargs: Any
) -> Tensor:
    hidden, index, weights = signature.bind(*args, **kwargs).args
    with _disable_current_modes(), watch:
        even = (torch.arange(index.numel()) % total).view(index.shape)
        if ep.size == 1:
            made: Tensor = own(hidden, even, weights)
            return made
        order, counts = by_expert(even, total)
        of_experts = counts.view(ep.size, -1)
        return sent_to_experts(own, hidden, order, of_experts, of_experts[ep.rank].repeat(ep.size, 1), weights, ep)
