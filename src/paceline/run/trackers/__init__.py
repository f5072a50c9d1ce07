"""Trackers, which log a training's numbers to other services.

`services.py` has the built-in trackers. `follow.py` is the process of a tracker in `paceline train`. In users' own
loops, `tracker` returns a callback for `engine.on_step` that logs every step:

    log = trackers.tracker("tensorboard", folder="logs")
    engine = paceline.setup(model, optimizer, loss=loss, loader=loader, on_step=[log])
"""

from __future__ import annotations

import atexit
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.cluster.discover import environment
from paceline.errors import JobError
from paceline.extensions import ExtensionPoint
from paceline.job.spec import load_object
from paceline.rank_environment import own_rank
from paceline.text import printable

if TYPE_CHECKING:
    from paceline.engine.engine import StepResult


__all__ = ["TRACKERS", "Status", "TrackedRun", "Tracker", "TrackerInfo", "mlflow", "tensorboard", "tracker", "wandb"]


Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run for a tracker.

    In a user's own loop, only `config` has a value: the environment.

    Attributes:
        name: name of the run.
        project: name of the job.
        config: JSON values `job`, `plan` and `environment`; see `told_of`.
        folder: folder for the tracker's local files.
        id: the run's `Tracker.id` from before a restart; "" at the first start.
    """

    name: str = ""
    project: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    id: str = ""


def told_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Select the part of an environment that trackers receive.

    Environment variables are left out because they may be private. The load average is left out because it changes.
    """
    return {key: value for key, value in environment.items() if key not in ("variables", "load_average")}


class Tracker(Protocol):
    """Tracker of one run.

    A tracker is called in its own thread or process, never in a training step.

    Attributes:
        id: the service's identifier of the run, to continue the same run after a restart; "" if there is none.
    """

    id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step.

        Names begin with a group: `train/loss`, `val/accuracy`, `speed/samples_per_s`.
        """

    def close(self, status: Status) -> None:
        """Finish the run; when this returns, all numbers are stored."""


@dataclass(frozen=True)
class TrackerInfo:
    """Description of a tracker, readable without importing its service.

    Attributes:
        tracker: import path of a class or function that takes a `TrackedRun` and the tracker's settings, and returns a
            `Tracker`. Only the first rank's process calls it.
        package: module that the tracker imports; an error names it if it is not installed. "" means none.
    """

    tracker: str
    package: str = ""


_SERVICES = "paceline.run.trackers.services"
TRACKERS = ExtensionPoint(
    "tracker",
    "paceline.trackers",
    TrackerInfo,
    {
        "tensorboard": TrackerInfo(f"{_SERVICES}:ToTensorBoard", "tensorboard"),
        "wandb": TrackerInfo(f"{_SERVICES}:ToWandb", "wandb"),
        "mlflow": TrackerInfo(f"{_SERVICES}:ToMLflow", "mlflow"),
        "opentelemetry": TrackerInfo(f"{_SERVICES}:ToOpenTelemetry", "opentelemetry.sdk"),
    },
    JobError,
)


def check(name: str) -> None:
    """Check that a tracker is available, without importing its service.

    Raises:
        JobError: the tracker does not exist, or its package is not installed.
    """
    info = TRACKERS[name]
    if info.package and not _is_installed(info.package):
        raise JobError(
            "tracker.not_installed",
            'the tracker "{name}" needs a package that is not installed: pip install {package}',
            name=name,
            package=_pip_name(info),
        )


def make(name: str, run: TrackedRun, settings: Mapping[str, Any]) -> Tracker:
    """Create a tracker by its name.

    Raises:
        JobError: see `check`; or the tracker rejects the settings.
    """
    check(name)
    made: Callable[..., Tracker] = load_object(TRACKERS[name].tracker)
    try:
        return made(run, **settings)
    except TypeError as error:
        raise JobError(
            "tracker.not_made", 'tracker "{name}" cannot be created: {error}', name=name, error=error
        ) from error


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _pip_name(info: TrackerInfo) -> str:
    if info.package.startswith("opentelemetry"):
        return "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
    return info.package.replace("_", "-")


OnStep = Callable[["StepResult"], object]
_LONGEST_QUEUE = 10_000  # maximum number of queued steps; further steps are dropped
CLOSE_S = 30.0  # seconds to wait at the end for a tracker to store its data


def tracker(name: str, **settings: Any) -> LoopTracker:
    """Create a tracker callback for `paceline.setup(…, on_step=[…])`.

    The callback logs every step on the first rank, and does nothing on other ranks.

    Args:
        name: `tensorboard`, `wandb`, `mlflow`, `opentelemetry`, or a tracker of an installed package.
        settings: settings of the tracker, such as `folder` for `tensorboard`, or arguments of `wandb.init`.

    Raises:
        JobError: the tracker is unknown, its package is not installed, or the tracker rejects the settings.

    Example:
        >>> log = paceline.tracker("tensorboard", folder="logs")
        >>> engine = paceline.setup(model, optimizer, loss=loss, loader=loader, on_step=[log])
    """
    check(name)
    if own_rank() != 0:
        return LoopTracker(name, None)
    return LoopTracker(name, make(name, TrackedRun(config={"environment": told_of(environment())}), settings))


def tensorboard(folder: str | Path) -> LoopTracker:
    """Write every step's loss and gradient norm as TensorBoard events into `folder`."""
    return tracker("tensorboard", folder=folder)


