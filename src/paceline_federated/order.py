"""Random numbers that follow from a seed and a few numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

_GAMMA_INT, _FIRST_INT, _SECOND_INT = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GAMMA, _FIRST, _SECOND = np.uint64(_GAMMA_INT), np.uint64(_FIRST_INT), np.uint64(_SECOND_INT)
_MASK = 2**64 - 1


def keys(*numbers: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """Random 64-bit numbers, one for each combination of the broadcast `numbers` (SplitMix64: Steele et al., 2014)."""
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for number in numbers:
            state = state + np.asarray(number).astype(np.uint64) + _GAMMA
            state = (state ^ (state >> np.uint64(30))) * _FIRST
            state = (state ^ (state >> np.uint64(27))) * _SECOND
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def uniform(*numbers: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Random numbers from 0 to below 1, by `keys`."""
    return (keys(*numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def one_key(*numbers: int) -> int:
    """A random number from 0 to below 2^63: half of that of `keys`."""
    state = 0
    for number in numbers:
        state = (state + number + _GAMMA_INT) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST_INT) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND_INT) & _MASK
        state ^= state >> 31
    return state >> 1


def order(seed: int, client: int, round: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Order in which a client reads its samples in one epoch of a round."""
    return np.argsort(keys(seed, round, epoch, client, np.arange(samples)), kind="stable")


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Context in which torch's random numbers on the CPU follow from a seed.

    Cheaper than `torch.manual_seed`, which also keeps a trace of its caller for each kind of accelerator.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
