"""Random numbers of served modules.

Torch has one generator a process, and its threads share it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """A stream of random numbers of one module's own, from a seed.

    It depends on the module's own forward passes alone, however many others this process runs.
    """

    def __init__(self, seed: int) -> None:
        self._seeds = torch.Generator().manual_seed(seed)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stream; no other forward pass of this process runs meanwhile."""
        with _Passes.alone(), torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**62, (), generator=self._seeds)))
            yield


@contextmanager
def ordinary_randomness() -> Iterator[None]:
    """Draw from the process's stream, not while a module draws from its own."""
    with _Passes.together():
        yield


class _Passes:
    """Forward passes under way in this process."""

    turn = threading.Condition()
    ordinary, with_own_stream = 0, 0

    @classmethod
    @contextmanager
    def alone(cls) -> Iterator[None]:
        with cls.turn:
            cls.turn.wait_for(lambda: not cls.with_own_stream and not cls.ordinary)
            cls.with_own_stream = 1
        try:
            yield
        finally:
            with cls.turn:
                cls.with_own_stream = 0
                cls.turn.notify_all()

    @classmethod
    @contextmanager
    def together(cls) -> Iterator[None]:
        with cls.turn:
            cls.turn.wait_for(lambda: not cls.with_own_stream)
            cls.ordinary += 1
        try:
            yield
        finally:
            with cls.turn:
                cls.ordinary -= 1
                cls.turn.notify_all()
