"""Dropout under tensor parallelism: each rank has its own masks for divided tensors, and all have the same ones for whole tensors.

Ranks of tp are seeded alike, so that they drop the same from what they all compute. Around a module that draws for divided tensors, the
generator is seeded anew from that common stream and the rank. The common stream is one number further afterwards, and nothing else is kept,
so activations that are computed again in the backward pass get the same masks again. While torch.compile traces, masks are equal pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.job.zoo.models.moe import without_values
from paceline.split.tensor.rules import Label, bound
from paceline.split.tensor.trace import Graph, Node

_common: list[tuple[torch.Generator, Tensor]] = []  # of the modules under way that draw for themselves, the common stream's states


def draw_apart(model: nn.Module, graph: Graph, labels: Mapping[int, Label], rank: int) -> set[str]:
    """Have the modules that draw for divided tensors draw other numbers on each rank; their paths.

    A module whose own code draws for divided and for whole tensors goes on drawing the same on all ranks.
    """
    divided, whole = set[str](), set[str]()
    for node in graph.nodes:
        if _draws(node):
            (divided if any(v in labels for v in (*node.inputs, *node.outputs)) else whole).add(node.path)
    apart = {path for path in divided - whole if path}
    for path in apart:
        module = model.get_submodule(path)
        module.__dict__["forward"] = partial(_apart, module.forward, module, rank)
    for path in whole - divided:
        if any(path.startswith(f"{outer}.") for outer in apart):
            module = model.get_submodule(path)
            module.__dict__["forward"] = partial(_together, module.forward)
    return apart


def _draws(node: Node) -> bool:
    """Whether an operation of a trace uses random numbers."""
    if isinstance(node.op, str) or torch.Tag.nondeterministic_seeded not in node.op.tags:
        return False
    given = bound(node)
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    return not ("dropout" in node.name and (given.get("p") == 0 or given.get("train") is False))


def _apart(forward: Callable[..., Any], module: nn.Module, rank: int, *args: Any, **kwargs: Any) -> Any:
    device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not without_values(x)), None)
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


def _together(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
