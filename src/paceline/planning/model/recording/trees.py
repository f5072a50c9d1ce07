"""Tensors in nested arguments and results.

torch's pytrees, with a fast path for the usual containers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_LEAVES = (
    int,
    float,
    bool,
    str,
    type(None),
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(...),
)


def tensors_in(tree: Any) -> list[Tensor]:
    """Tensors of a call's arguments or results, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Copy of `tree` with `function` applied to its tensors."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if kind in _LEAVES:
        return tree
    if kind is tuple or kind is list:
        return kind([map_tensors(function, x) for x in tree])
    if kind is dict:
        return {key: map_tensors(function, x) for key, x in tree.items()}
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def tensors_within(tree: Any) -> list[Tensor]:
    """Tensors also of mappings and data classes, such as models return.

    Key-value caches are skipped; only generation reads them.
    """
    found = []
    for leaf in tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += [x for f in fields(leaf) for x in tensors_within(getattr(leaf, f.name, None))]
        elif isinstance(leaf, Mapping):
            found += [x for value in leaf.values() for x in tensors_within(value)]
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    kind = type(tree)
    if isinstance(tree, Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for x in tree:
            _collect(x, found)
    elif kind is dict:
        for x in tree.values():
            _collect(x, found)
    elif kind not in _LEAVES:
        found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
