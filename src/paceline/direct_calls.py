"""`loss.backward()` and `optimizer.step()` without the checks that torch makes in every call.

torch checks arguments, looks for hooks and announces optimizer steps to the profiler. In a step of a tiny model, these
checks take a noticeable part of the time (`benchmarks/overhead.py` times such steps). The functions of this file skip
the checks. If there is a hook, a profiler or an argument that torch must check, they call torch's own functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

HOOKS_OF_LOOPS: set[int] = set()
"""IDs of hooks that `take_step` need not call, because they check only steps of a user's own loop."""


def backward(loss: Tensor, *, retain_graph: bool | None = None) -> None:
    """Compute the gradients of a loss, as `loss.backward()` does."""
    if type(loss) is Tensor and not loss.dim() and loss.is_floating_point():
        _engine_run_backward(
            (loss,),
            (torch.ones_like(loss),),
            bool(retain_graph),
            False,  # create_graph
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    else:
        torch.autograd.backward(loss, retain_graph=retain_graph)


def take_step(optimizer: Optimizer) -> None:
    """Update the parameters, as `optimizer.step()` does."""
    step: Any = type(optimizer).step
    if (
        getattr(step, "hooked", False)  # torch has wrapped the method of the class
        and "step" not in vars(optimizer)  # no learning rate scheduler has wrapped the method again
        and optimizer._optimizer_step_pre_hooks.keys() <= HOOKS_OF_LOOPS
        and optimizer._optimizer_step_post_hooks.keys() <= HOOKS_OF_LOOPS
        and _global_optimizer_pre_hooks.keys() <= HOOKS_OF_LOOPS
        and not _global_optimizer_post_hooks
        and not _profiler_enabled()
    ):
        step.__wrapped__(optimizer)
    else:
        optimizer.step()
