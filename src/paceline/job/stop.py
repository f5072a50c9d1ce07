"""Stop rules: a job ends at the first one that comes true, by name."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.job.spec import Spec

# built-in metrics: True if the larger of two values is the better one
HIGHER_IS_BETTER = {
    **dict.fromkeys(("accuracy", "multilabel_accuracy", "top5", "f1", "auc", "r2", "contrastive_accuracy"), True),
    **dict.fromkeys(("loss", "perplexity", "bits_per_byte", "mse", "mae"), False),
}


class PlateauSpec(Spec):
    """Stop when the training loss no longer falls.

    It no longer falls when the mean over the last `over` steps is not lower by more than `less_than` than that of the
    `over` steps before.
    """

    less_than: float = Field(gt=0)
    over: int = Field(ge=1)


class StopSpec(Spec):
    """`stop: {epochs: 20, metric_above: {accuracy: 0.97}}`.

    Whichever comes first ends the run and is named in its record.
    """

    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    seconds: float | None = Field(None, gt=0)
    loss_below: float | None = None  # the training loss of a step (mean over the global batch)
    metric_above: dict[str, float] = Field(default_factory=dict)  # a validation metric, at an evaluation
    plateau: PlateauSpec | None = None

    @model_validator(mode="after")
    def _has_an_end(self) -> StopSpec:
        if not self.model_dump(exclude_defaults=True):
            raise ValueError(
                "name at least one of epochs, steps, seconds, loss_below, metric_above, plateau, or the run never ends"
            )
        return self

    def total_steps(self, steps_per_epoch: int) -> int | None:
        """Upper limit on steps; None if only time, loss or metrics bound the run."""
        bounds = [b for b in (self.steps, self.epochs and self.epochs * steps_per_epoch) if b]
        return min(bounds) if bounds else None


@dataclass
class StopRule:
    """Watches a run against a `StopSpec`.

    `elapsed_before_s` carries the wall-clock of earlier attempts of the same run.
    """

    spec: StopSpec
    steps_per_epoch: int
    elapsed_before_s: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _losses: deque[float] = field(default_factory=deque)
    _newest_loss: float | None = None
    _newest_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, earlier attempts included."""
        return self.elapsed_before_s + time.monotonic() - self._started

    def after_step(self, step: int, loss: float) -> str | None:
        """The reason to stop after optimizer step `step` (1-based, over the whole run), or None.

        Decided from values that every rank shares, but for the wall-clock (`out_of_time`), which one rank decides for
        all.
        """
        self._newest_loss = loss
        if self.spec.plateau:
            self._losses.append(loss)
            while len(self._losses) > 2 * self.spec.plateau.over:
                self._losses.popleft()
        return self._bound(step) or self._loss_below(step) or self._plateau(step)

    def ended(self, step: int) -> str | None:
        """The reason to stop after optimizer step `step`; None to go on.

        Only what is recorded decides, as the run may have been resumed after its end.
        """
        reason = self._bound(step) or self._loss_below(step) or self._plateau(step) or self._metric_above()
        was_out_of_time = self.elapsed_before_s >= (self.spec.seconds or math.inf)  # by a clock that all ranks share
        return reason or (self.out_of_time() if was_out_of_time else None)

    def out_of_time(self) -> str | None:
        """The reason to stop when the wall-clock is used up, or None. Differs between ranks: let rank 0 decide."""
        if self.spec.seconds is not None and self.elapsed_s >= self.spec.seconds:
            return f"seconds: {self.spec.seconds:g} s are over"
        return None

    def after_evaluation(self, metrics: dict[str, float]) -> str | None:
        """The reason to stop after validation metrics were measured, or None."""
        self._newest_metrics = metrics
        return self._metric_above()

    def state_dict(self) -> dict[str, object]:
        """The state that lets a resumed run stop where an undisturbed one would."""
        return {
            "elapsed_s": self.elapsed_s,
            "losses": list(self._losses),
            "newest_loss": self._newest_loss,
            "newest_metrics": self._newest_metrics,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier run saw, and the time that it spent."""
        self.rewind(state)
        self.elapsed_before_s = state["elapsed_s"]
        self._started = time.monotonic()

    def rewind(self, state: dict[str, Any]) -> None:
        """Forget what was seen since `state` was taken, but not the time that it took."""
        self._losses = deque(state["losses"])
        self._newest_loss, self._newest_metrics = state["newest_loss"], state["newest_metrics"]

    def _bound(self, step: int) -> str | None:
        if self.spec.steps and step >= self.spec.steps:
            return f"steps: {self.spec.steps} done"
        if self.spec.epochs and step >= self.spec.epochs * self.steps_per_epoch:
            return f"epochs: {self.spec.epochs} done"
        return None

    def _loss_below(self, step: int) -> str | None:
        limit, loss = self.spec.loss_below, self._newest_loss
        if limit is not None and loss is not None and loss < limit:
            return f"loss_below: {loss:.6g} < {limit:g} at step {step}"
        return None

    def _metric_above(self) -> str | None:
        for name, target in self.spec.metric_above.items():
            value = self._newest_metrics.get(name, -math.inf)
            if value > target:
                return f"metric_above: {name} {value:.4f} > {target:g}"
        return None

    def _plateau(self, step: int) -> str | None:
        rule, losses = self.spec.plateau, list(self._losses)
        if rule is None or len(losses) < 2 * rule.over:
            return None
        older, newer = losses[-2 * rule.over : -rule.over], losses[-rule.over :]
        gain = (sum(older) - sum(newer)) / rule.over
        if gain <= rule.less_than:
            return (
                f"plateau: the loss fell by {gain:.3g} over {rule.over} steps, not by more than "
                f"{rule.less_than:g}, at step {step}"
            )
        return None


class SpikeSpec(Spec):
    """`spike: rewind`, or `{policy: skip, threshold: 6, window: 100}`.

    A loss is a spike beyond the median of the last `window` losses plus `threshold` times their spread.
    """

    short: ClassVar[str | None] = "policy"
    policy: Literal["off", "skip", "rewind"] = "off"
    threshold: float = Field(10.0, gt=0)  # standard deviations, by the median absolute deviation
    window: int = Field(50, ge=10)  # steps before the first spike can be found

    @model_validator(mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        """`off` as YAML reads it: false."""
        if isinstance(value, dict):
            return value | {"policy": "off"} if value.get("policy") is False else value
        return {"policy": "off"} if value is False else value
