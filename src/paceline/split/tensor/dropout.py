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

from paceline.job.zoo.models.moe import without_values
from paceline.trace.recording.graph import Graph, Node
from paceline.trace.tensor.rules import Label, bound

# states of the common stream, for the active modules that draw for themselves
_common: list[tuple[torch.Generator, Tensor]] = []


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
    seed = int(torch.randint(1 << 62, (), device="cpu"))
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    _common.append((generator, generator.get_state()))
    try:
        generator.manual_seed(seed + rank)
        return forward(*args, **kwargs)
    finally:
        generator, before = _common.pop()
        generator.set_state(before)


def _with_common_masks(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _common or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    generator, common = _common[-1]
    own = generator.get_state()
    try:
        generator.set_state(common)
        return forward(*args, **kwargs)
    finally:
        _common[-1] = generator, generator.get_state()
        generator.set_state(own)
