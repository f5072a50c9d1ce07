"""Operations (collectives and messages) as generators that yield while they wait, and their queues."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch.distributed import DistBackendError

Steps = Generator[None, None, Any]


class Operation:
    """One collective or message in progress.

    `waits_for` returns the peers that it waits for, in the transport's own terms.
    """

    def __init__(self, what: str, steps: Steps, deadline_s: float, waits_for: Callable[[], Sequence[Any]]) -> None:
        self.what, self.deadline_s, self.waits_for = what, deadline_s, waits_for
        self.done = False
        self.error: Exception | None = None
        self.result: Any = None
        self.on_done: list[Callable[[], None]] = []
        self.started = time.monotonic()
        self._steps = steps

    def advance(self) -> bool:
        """Continue as far as possible without waiting; returns True when done."""
        if not self.done:
            try:
                next(self._steps)
            except StopIteration as end:
                self.result, self.done = end.value, True
            except Exception as error:  # noqa: BLE001 - raised by `Driver.wait`
                self.fail(error)
            except BaseException as error:  # Ctrl-C: a second try must not find it done
                self.fail(DistBackendError(f"{self.what} was interrupted by {type(error).__name__}"))
                raise
        return self.done

    def fail(self, error: Exception) -> None:
        """End it with an error, which `Driver.wait` raises."""
        self._steps.close()
        self.error, self.done = error, True


class OperationQueue:
    """Operations that run one after the other, such as a group's collectives.

    A failed one fails those behind it.
    """

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()
        self.broken: Exception | None = None

    def advance(self) -> list[Operation]:
        """Continue with the first operations as far as possible; returns those that are done."""
        done = []
        while self.operations and self.operations[0].advance():
            first = self.operations.popleft()
            self.broken = self.broken or first.error
            done.append(first)
            if self.broken:
                for behind in self.operations:
                    behind.fail(follow_up_error(self.broken))
        return done


def follow_up_error(error: Exception) -> DistBackendError:
    """The error of operations in a queue that has failed."""
    return DistBackendError(f"this group cannot be used any more, since: {error}")
