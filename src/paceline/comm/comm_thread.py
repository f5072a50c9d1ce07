"""A thread for communication that overlaps with computation; it runs its tasks in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue


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
