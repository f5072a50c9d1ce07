"""Dropout under tensor parallelism: own masks for sharded tensors, common ones for replicated tensors.

Ranks of tp have the same seed, so that they drop the same elements of replicated tensors. Around a module that draws
for sharded tensors, the generator is seeded from that common stream and the rank. The common stream advances by one
number, and no other state is kept, so activations that are recomputed in the backward pass get the same masks again.
While torch.compile traces, all ranks' masks are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.device import random_state, seed, set_random_state
from paceline.job.zoo.models.moe import without_values
from paceline.planning.model.recording.graph import Graph, Node
from paceline.planning.model.tensor.rules import Label, bound

# the common stream of a device, for the active modules that draw for themselves
_common: list[tuple[torch.device, Tensor]] = []


def separate_random_streams(model: nn.Module, graph: Graph, labels: Mapping[int, Label], rank: int) -> set[str]:
    """Give modules that draw for sharded tensors other random numbers on each rank. Returns their paths.

    A module whose own code draws for both sharded and replicated tensors goes on drawing the same on all ranks.
    """
    divided, whole = set[str](), set[str]()
    for node in graph.nodes:
        if _draws(node):
            (divided if any(v in labels for v in (*node.inputs, *node.outputs)) else whole).add(node.path)
    separate = {path for path in divided - whole if path}
    for path in separate:
        module = model.get_submodule(path)
        module.__dict__["forward"] = partial(_with_own_masks, module.forward, module, rank)
    for path in whole - divided:
        if any(path.startswith(f"{outer}.") for outer in separate):
            module = model.get_submodule(path)
            module.__dict__["forward"] = partial(_with_common_masks, module.forward)
    return separate


def _draws(node: Node) -> bool:
    """True if an operation of a trace uses random numbers."""
    if isinstance(node.op, str) or torch.Tag.nondeterministic_seeded not in node.op.tags:
        return False
    given = bound(node)
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    return not ("dropout" in node.name and (given.get("p") == 0 or given.get("train") is False))


def _with_own_masks(forward: Callable[..., Any], module: nn.Module, rank: int, *args: Any, **kwargs: Any) -> Any:
    device = next(
        (x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not without_values(x)), None
    )
    if device is None or not module.training or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    number = int(torch.randint(1 << 62, (), device="cpu"))
    _common.append((device, random_state(device)))
    try:
        seed(device, number + rank)
        return forward(*args, **kwargs)
    finally:
        set_random_state(*_common.pop())


def _with_common_masks(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _common or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    device, common = _common[-1]
    own = random_state(device)
    try:
        set_random_state(device, common)
        return forward(*args, **kwargs)
    finally:
        _common[-1] = device, random_state(device)
        set_random_state(device, own)
