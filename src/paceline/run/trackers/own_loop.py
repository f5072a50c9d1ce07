"""Trackers for loops of one's own: callbacks for `engine.on_step` that log every step.

    log = trackers.tracker("tensorboard", folder="logs")
    engine = paceline.setup(model, optimizer, loss, loader, on_step=[log])

Any function of a `StepResult` is a callback; a tracker is one that has a name, and works beside the training.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from paceline.cluster.discover import environment
from paceline.printable import printable
from paceline.rank_environment import own_rank
from paceline.run.trackers.tracker import Status, TrackedRun, Tracker, check, make, told_of

if TYPE_CHECKING:
    from paceline.engine.engine import StepResult

OnStep = Callable[["StepResult"], object]
_LONGEST_QUEUE = 10_000  # steps that a tracker may be behind
CLOSE_S = 30.0  # for a tracker to store what it has, at the end


def tracker(name: str, **settings: Any) -> LoopTracker:
    """The tracker of a name, paceline's or an installed package's, for `on_step`.

    It logs on the first rank, and does nothing on the others.

    Raises:
        JobError: no such tracker; its package is missing; or it does not take the settings.
    """
    check(name)
    if own_rank() != 0:
        return LoopTracker(name, None)
    return LoopTracker(name, make(name, TrackedRun(config={"environment": told_of(environment())}), settings))


def tensorboard(folder: str | Path) -> LoopTracker:
    """Write loss and gradient norm of every step as TensorBoard events into `folder`."""
    return tracker("tensorboard", folder=folder)


def wandb(**settings: Any) -> LoopTracker:
    """Log every step to Weights & Biases; `settings` are those of `wandb.init`."""
    return tracker("wandb", **settings)


def mlflow(**settings: Any) -> LoopTracker:
    """Log every step to MLflow; for `settings` see docs/trackers.md."""
    return tracker("mlflow", **settings)


def scalars(result: StepResult) -> dict[str, float]:
    """Numbers of a step that trackers log."""
    return {"train/loss": result.loss, "train/grad_norm": result.grad_norm}


class LoopTracker:
    """Callback that hands steps to a tracker, which works in a thread of its own.

    A step only puts its numbers into a queue. What the tracker raises is said once, and training goes on without it. It
    is closed at the end of the process, as failed where that ends by an exception; or before by `close`.

    Args:
        tracker: None on ranks that do not log.
    """

    def __init__(self, name: str, tracker: Tracker | None) -> None:
        self.name, self.tracker = name, tracker
        self._steps: SimpleQueue[tuple[int, dict[str, float]] | Status] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_behind = False
        if tracker is not None:
            self._thread = threading.Thread(target=self._work, name=f"paceline-tracker-{name}", daemon=True)
            self._thread.start()
            atexit.register(self._close_at_exit)

    def __call__(self, result: StepResult) -> None:
        """Log a step."""
        if self._thread is None:
            return
        if self._steps.qsize() < _LONGEST_QUEUE:
            self._steps.put((result.step, scalars(result)))
        elif not self._is_behind:
            self._is_behind = True
            self._say(f"is more than {_LONGEST_QUEUE:,} steps behind, and gets fewer of them")

    def close(self, status: Status = "finished") -> None:
        """End the tracker, once it has stored what it was given."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self._close_at_exit)
        self._steps.put(status)
        thread.join(CLOSE_S)
        if thread.is_alive():
            self._say(f"has not stored everything after {CLOSE_S:g} s, and is not waited for")

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # of the exception that ended the script
        stopped = isinstance(error, KeyboardInterrupt)
        self.close("interrupted" if stopped else "finished" if error is None else "failed")

    def _work(self) -> None:
        assert self.tracker is not None
        broken = False
        while True:
            given = self._steps.get()
            try:
                if isinstance(given, str):
                    if not broken:
                        self.tracker.close(given)
                elif not broken:
                    self.tracker.log(*given)
            except Exception as error:  # noqa: BLE001 - a tracker must not end the training
                broken = True
                self._say(f"failed: {type(error).__name__}: {error}. Training goes on without it")
            if isinstance(given, str):
                return

    def _say(self, what: str) -> None:
        print(printable(f'tracker "{self.name}" {what}.'), file=sys.stderr, flush=True)
