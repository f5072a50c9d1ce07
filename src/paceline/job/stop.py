"""Stop rules: a job ends when the first of its rules is satisfied."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.errors import InvalidValue, JobError
from paceline.job.spec import Spec
from paceline.text import nearest
from paceline.units import count

# for each built-in metric: True if larger values are better
HIGHER_IS_BETTER = {
    **dict.fromkeys(
        ("accuracy", "token_accuracy", "multilabel_accuracy", "top5", "f1", "auc", "r2", "contrastive_accuracy"), True
    ),
    **dict.fromkeys(("loss", "perplexity", "bits_per_byte", "mse", "mae"), False),
    **dict.fromkeys(("reward_accuracy", "reward_margin", "reward_chosen"), True),
    "reward_rejected": False,
}


class PatienceSpec(Spec):
    """`patience: {metric: loss, evaluations: 5}`: stop after 5 evaluations without an improvement.

    An evaluation is an improvement if the metric is better than the previous best value by more than `min_delta`.
    `mode` states whether smaller (`min`) or larger (`max`) values are better. The built-in metrics and most metrics of
    torchmetrics define this themselves.
    """

    metric: str
    evaluations: int = Field(ge=1)
    min_delta: float = Field(0.0, ge=0)
    mode: Literal["min", "max"] | None = None


class BestSpec(Spec):
    """`best: accuracy`, or `{metric: loss, mode: min}`: keep the checkpoint of the best evaluation."""

    short: ClassVar[str | None] = "metric"
    metric: str
    mode: Literal["min", "max"] | None = None


class PlateauSpec(Spec):
    """`plateau`: stop when the training loss no longer falls.

    The rule compares the mean loss of the last `over` steps with the mean loss of the `over` steps before them. The run
    stops if the mean fell by at most `less_than`.
    """

    less_than: float = Field(gt=0)
    over: int = Field(ge=1)


class StopSpec(Spec):
    """The stop rules of a job; the first satisfied rule ends the run.

    An example is `stop: {epochs: 20, metric_above: {accuracy: 0.97}, patience: {metric: loss, evaluations: 5}}`.

    The record of the run names the satisfied rule.
    """

    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    seconds: float | None = Field(None, gt=0)
    loss_below: float | None = None  # limit for the training loss of a step (mean over the global batch)
    metric_above: dict[str, float] = Field(default_factory=dict)  # limits for validation metrics at an evaluation
    metric_below: dict[str, float] = Field(default_factory=dict)
    patience: PatienceSpec | None = None
    plateau: PlateauSpec | None = None

    @model_validator(mode="after")
    def _has_an_end(self) -> StopSpec:
        if not self.model_dump(exclude_defaults=True):
            raise InvalidValue(
                "job.no_stop_rule",
                "at least one of {keys} is needed, because otherwise the run never ends",
                keys=list(type(self).model_fields),
            )
        return self

    @property
    def watched(self) -> dict[str, str]:
        """Map the validation metrics that may end the run to the job's keys."""
        patience = {self.patience.metric: "stop.patience"} if self.patience else {}
        below, above = (dict.fromkeys(getattr(self, key), f"stop.{key}") for key in ("metric_below", "metric_above"))
        return patience | below | above

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """Return the maximum number of steps; None if the rules do not limit the steps."""
        bounds = [b for b in (self.steps, self.epochs and self.epochs * (steps_per_epoch or 0)) if b]
        return min(bounds) if bounds else None


def higher_is_better(key: str, metric: str, mode: str | None, metrics: Sequence[Any] = ()) -> bool:
    """Return True if larger values of a metric are better.

    Args:
        key: the key of the job that uses the metric, for messages.
        mode: `min` or `max`, if the key gives it.
        metrics: metrics that the run measures.

    Raises:
        JobError: none of `metrics` measures the value, or it is unknown whether larger values are better.
    """
    names = list(dict.fromkeys(["loss", *(one.name for one in metrics)]))
    if metric not in names:
        raise JobError(
            "job.metric_never_measured",
            "{key} uses {metric}, which is never measured. {hint}",
            key=key,
            metric=metric,
            hint=nearest(metric, names),
        )
    if mode is not None:
        return mode == "max"
    own = next((getattr(one, "higher_is_better", None) for one in metrics if one.name == metric), None)
    if (known := HIGHER_IS_BETTER.get(metric) if own is None else own) is None:
        raise JobError(
            "job.metric_mode_missing",
            "{key}: it is unknown whether a larger {metric} is better. Set mode: max or mode: min.",
            key=key,
            metric=metric,
        )
    return known


