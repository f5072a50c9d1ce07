"""Overlap of communication and computation: a thread on CPUs, a stream on accelerators.

Tasks run in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from paceline.device import current_stream, event, stream


class CommThread:
    """Thread that runs collectives in the order of the calls of `start`.

    All ranks must use the same order. If the main thread uses the same group at the same time, this thread needs a copy
    of the group (`Group.copy`).
    """

    def __init__(self, name: str = "paceline-sync") -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], Task] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> Task:
        """Run `work` after all earlier work."""
        task = Task()
        self._queue.put((work, task))
        return task

    def close(self) -> None:
        """End the thread after all its work."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, task = entry
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again where the result is waited for
                task.error = error
            task.done.set()
            del entry, work, task  # an idle thread must not keep tensors alive


class CommStream:
    """Separate stream for collectives, ordered after the work of the current stream.

    The calling thread queues the collectives, so that the order is the same on all ranks. If a second thread queued
    them, collectives of two groups could deadlock on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream(device)

    def start(self, work: Callable[[], None]) -> StreamTask:
        """Queue the collectives of `work`."""
        self._stream.wait_stream(current_stream(self._stream.device))
        with self._stream:
            work()
            done = event(self._stream.device)
            done.record()
        return StreamTask(done)

    def close(self) -> None:
        """Do nothing, because a stream has no thread to end."""


@dataclass
class StreamTask:
    """Work queued on a `CommStream`."""

    done: torch.Event

    def wait(self) -> None:
        """Make the current stream wait for the work; the host does not wait."""
        current_stream(self.done.device).wait_event(self.done)


@dataclass
class Task:
    """Work queued on a `CommThread`."""

    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self) -> None:
        """Wait until the work is done; its collectives have their own deadlines.

        Raises:
            SyncError, or any other exception of the work.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error
