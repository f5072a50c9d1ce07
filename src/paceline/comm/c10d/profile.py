"""Profiler events of collectives and messages, from their start to their end."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch._C._autograd import _profiler_enabled, _record_function_with_args_enter, _record_function_with_args_exit

from paceline.comm.c10d.driver import Driver
from paceline.comm.c10d.operation import Operation, OperationQueue


def start(
    progress: Driver, queue: OperationQueue, operation: Operation, backend: str, what: str, tensors: Iterable[Tensor]
) -> None:
    """Start an operation, as a profiler event `backend:what` with the tensors' shapes.

    There is an event only if a profiler runs in this thread.
    """
    if not _profiler_enabled():
        progress.start(queue, operation)
        return
    event = _record_function_with_args_enter(f"{backend}:{what}", *tensors)
    progress.start(queue, operation)
    progress.call_when_done(operation, lambda: _record_function_with_args_exit(event))
