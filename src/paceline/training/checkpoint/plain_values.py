"""State of a user's objects as JSON and tensors.

Schedulers, samplers and averages keep such state; nothing in it can execute.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError

_KIND = "!"  # marks a JSON object that stands for something else than a dict with names
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "Size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
    "defaultdict": dict,
}


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, with its tensors moved into `tensors`, named `name…`.

    Raises:
        CheckpointError: something in it is neither plain nor a tensor. Names where.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {_KIND: "tensor", "name": name}
    if isinstance(value, (np.ndarray, np.generic)):
        tensors[name] = torch.from_numpy(np.array(value))
        return {_KIND: "number" if isinstance(value, np.generic) else "array", "name": name}
    kind = type(value).__name__
    if isinstance(value, (list, tuple, set, frozenset, deque)) and (kind == "list" or kind in _SEQUENCES):
        entries = [encode(entry, f"{name}.{i}", tensors) for i, entry in enumerate(value)]
        return entries if kind == "list" else {_KIND: kind, "entries": entries}
    if isinstance(value, (dict, Counter, OrderedDict, defaultdict)) and kind in _MAPPINGS:
        if kind == "dict" and all(type(key) is str and key != _KIND for key in value):
            return {key: encode(entry, f"{name}.{key}", tensors) for key, entry in value.items()}
        pairs = [
            [encode(key, f"{name}.key{i}", tensors), encode(entry, f"{name}.{i}", tensors)]
            for i, (key, entry) in enumerate(value.items())
        ]
        return {_KIND: kind, "entries": pairs}
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{kind}, which a checkpoint cannot hold: give numbers, text, "
        "lists, dicts and tensors, or an "
        "object whose state_dict has only these"
    )


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Rebuild a value from `encode`; `read` returns a tensor by its name."""
    if isinstance(value, list):
        return [decode(entry, read) for entry in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(entry, read) for key, entry in value.items()}
    if kind == "tensor":
        return read(value["name"])
    if kind in ("array", "number"):
        array = read(value["name"]).numpy()
        return array if kind == "array" else array[()]
    entries = [decode(entry, read) for entry in value["entries"]]
    return _SEQUENCES[kind](entries) if kind in _SEQUENCES else _MAPPINGS[kind](entries)
