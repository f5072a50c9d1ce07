"""Several microbatches in flight through remote stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from paceline.errors import PacelineError

T = TypeVar("T")


def microbatches(step: Callable[[Any], T], batches: Iterable[Any], *, in_flight: int = 4) -> list[T]:
    """Results of `step(batch)`, forward and backward of one microbatch, with several at a time.

    Each runs in a thread of its own, and stages on several hosts work on different ones at the same time: a pipeline
    without a schedule. Gradients are added up as by one after the other, but in the order in which they come, so sums
    round differently from run to run. The first error is raised when all that have begun are done.

    Args:
        step: e.g. `lambda b: (loss(second(first(b.x)), b.y) / count).backward()`.
        in_flight: how many are under way at most; each holds its activations.
    """
    if in_flight < 1:
        raise PacelineError(f"in_flight={in_flight}: at least one microbatch is under way")
    grad = torch.is_grad_enabled()

    def run(batch: Any) -> T:
        with torch.set_grad_enabled(grad):  # which belongs to threads
            return step(batch)

    with ThreadPoolExecutor(in_flight, thread_name_prefix="paceline-microbatch") as pool:
        futures = [pool.submit(copy_context().run, run, batch) for batch in batches]
        _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
    return [future.result() for future in futures if not future.cancelled()]
