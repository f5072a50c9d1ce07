"""Callbacks of a run's loop: what a run does beside its steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from paceline.engine.engine import StepResult


@dataclass(slots=True)
class StepInfo:
    """One finished step, as callbacks see it.

    Attributes:
        result: the engine's result.
        epoch: 0-based.
        local_samples: this rank's share of the global batch.
        lr: learning rate of the step.
        ending: why the run ends after this step; None where it goes on, as far as the callbacks called so far
            know.
        busy_s: of every rank, before the step's agreement; empty where replicas do not agree in it.
        ended_at: Unix time of its end, where it is told later; None: now.
    """

    result: StepResult
    epoch: int
    local_samples: int
    lr: float
    ending: str | None = None
    busy_s: list[float] = field(default_factory=list)
    ended_at: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The step without its times, for ranks that broke it off."""
        return asdict(replace(self, result=replace(self.result, timing=None), busy_s=[]))

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Self:
        """The step that `as_json` told of."""
        return cls(**told | {"result": StepResult(**told["result"])})


class Callback:
    """Base class of what a run does after its steps; override what is needed."""

    def on_start(self, step: int) -> None:
        """Called where training begins or goes on, after `step` steps."""

    def on_step(self, info: StepInfo) -> None:
        """Called right after every step."""

    def after_step(self, info: StepInfo) -> str | None:
        """Called after every callback's `on_step`; a returned reason ends the run.

        Not called where training went back to a checkpoint.
        """
        return None

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Called with the metrics of every evaluation."""

    def close(self) -> None:
        """Called at the end of the run, however it ends."""
