"""Timer of a pipeline rank's computation, which gives its waiting time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from paceline.device import Clock


class PipelineTimer:
    """Timer of the stages of one rank, on accelerators by events in the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._whole: tuple[Any, Any] | None = None
        self._computing: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a whole step."""
        self._computing = []
        start = self._clock.now()
        yield
        self._whole = start, self._clock.now()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time one stage's computation on one microbatch."""
        start = self._clock.now()
        yield
        self._computing.append((start, self._clock.now()))

    def waited_s(self) -> float:
        """Seconds of the newest step outside of `computing`; 0 before the first."""
        if self._whole is None:
            return 0.0
        self._clock.reach(self._whole[1])
        return max(0.0, self._clock.seconds(*self._whole) - sum(self._clock.seconds(*pair) for pair in self._computing))


class TimedStage(PipelineStage):
    """torch's pipeline stage, timed by `timer`, whose forward passes run within `autocast`."""

    timer: PipelineTimer
    autocast: Callable[[], AbstractContextManager[Any]]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timer.computing(), self.autocast():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.timer.computing():
            super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.timer.computing():
            super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        with self.timer.computing():
            super().perform_reduce_grad(*args, **kwargs)
