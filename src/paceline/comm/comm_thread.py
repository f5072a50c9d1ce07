"""Communication that overlaps with computation: a thread on CPUs, a stream on accelerators. Tasks run in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from paceline.device import current_stream, event, stream


class CommThread:
    """Runs collectives in one thread, in the order of `start`, the same on every rank.

    Where the main thread uses the same group meanwhile, the thread needs a copy of it (`Group.copy`).
    """

    def __init__(self, name: str = "paceline-sync") -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], Task] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> Task:
        """Run `work` after all that was handed over before."""
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
            del entry, work, task  # an idle thread keeps no tensor alive


class CommStream:
    """Queues collectives on a stream of its own, behind what the current one was given.

    The calling thread queues them, so all ranks do in the same order. From a thread, two groups' collectives could
    cross on the device, and wait for each other forever.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream(device)

    def start(self, work: Callable[[], None]) -> StreamTask:
        """Queue what `work` does."""
        self._stream.wait_stream(current_stream(self._stream.device))
        with self._stream:
            work()
            done = event(self._stream.device)
            done.record()
        return StreamTask(done)

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class StreamTask:
    """Work that was given to a `CommStream`."""

    done: torch.Event

    def wait(self) -> None:
        """Order the current stream behind it; the host goes on."""
        current_stream(self.done.device).wait_event(self.done)


@dataclass
class Task:
    """Work that was given to a `CommThread`."""

    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self) -> None:
        """Return when it is done. The collectives in it have deadlines of their own.

        Raises:
            SyncError, or whatever else the work raised.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error
