"""State of a user's samplers: random generators, and what `state_dict` methods return."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.errors import DataError

_PURE = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)
_WITHOUT = (
    Dataset,
    nn.Module,
    Tensor,
    np.ndarray,
    str,
    bytes,
    int,
    float,
    type,
    ModuleType,
)  # nothing of a sampler's is looked for in these
_DEPTH, _LONGEST = 6, 64  # how deep generators are looked for, and in how long a container


def save(root: object, dataset: object) -> list[Any]:
    """The states of everything in a sampler of `dataset` that has one, as JSON values.

    Raises:
        DataError: the sampler's own `state_dict` holds something else than plain values.
    """
    return [_saved(part) for part in _parts(root, dataset)]


def load(root: object, dataset: object, states: list[Any]) -> None:
    """Put back what `save` gave.

    Raises:
        DataError: the sampler is not built like the one that was saved.
    """
    parts = list(_parts(root, dataset))
    if [_kind(part) for part in parts] != [state["kind"] for state in states]:
        raise DataError(
            f"{name_of(root)} is not the sampler of the saved position: it holds {_kinds(map(_kind, parts))}, "
            "and that one held "
            f"{_kinds(state['kind'] for state in states)}. Resume with the loader that the run was started with"
        )
    for part, state in zip(parts, states, strict=True):
        _load(part, state["state"])


def is_pure(root: object) -> bool:
    """True if its draws depend on its generators alone: torch's own samplers, and plain sequences."""
    return all(type(part) in _PURE for part in samplers(root))


def keeps_its_state(root: object) -> bool:
    """True if every sampler that may have state has a `state_dict` for it."""
    return all(type(part) in _PURE or _has_state(part) for part in samplers(root))


def samplers(root: object) -> Iterator[object]:
    """A sampler and those that it draws from."""
    while root is not None:
        yield root
        inner = getattr(root, "sampler", None)
        root = inner if inner is not None else getattr(root, "batch_sampler", None)


def author_of(root: object) -> object:
    """The sampler that decides on the order: the user's own, or else the innermost."""
    chain = list(samplers(root))
    return next((sampler for sampler in chain if type(sampler) not in _PURE), chain[-1])


def name_of(root: object) -> str:
    """The type of a sampler, as an error names it."""
    return f"{type(root).__module__}.{type(root).__qualname__}".removeprefix("builtins.")


def _parts(root: object, dataset: object) -> Iterator[Any]:
    """All that has a state, in an order that depends on the sampler's structure only."""
    seen = {id(dataset)}

    def walk(value: Any, depth: int) -> Iterator[Any]:
        if depth > _DEPTH or id(value) in seen or isinstance(value, _WITHOUT):
            return
        seen.add(id(value))
        if _kind(value) is not None:
            yield value
        if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            return
        for inner in _inside(value):
            yield from walk(inner, depth + 1)

    return walk(root, 0)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value if len(value) <= _LONGEST else ()
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LONGEST else ()
    return list(vars(value).values()) if hasattr(value, "__dict__") else ()


def _kind(value: object) -> str | None:
    if isinstance(value, torch.Generator):
        return "torch.Generator"
    if isinstance(value, np.random.Generator):
        return "numpy.random.Generator"
    if isinstance(value, np.random.RandomState):
        return "numpy.random.RandomState"
    if isinstance(value, random.Random):
        return "random.Random"
    return f"{name_of(value)}.state_dict" if hasattr(value, "__iter__") and _has_state(value) else None


def _has_state(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _saved(part: Any) -> dict[str, Any]:
    state: Any
    if isinstance(part, torch.Generator):
        state = base64.b64encode(bytes(part.get_state().tolist())).decode()
    elif isinstance(part, np.random.Generator):
        state = _plain(part.bit_generator.state)
    elif isinstance(part, np.random.RandomState):
        state = _plain(part.get_state(legacy=False))
    elif isinstance(part, random.Random):
        state = part.getstate()
    else:
        state = part.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the state_dict of sampler {name_of(part)} holds more than plain values (numbers, texts, "
                f"lists): {error}"
            ) from error
    return {"kind": _kind(part), "state": state}


def _load(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = _arrays(state)
    elif isinstance(part, np.random.RandomState):
        part.set_state(_arrays(state))
    elif isinstance(part, random.Random):
        version, numbers, gauss = state
        part.setstate((version, tuple(numbers), gauss))
    else:
        part.load_state_dict(state)


def _plain(state: Any) -> Any:
    """NumPy's state with its arrays as lists, and their types beside them."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "values": state.tolist()}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        if set(state) == {"dtype", "values"}:
            return np.array(state["values"], dtype=state["dtype"])
        return {key: _arrays(value) for key, value in state.items()}
    return state


def _kinds(kinds: Iterable[str | None]) -> str:
    return ", ".join(str(kind) for kind in kinds) or "no generator"
