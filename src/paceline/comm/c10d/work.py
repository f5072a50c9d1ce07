"""The handle of a collective under way, as torch.distributed and its C++ parts use it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.c10d.operation import Driver, Operation


class DrivenWork(dist.Work):
    """torch's handle on an operation.

    The thread that waits on it drives the operation; for its future the background thread does.
    """

    def __init__(self, progress: Driver, operation: Operation, result: list[Any]) -> None:
        super().__init__()
        self._progress, self._operation, self._result = progress, operation, result
        self._future: torch.futures.Future[Any] | None = None
        if not operation.done:
            progress.in_background(operation)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there.

        Raises:
            DistBackendError: a rank is gone, or did not come in time.
        """
        if timeout is not None and timeout.total_seconds() > 0:
            self._operation.deadline_s = timeout.total_seconds()
        self._progress.wait(self._operation)
        return True

    def is_completed(self) -> bool:
        """True once it has ended, with or without an error."""
        return self._progress.is_done(self._operation)

    def is_success(self) -> bool:
        """True if it has ended without an error."""
        return self.is_completed() and self._operation.error is None

    def exception(self) -> Exception | None:
        """The error that it failed with, or None."""
        return self._operation.error

    def result(self) -> list[Any]:
        """The tensors that it writes to."""
        return self._result

    def source_rank(self) -> int:
        """The sender of a message that was received from any rank."""
        self._progress.wait(self._operation)
        return int(self._operation.result)

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait; a CPU has no stream to be ordered."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors that it writes to."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._progress.call_when_done(self._operation, self._resolve)
        return self._future

    def _resolve(self) -> None:
        assert self._future is not None
        if self._operation.error is not None:
            self._future.set_exception(self._operation.error)
        else:
            self._future.set_result(self._result)


class _Done(dist.Work):
    """The handle of a collective whose caller has waited for it already."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


DONE = _Done()
