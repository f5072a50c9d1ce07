"""Callbacks of a run's loop: what a run does beside its steps."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.engine import StepResult


@dataclass(slots=True)
class StepInfo:
    """A step that was taken.

    Attributes:
        result: what the engine says of it.
        epoch: from 0.
        local_samples: this rank's share of the global batch.
        lr: learning rate of the step.
        ending: why the run ends after this step; None where it goes on, as far as the callbacks called so far know.
    """

    result: StepResult
    epoch: int
    local_samples: int
    lr: float
    ending: str | None = None


class Callback:
    """Something that a run does beside its steps; a callback needs to write only what it does."""

    def on_step(self, info: StepInfo) -> None:
        """Called right after every step."""

    def after_step(self, info: StepInfo) -> str | None:
        """Called after `on_step` of all, unless training went back to a checkpoint; a reason ends the run."""
        return None

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Called with the metrics of every evaluation."""

    def close(self) -> None:
        """Called at the end of the run, however it ends."""