@dataclass
class Best:
    """The best value of a metric so far.

    Attributes:
        higher: True if larger values are better.
        min_delta: smallest difference that counts as an improvement.
        value: the best value; None before the first evaluation.
        step: step of the evaluation with the best value; -1 before the first evaluation.
        since: number of evaluations after the best one.
        seen: the step of the newest evaluation that was counted.
    """

    metric: str
    higher: bool
    min_delta: float = 0.0
    value: float | None = None
    step: int = -1
    since: int = 0
    seen: int = -1

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Count an evaluation; return True if it is the best so far.

        An evaluation that is repeated after a failure is counted only once.
        """
        if step == self.seen:
            return step == self.step
        self.seen = step
        value = metrics.get(self.metric, math.nan)
        gain = math.inf if self.value is None else (value - self.value) * (1 if self.higher else -1)
        if math.isfinite(value) and gain > self.min_delta:
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, without the settings from the job."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "since": self.since, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore an earlier state, or reset it if the earlier state belongs to another metric."""
        if state is None or state["metric"] != self.metric:
            self.value, self.step, self.since, self.seen = None, -1, 0, -1
        else:
            self.value, self.step, self.since, self.seen = (state[k] for k in ("value", "step", "since", "seen"))


@dataclass
class StopRule:
    """The stop rules of a run, and the run's best evaluation.

    `elapsed_before_s` is the wall-clock time that earlier attempts of the run took.

    Args:
        keep: the metric for which the best checkpoint is kept; None if there is no such metric.
        metrics: metrics that the run measures.

    Attributes:
        best: the best evaluation according to `keep`; None without `keep`.

    Raises:
        JobError: a metric of a rule is not measured, or it is unknown whether larger values are better.
    """

    spec: StopSpec
    epochs: Epochs
    elapsed_before_s: float = 0.0
    keep: InitVar[BestSpec | None] = None
    metrics: InitVar[Sequence[Any]] = ()
    best: Best | None = field(init=False, default=None)
    _patience: Best | None = field(init=False, default=None)
    _started: float = field(default_factory=time.monotonic)
    _losses: deque[float] = field(default_factory=deque)
    _newest_loss: float | None = None
    _newest_metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self, keep: BestSpec | None, metrics: Sequence[Any]) -> None:
        if keep is not None:
            higher = higher_is_better("checkpoint.best", keep.metric, keep.mode, metrics)
            self.best = Best(keep.metric, higher)
        if (patience := self.spec.patience) is not None:
            higher = higher_is_better("stop.patience", patience.metric, patience.mode, metrics)
            self._patience = Best(patience.metric, higher, patience.min_delta)

    @property
    def elapsed_s(self) -> float:
        """Return the training time so far in seconds, including earlier attempts."""
        return self.elapsed_before_s + time.monotonic() - self._started

    def after_step(self, step: int, loss: float) -> str | None:
        """Return the reason to stop after optimizer step `step` (1-based); None to continue.

        The decision uses only values that are equal on all ranks. For the wall-clock time (`out_of_time`), one rank
        decides for all.
        """
        self._newest_loss = loss
        if self.spec.plateau:
            self._losses.append(loss)
            while len(self._losses) > 2 * self.spec.plateau.over:
                self._losses.popleft()
        return self._bound(step) or self._loss_below(step) or self._plateau(step)

    def ended(self, step: int) -> str | None:
        """Return the reason to stop after optimizer step `step`; None to continue.

        Only recorded values are used, because the run may have been resumed after its end.
        """
        reason = self._bound(step) or self._loss_below(step) or self._plateau(step) or self._by_metrics()
        # a recorded time, which is equal on all ranks
        was_out_of_time = self.elapsed_before_s >= (self.spec.seconds or math.inf)
        return reason or (self.out_of_time() if was_out_of_time else None)

    def out_of_time(self) -> str | None:
        """Return the reason to stop if the time limit is reached; None to continue.

        The result may differ between ranks, so rank 0 must decide for all.
        """
        if self.spec.seconds is not None and self.elapsed_s >= self.spec.seconds:
            return f"seconds: {self.spec.seconds:g} s are over"
        return None

    def after_evaluation(self, metrics: dict[str, float], step: int, *, counts: bool = True) -> str | None:
        """Record validation metrics; return the reason to stop, or None to continue.

        Args:
            counts: False for an evaluation that takes place only because the run ends. Such an evaluation may be the
                best one, but never ends the run.
        """
        if self.best is not None:
            self.best.update(step, metrics)
        if not counts:
            return None
        self._newest_metrics = metrics
        if self._patience is not None:
            self._patience.update(step, metrics)
        return self._by_metrics()

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs to stop at the correct step."""
        return {
            "elapsed_s": self.elapsed_s,
            "losses": list(self._losses),
            "newest_loss": self._newest_loss,
            "newest_metrics": self._newest_metrics,
            "best": None if self.best is None else self.best.state_dict(),
            "patience": None if self._patience is None else self._patience.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the recorded values and the elapsed time of an earlier attempt."""
        self.rewind(state)
        self.elapsed_before_s = state["elapsed_s"]
        self._started = time.monotonic()

    def rewind(self, state: dict[str, Any]) -> None:
        """Restore the recorded values of `state`, but keep the elapsed time."""
        self._losses = deque(state["losses"])
        self._newest_loss, self._newest_metrics = state["newest_loss"], state["newest_metrics"]
        for key, watched in (("best", self.best), ("patience", self._patience)):
            if watched is not None:
                watched.load_state_dict(state.get(key))

    def _bound(self, step: int) -> str | None:
        if self.spec.steps and step >= self.spec.steps:
            return f"steps: {self.spec.steps} done"
        if self.spec.epochs and self.epochs.completed(step) >= self.spec.epochs:
            return f"epochs: {self.spec.epochs} done"
        return None

    def _loss_below(self, step: int) -> str | None:
        limit, loss = self.spec.loss_below, self._newest_loss
        if limit is not None and loss is not None and loss < limit:
            return f"loss_below: {loss:.6g} < {limit:g} at step {step}"
        return None

    def _by_metrics(self) -> str | None:
        for name, target in self.spec.metric_above.items():
            value = self._newest_metrics.get(name, -math.inf)
            if value > target:
                return f"metric_above: {name} {value:.4f} > {target:g}"
        for name, target in self.spec.metric_below.items():
            value = self._newest_metrics.get(name, math.inf)
            if value < target:
                return f"metric_below: {name} {value:.4f} < {target:g}"
        patience, watched = self.spec.patience, self._patience
        if patience is not None and watched is not None and watched.since >= patience.evaluations:
            best = "no number" if watched.value is None else f"{watched.value:.4f} at step {watched.step}"
            return f"patience: {count(watched.since, 'evaluation')} without a better {patience.metric} than {best}"
        return None

    def _plateau(self, step: int) -> str | None:
        rule = self.spec.plateau
        if rule is None or len(self._losses) < 2 * rule.over:
            return None
        losses = list(self._losses)
        older, newer = losses[-2 * rule.over : -rule.over], losses[-rule.over :]
        gain = (sum(older) - sum(newer)) / rule.over
        if gain <= rule.less_than:
            return (
                f"plateau: the loss fell by {gain:.3g} over {rule.over} steps, not by more than "
                f"{rule.less_than:g}, at step {step}"
            )
        return None


