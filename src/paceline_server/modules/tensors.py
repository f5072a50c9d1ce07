"""Tensors and objects within nested values, in an order that both ends agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from paceline_server.values import sendable


@sendable
@dataclass(frozen=True)
class Held:
    """An object in the serving process, in the place of the object itself."""

    number: str


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in lists, tuples, dicts and data classes."""
    found: list[Tensor] = []

    def keep(tensor: Any) -> Any:
        if isinstance(tensor, Tensor):
            found.append(tensor)
        return tensor

    mapped(keep, value)
    return found


def with_tensors(value: Any, tensors: list[Any]) -> Any:
    """A copy of a nested value with these in the places of its tensors."""
    remaining = iter(tensors)
    return mapped(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of a nested value with `function` applied to its leaves.

    Lists, tuples, dicts and data classes are none.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(mapped(function, entry) for entry in value)
    if isinstance(value, dict):
        return {key: mapped(function, entry) for key, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type | Held):
        changes = {each.name: mapped(function, getattr(value, each.name)) for each in fields(value) if each.init}
        return replace(value, **changes)
    return function(value)
