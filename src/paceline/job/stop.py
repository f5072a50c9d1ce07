"""When a job ends: the first of its stop rules that comes true, by name."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from pydantic import Field, model_validator

from paceline.job.spec import Spec


class PlateauSpec(Spec):
    """Stop when the mean training loss of the last `over` steps is not lower by more than `less_than` than that of the `over` before."""

    less_than: float = Field(gt=0)
    over: int = Field(ge=1)


class StopSpec(Spec):
    """`stop: {epochs: 20, metric_above: {accuracy: 0.97}}`: whichever comes first ends the run and is named in its record."""

    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    seconds: float | None = Field(None, gt=0)
    loss_below: float | None = None  # the training loss of a step (mean over the global batch)
    metric_above: dict[str, float] = Field(default_factory=dict)  # a held-out metric, at an evaluation
    plateau: PlateauSpec | None = None

    @model_validator(mode="after")
    def _has_an_end(self) -> StopSpec:
        if not self.model_dump(exclude_defaults=True):
            raise ValueError("name at least one of epochs, steps, seconds, loss_below, metric_above, plateau, or the run never ends")
        return self

    def total_steps(self, steps_per_epoch: int) -> int | None:
        """The most steps that the rule allows, or None where only time, loss or metrics bound the run."""
        bounds = [b for b in (self.steps, self.epochs and self.epochs * steps_per_epoch) if b]
        return min(bounds) if bounds else None


@dataclass
class StopRule:
    """Watches a run against a `StopSpec`. `elapsed_before_s` carries the wall-clock of earlier attempts of the same run."""

    spec: StopSpec
    steps_per_epoch: int
    elapsed_before_s: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _losses: deque[float] = field(default_factory=deque)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, earlier attempts included."""
        return self.elapsed_before_s + time.monotonic() - self._started

    def after_step(self, step: int, loss: float) -> str | None:
        """The reason to stop after optimizer step `step` (1-based, over the whole run), or None.

        Decided from values that every rank shares, but for the wall-clock (`out_of_time`), which one rank decides for all.
        """
        spec = self.spec
        if spec.steps and step >= spec.steps:
            return f"steps: {spec.steps} done"
        if spec.epochs and step >= spec.epochs * self.steps_per_epoch:
            return f"epochs: {spec.epochs} done"
        if spec.loss_below is not None and loss < spec.loss_below:
            return f"loss_below: {loss:.6g} < {spec.loss_below:g} at step {step}"
        return self._plateau(loss, step)

    def out_of_time(self) -> str | None:
        """The reason to stop when the wall-clock is used up, or None. Differs between ranks: let rank 0 decide."""
        if self.spec.seconds is not None and self.elapsed_s >= self.spec.seconds:
            return f"seconds: {self.spec.seconds:g} s are over"
        return None

    def after_evaluation(self, metrics: dict[str, float]) -> str | None:
        """The reason to stop after held-out metrics were measured, or None."""
        for name, target in self.spec.metric_above.items():
            if metrics.get(name, float("-inf")) > target:
                return f"metric_above: {name} {metrics[name]:.4f} > {target:g}"
        return None

    def state_dict(self) -> dict[str, object]:
        """What a resumed run needs to stop where an undisturbed one would have."""
        return {"elapsed_s": self.elapsed_s, "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over the losses of the plateau window and the time already spent."""
        self.elapsed_before_s = float(state["elapsed_s"])  # type: ignore[arg-type]
        self._started = time.monotonic()
        self._losses = deque(state["losses"])  # type: ignore[call-overload]

    def _plateau(self, loss: float, step: int) -> str | None:
        rule = self.spec.plateau
        if rule is None:
            return None
        self._losses.append(loss)
        if len(self._losses) > 2 * rule.over:
            self._losses.popleft()
        if len(self._losses) < 2 * rule.over:
            return None
        losses = list(self._losses)
        gain = (sum(losses[: rule.over]) - sum(losses[rule.over :])) / rule.over
        if gain <= rule.less_than:
            return f"plateau: the loss fell by {gain:.3g} over {rule.over} steps, not by more than {rule.less_than:g}, at step {step}"
        return None
