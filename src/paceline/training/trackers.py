"""Trackers for a user's own loop: `engine.on_step` callbacks that log on rank 0.

    engine = paceline.setup(model, optimizer, loss, loader, on_step=[trackers.tensorboard("logs")])

Any function of a `StepResult` is one. TensorBoard, wandb and mlflow are imported when theirs is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.engine.engine import StepResult
from paceline.rank_environment import own_rank

OnStep = Callable[[StepResult], object]


def tensorboard(folder: str | Path) -> OnStep:
    """Write loss and gradient norm of every step as TensorBoard events into `folder`."""
    if own_rank() != 0:
        return _ignore
    from paceline.training.tensorboard import TensorBoard

    board = TensorBoard(Path(folder))
    return lambda result: board.scalars(result.step, _scalars(result))


def wandb(**settings: Any) -> OnStep:
    """Log every step to Weights & Biases; `settings` are those of `wandb.init`."""
    if own_rank() != 0:
        return _ignore
    import wandb as package

    run = package.init(**settings)
    return lambda result: run.log(_scalars(result), step=result.step)


def mlflow(**settings: Any) -> OnStep:
    """Log every step to MLflow; `settings` are those of `mlflow.start_run`."""
    if own_rank() != 0:
        return _ignore
    import mlflow as package

    package.start_run(**settings)
    return lambda result: package.log_metrics(_scalars(result), step=result.step)


def _scalars(result: StepResult) -> dict[str, float]:
    return {"loss": result.loss, "grad_norm": result.grad_norm}


def _ignore(result: StepResult) -> None:
    return
