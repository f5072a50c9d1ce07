"""Separate random states (torch, NumPy, Python) for a piece of code."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch


@contextmanager
def kept_random() -> Iterator[None]:
    """Restore the process's random states (torch on the CPU, NumPy, Python) on exit."""
    states = _states()
    try:
        yield
    finally:
        _set(states)


class OwnRandom:
    """Context with its own random states, which leaves the process's random states unchanged.

    The first context starts from `key`. Each later context continues where the previous one ended.
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


class SampleRandom:
    """Context that restores the process's random states, and can seed each sample separately.

    Seeding takes 12 microseconds. `drew` shows whether code draws random numbers; other code needs no seeding.
    """

    def __enter__(self) -> SampleRandom:
        self._outside, self._untouched = _marks(), False
        return self

    def __exit__(self, *_: object) -> None:
        if self._untouched:
            return
        now, before = _marks(), self._outside
        if now[0] != before[0]:
            random.setstate(before[0])
        if now[1] != before[1]:
            _set_numpy(before[1])
        if not torch.equal(now[2], before[2]):
            torch.set_rng_state(before[2])

    def drew(self) -> bool:
        """Return True if the random states have changed since the context began."""
        now, before = _marks(), self._outside
        self._untouched = now[0] == before[0] and now[1] == before[1] and torch.equal(now[2], before[2])
        return not self._untouched

    @staticmethod
    def start(*key: int) -> None:
        """Seed the random states from a key."""
        mixed = 0
        for number in key:  # splitmix64 (Steele et al., 2014)
            mixed = (mixed + number + 0x9E3779B97F4A7C15) & _MASK
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
            mixed ^= mixed >> 31
        torch.default_generator.manual_seed(mixed)
        random.seed(mixed)
        np.random.seed(mixed >> 32)


_MASK = 2**64 - 1
_NUMPY_BYTES = 624 * 4 + 4  # size of a Mersenne Twister's state: its key and its position


def _marks() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of Python, NumPy and torch.

    NumPy's state is read as bytes, because `np.random.get_state` takes 50 microseconds.
    """
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but not in its stubs' list
    plain = type(bits) is np.random.MT19937
    state = ctypes.string_at(bits.ctypes.state_address, _NUMPY_BYTES) if plain else bits.state
    return random.getstate(), state, torch.get_rng_state()


def _set_numpy(state: Any) -> None:
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but not in its stubs' list
    if isinstance(state, bytes):
        ctypes.memmove(bits.ctypes.state_address, state, _NUMPY_BYTES)
    else:
        bits.state = state


def seed_from(*key: int) -> None:
    """Seed the process's random states from these numbers."""
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
