"""torch's handles on the collectives and messages of `simccl`."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistBackendError

from simulated.lane import Lane, Operation


class SimulatedWork(dist.Work):
    """torch's handle on a collective. The tensors are kept until it is done, or waited for."""

    def __init__(self, lane: Lane, operation: Operation, outputs: list[Tensor], *, blocks: bool) -> None:
        super().__init__()
        self._lane, self._operation, self._outputs, self._blocks = lane, operation, outputs, blocks
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._operation.error:
            raise DistBackendError(self._operation.error)
        torch.accelerator.current_stream(self._lane.device).wait_event(self._operation.done)
        self._operation.release()
        if self._blocks:
            self._operation.done.synchronize()
        return True

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        return bool(self._operation.done.query())

    def is_success(self) -> bool:
        """True if it has ended without an error."""
        return self.is_completed() and not self._operation.error

    def exception(self) -> Exception | None:
        return DistBackendError(self._operation.error) if self._operation.error else None

    def result(self) -> list[Tensor]:
        """The tensors that it writes to."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is done at once: its users' streams wait, as for NCCL's."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._lane.device])
            with self._lane.stream:
                self._future.set_result(self._outputs)
        return self._future


class Batch(dist.Work):
    def __init__(self, works: list[SimulatedWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