def wandb(**settings: Any) -> LoopTracker:
    """Log every step to Weights & Biases; `settings` are arguments of `wandb.init`."""
    return tracker("wandb", **settings)


def mlflow(**settings: Any) -> LoopTracker:
    """Log every step to MLflow; docs/how-to/trackers.md lists the settings."""
    return tracker("mlflow", **settings)


def scalars(result: StepResult) -> dict[str, float]:
    """Return the numbers of a step that trackers log."""
    return {"train/loss": result.loss, "train/grad_norm": result.grad_norm}


class LoopTracker:
    """Callback that logs steps to a tracker in a separate thread.

    A call only puts numbers into a queue; on accelerators, those of the previous step. An error of the tracker is
    reported once, and training continues without the tracker. `close` closes the tracker; otherwise the end of the
    process closes it. If an exception ends the process, the run is logged as failed.

    Args:
        tracker: the tracker; None on ranks that do not log.
    """

    def __init__(self, name: str, tracker: Tracker | None) -> None:
        self.name, self.tracker = name, tracker
        self._steps: SimpleQueue[tuple[int, dict[str, float]] | Status] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_behind = False
        self._newest: StepResult | None = None
        from paceline.engine.engine import LateResult  # imports torch

        self._late = LateResult
        if tracker is not None:
            self._thread = threading.Thread(target=self._work, name=f"paceline-tracker-{name}", daemon=True)
            self._thread.start()
            atexit.register(self._close_at_exit)

    def __call__(self, result: StepResult) -> None:
        """Log the step, or on accelerators the previous step, whose numbers the host has read."""
        if self._thread is not None:
            self._put_newest()
            self._newest = result
            if not isinstance(result, self._late):
                self._put_newest()

    def _put_newest(self) -> None:
        result, self._newest = self._newest, None
        if result is None:
            return
        if self._steps.qsize() < _LONGEST_QUEUE:
            self._steps.put((result.step, scalars(result)))
        elif not self._is_behind:
            self._is_behind = True
            self._say(f"is more than {_LONGEST_QUEUE:,} steps behind, and gets fewer of them")

    def close(self, status: Status = "finished") -> None:
        """Close the tracker after it has stored all steps."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self._close_at_exit)
        self._put_newest()
        self._steps.put(status)
        thread.join(CLOSE_S)
        if thread.is_alive():
            self._say(f"has not stored everything after {CLOSE_S:g} s, and is not waited for")

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the exception that ended the script
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
