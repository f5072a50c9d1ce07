"""Trackers for loops of one's own: callbacks for `engine.on_step` that log every step.

They log on the first rank, and do nothing on the others.

    log = trackers.tracker("tensorboard", folder="logs")
    engine = paceline.setup(model, optimizer, loss, loader, on_step=[log])

Any function of a `StepResult` is one. TensorBoard, wandb and mlflow are imported when theirs is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError
from paceline.extensions import ExtensionPoint
from paceline.job.read.imports import load_object
from paceline.rank_environment import own_rank

if TYPE_CHECKING:
    from paceline.engine.engine import StepResult

OnStep = Callable[["StepResult"], object]


@dataclass(frozen=True)
class TrackerInfo:
    """Description of a tracker, readable without what it logs to.

    Attributes:
        tracker: import path of a function that takes the tracker's settings and returns a function of a `StepResult`.
            It is called on the first rank only.
    """

    tracker: str


TRACKERS = ExtensionPoint(
    "tracker",
    "paceline.trackers",
    TrackerInfo,
    {name: TrackerInfo(f"paceline.training.trackers:_{name}") for name in ("tensorboard", "wandb", "mlflow")},
    JobError,
)


def tracker(name: str, **settings: Any) -> OnStep:
    """The tracker of a name, paceline's or an installed package's, for `on_step`.

    Raises:
        JobError: no such tracker; or it does not take the settings.
    """
    make = load_object(TRACKERS[name].tracker)
    if own_rank() != 0:
        return _ignore
    try:
        on_step: OnStep = make(**settings)
    except TypeError as error:
        raise JobError(f'tracker "{name}" cannot be made: {error}') from error
    return on_step


def tensorboard(folder: str | Path) -> OnStep:
    """Write loss and gradient norm of every step as TensorBoard events into `folder`."""
    return tracker("tensorboard", folder=folder)


def wandb(**settings: Any) -> OnStep:
    """Log every step to Weights & Biases; `settings` are those of `wandb.init`."""
    return tracker("wandb", **settings)


def mlflow(**settings: Any) -> OnStep:
    """Log every step to MLflow; `settings` are those of `mlflow.start_run`."""
    return tracker("mlflow", **settings)


def scalars(result: StepResult) -> dict[str, float]:
    """Numbers of a step that trackers log."""
    return {"loss": result.loss, "grad_norm": result.grad_norm}


def _tensorboard(folder: str | Path) -> OnStep:
    from paceline.training.tensorboard import TensorBoard

    board = TensorBoard(Path(folder))
    return lambda result: board.scalars(result.step, scalars(result))


def _wandb(**settings: Any) -> OnStep:
    import wandb as package

    run = package.init(**settings)
    return lambda result: run.log(scalars(result), step=result.step)


def _mlflow(**settings: Any) -> OnStep:
    import mlflow as package

    package.start_run(**settings)
    return lambda result: package.log_metrics(scalars(result), step=result.step)


def _ignore(result: StepResult) -> None:
    return