class Epochs:
    """Counter of epochs, which have a fixed length or end with a stream.

    Args:
        steps: number of steps of every epoch; None for a stream.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self.ends: list[int] = []  # steps after which a stream ended

    def completed(self, step: int) -> int:
        """Return the number of epochs that end with `step` or before it."""
        return bisect_right(self.ends, step) if self.steps is None else step // self.steps

    def of(self, step: int) -> int:
        """Return the epoch (0-based) of a step (1-based)."""
        return bisect_left(self.ends, step) if self.steps is None else (step - 1) // self.steps

    def ends_with(self, step: int) -> bool:
        """Return True if an epoch is known to end with this step."""
        return step in self.ends[-1:] if self.steps is None else step % self.steps == 0

    def fraction(self, step: int) -> float:
        """Return the number of epochs after `step`; for a stream, only whole epochs."""
        return float(self.completed(step)) if self.steps is None else step / self.steps

    def end(self, step: int) -> None:
        """Record the end of a stream's epoch."""
        self.ends.append(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the ends of epochs so far."""
        return {"ends": list(self.ends)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the ends of epochs."""
        self.ends = list(state.get("ends", []))


class SpikeSpec(Spec):
    """Handling of loss spikes: `spike: rewind`, or `{policy: skip, threshold: 6, window: 100}`.

    A loss is a spike if it exceeds the median of the last `window` losses by more than `threshold` standard deviations.
    """

    short: ClassVar[str | None] = "policy"
    policy: Literal["off", "skip", "rewind"] = "off"
    threshold: float = Field(10.0, gt=0)  # in standard deviations, which are estimated by the median absolute deviation
    window: int = Field(50, ge=10)  # number of steps before spikes are detected

    @model_validator(mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        """Convert False, which YAML reads for `off`, to "off"."""
        if isinstance(value, dict):
            return value | {"policy": "off"} if value.get("policy") is False else value
        return {"policy": "off"} if value is False else value
