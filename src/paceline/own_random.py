"""Random states (torch, NumPy, Python) that belong to one piece of code, apart from those of the process."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


class OwnRandom:
    """Context in which random numbers come from separate states; outside they are untouched.

    The states start from `key`, and the next context continues where the last one ended.
    """

    def __init__(self, *key: int) -> None:
        self._key = key
        self._own: tuple[Any, Any, Any] | None = None
        self._outside: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> OwnRandom:
        self._outside = _states()
        if self._own is None:
            seed_from(*self._key)
        else:
            _set(self._own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outside is not None
        self._own = _states()
        _set(self._outside)
        self._outside = None


def seed_from(*key: int) -> None:
    """Start the process's random states from some numbers."""
    torch_seed, other = np.random.SeedSequence(key).generate_state(2, np.uint64).tolist()
    torch.manual_seed(torch_seed)
    random.seed(other)
    np.random.seed(other % 2**32)


def _states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
