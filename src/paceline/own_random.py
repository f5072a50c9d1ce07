"""Separate random states (torch, NumPy, Python) for a piece of code."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch


@contextmanager
def kept_random() -> Iterator[None]:
    """Restore the process's random states (torch on the CPU, NumPy, Python) on exit."""
    found = states()
    try:
        yield
    finally:
        restore(found)


class OwnRandom:
    """Context with its own random states, which leaves the process's random states unchanged.

    The first context starts from `key`. Each later context continues where the previous one ended.
    """

    def __init__(self, *key: int) -> None:
        self._key = key
        self._own: tuple[Any, Any, Any] | None = None
        self._outside: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> OwnRandom:
        self._outside = states()
        if self._own is None:
            seed_from(*self._key)
        else:
            restore(self._own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outside is not None
        self._own = states()
        restore(self._outside)
        self._outside = None


class SampleRandom:
    """Context that restores the process's random states, and can seed each sample separately.

    Seeding takes 12 microseconds. `drew` shows whether code draws random numbers; other code needs no seeding.
    """

    def __enter__(self) -> SampleRandom:
        self._outside, self._untouched = states(), False
        return self

    def __exit__(self, *_: object) -> None:
        if not self._untouched:
            restore(self._outside)

    def drew(self) -> bool:
        """Return True if the random states have changed since the context began."""
        self._untouched = _equal(states(), self._outside)
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
_WORDS = 625  # 4-byte words of a Mersenne Twister's state: 624 words of its key, and its position
_Memory = ctypes.c_char * (4 * _WORDS)


def states() -> tuple[Any, Any, torch.Tensor]:
    """Return the process's random states (Python, NumPy, torch), for `restore`.

    Every batch calls this function, so the states of Python and NumPy are read from memory: `random.getstate` and
    `np.random.get_state` create an object for each word.
    """
    instance, memory = _python_memory()
    python = random.getstate() if memory is None else (memory.raw, instance.gauss_next)
    return python, _numpy_state(), torch.default_generator.get_state()


def restore(found: tuple[Any, Any, torch.Tensor]) -> None:
    """Restore the random states that `states` returned."""
    python, of_numpy, of_torch = found
    instance, memory = _python_memory()
    if memory is None:
        random.setstate(python)
    else:
        memory.raw, instance.gauss_next = python
    bits, memory, normal = _numpy_memory()
    if memory is not None:
        memory.raw, normal.raw = of_numpy
    elif isinstance(of_numpy, dict):
        bits.state = of_numpy
    else:
        np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)


def _equal(one: tuple[Any, Any, torch.Tensor], other: tuple[Any, Any, torch.Tensor]) -> bool:
    for of_numpy in (one[1], other[1]):
        if isinstance(of_numpy, dict) or not isinstance(of_numpy[0], bytes):  # arrays have no truth value
            return one[0] == other[0] and repr(one[1:]) == repr(other[1:])
    # `torch.equal` takes four times as long
    return one[:2] == other[:2] and one[2].numpy().tobytes() == other[2].numpy().tobytes()


def _numpy_state() -> Any:
    bits, memory, normal = _numpy_memory()
    if memory is not None:
        return memory.raw, normal.raw
    return np.random.get_state() if type(bits) is np.random.MT19937 else bits.state


@functools.cache
def _python_memory() -> tuple[Any, Any]:
    """Return Python's generator and its state in memory.

    The state is None if the memory layout of the interpreter is unknown.
    """
    instance: Any = random.getstate.__self__  # type: ignore[attr-defined]
    if sys.implementation.name != "cpython" or type(instance).__basicsize__ < object.__basicsize__ + 4 * _WORDS:
        return instance, None
    memory = _Memory.from_address(id(instance) + object.__basicsize__)
    position, *key = struct.unpack(f"{_WORDS}I", memory.raw)
    return instance, memory if random.getstate()[1] == (*key, position) else None


def _numpy_memory() -> tuple[Any, Any, Any]:
    """Return NumPy's generator, its state in memory, and the normal number that waits there.

    The places in memory are None if the generator is not a Mersenne Twister, or the memory layout is unknown.
    """
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but not in its stubs' list
    if type(bits) is not np.random.MT19937 or (normal := _waiting_normal()) is None:
        return bits, None, None
    return bits, _Memory.from_address(bits.ctypes.state_address), normal


@functools.cache
def _waiting_normal() -> Any:
    """Find where NumPy keeps the second of two normal numbers for the next call.

    `np.random` draws normal numbers in pairs, and its generator's state does not show whether one of them waits. The
    number and its flag follow a pointer from NumPy's object into itself. None if there is no such place.
    """
    instance: Any = np.random.randn.__self__  # type: ignore[attr-defined]
    start, before = id(instance), np.random.get_state()
    words = struct.unpack(
        f"{type(instance).__basicsize__ // 8}Q", ctypes.string_at(start, type(instance).__basicsize__)
    )
    places = [start + 8 * (i + 1) for i, word in enumerate(words[:-2]) if start < word < start + 8 * i]
    found = [(ctypes.c_char * 16).from_address(place) for place in places]
    try:
        for waits in (1, 0):
            np.random.seed(0)
            numbers = np.random.randn(2 - waits)
            kept: Any = np.random.get_state()
            expected = [waits] if len(numbers) == 2 else [waits, kept[4]]
            found = [m for m in found if [*struct.unpack("ixxxxd", m.raw)][: len(expected)] == expected]
    finally:
        np.random.set_state(before)
    return found[0] if len(found) == 1 else None


def seed_from(*key: int) -> None:
    """Seed the process's random states from these numbers."""
    torch_seed, other = np.random.SeedSequence(key).generate_state(2, np.uint64).tolist()
    torch.manual_seed(torch_seed)
    random.seed(other)
    np.random.seed(other % 2**32)
