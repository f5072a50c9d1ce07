"""Learning rates of a run: the job's schedule, applied to every parameter group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import JobError
from paceline.job.optimizer import BASE_LR
from paceline.job.schedule import ScheduleSpec
from paceline.job.stop import Epochs

_FIXED = ("params", "fused", "foreach", BASE_LR)  # settings of a parameter group that no schedule changes


class LearningRate:
    """Learning-rate schedule that sets an optimizer's rates before each step.

    The scheduler is stepped up to the current step number, so ranks that were interrupted at different steps continue
    with equal rates. A step counts even if its update is skipped.

    Args:
        optimizer: the job's optimizer, whose groups still have their initial rates.
        total_steps: maximum number of steps of the run; None if unknown.
    """

    def __init__(
        self, spec: ScheduleSpec, optimizer: torch.optim.Optimizer, total_steps: int | None, epochs: Epochs
    ) -> None:
        self.spec, self.optimizer, self.total_steps, self.epochs = spec, optimizer, total_steps, epochs
        self._base = [group[BASE_LR] for group in optimizer.param_groups]
        self._stepped = 0
        self._evaluated = -1  # step of the newest evaluation that the schedule has seen
        self._scheduler: Any = None
        if spec.by_class:
            found = self._settings()
            for group, lr in zip(optimizer.param_groups, self._base, strict=True):
                group.pop("initial_lr", None)
                group["lr"] = lr
            total = total_steps
            if total is not None and spec.period == "epoch":
                total = None if epochs.steps is None else math.ceil(total / epochs.steps)
            total = None if spec.period == "evaluation" else total
            spec.refuse_short_cycle(total)
            self._scheduler = spec.build(optimizer, total)
            self._first, self._first_state = self._settings(), _plain(self._scheduler.state_dict())
            self._set(found)  # keep the current rates if the run continues in memory

    def start(self) -> None:
        """Set the learning rates of the first step."""
        if self._scheduler is not None:
            self._load({"stepped": 0, "evaluated": -1, "state": self._first_state, "groups": self._first})

    def before(self, step: int) -> float:
        """Set the learning rates for the step after `step`; return the first group's rate."""
        groups = self.optimizer.param_groups
        if self._scheduler is None:
            factor = self.spec.factor_at(step, self.total_steps)
            for group, lr in zip(groups, self._base, strict=True):
                group["lr"] = lr * factor
        elif self.spec.period != "evaluation":
            due = step if self.spec.period == "step" else self.epochs.completed(step)
            while self._stepped < due:
                self._step()
        return float(groups[0]["lr"])

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step the schedule once, with the metrics of the evaluation after `step`."""
        if self._scheduler is None or self.spec.period != "evaluation" or step == self._evaluated:
            return
        self._evaluated = step
        if self.spec.follows_metric:
            self._step(metrics[self.spec.metric or "loss"])
        else:
            self._step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values; empty if the step number determines the rates."""
        if self._scheduler is None:
            return {}
        state = _plain(self._scheduler.state_dict())
        return {
            "name": self.spec.name,
            "stepped": self._stepped,
            "evaluated": self._evaluated,
            "state": state,
            "groups": self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state of an earlier run; the state of another schedule is ignored."""
        if self._scheduler is None:
            return
        if state and state["name"] == self.spec.name and len(state["groups"]) == len(self._first):
            self._load(state)
        else:
            self.start()

    def _load(self, state: Mapping[str, Any]) -> None:
        fresh = self._scheduler.state_dict()
        self._scheduler.load_state_dict(_merged(fresh, state["state"]))
        self._stepped, self._evaluated = state["stepped"], state["evaluated"]
        self._set(state["groups"])

    def _step(self, *metric: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # after a skipped update, PyTorch would warn about the order of calls
            try:
                self._scheduler.step(*metric)
            except (TypeError, ValueError) as error:
                raise JobError(
                    "schedule.step_refused", "schedule {name}: {error}", name=self.spec.name, error=error
                ) from error
        self._stepped += 1

    def _settings(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        return [{k: _plain(v) for k, v in group.items() if k not in _FIXED} for group in groups]

    def _set(self, settings: list[dict[str, Any]]) -> None:
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group |= {k: tuple(v) if isinstance(v, list) else _number(v) for k, v in own.items()}


class _Left(Exception):
    """Raised for a value that JSON cannot represent; the job's arguments recreate the value."""


def _plain(value: Any) -> Any:
    """Convert a value of a scheduler's state to JSON; NaN and infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float {value}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        found = {}
        for key, entry in value.items():
            try:
                found[key] = _plain(entry)
            except _Left:
                continue
        return found
    raise _Left


def _merged(fresh: Any, saved: Any) -> Any:
    """Merge saved values into the state of a new scheduler."""
    if isinstance(fresh, dict) and isinstance(saved, dict):
        return {**fresh, **{key: _merged(fresh.get(key), value) for key, value in saved.items()}}
    if isinstance(fresh, (list, tuple)) and isinstance(saved, list) and len(fresh) == len(saved):
        return type(fresh)(_merged(a, b) for a, b in zip(fresh, saved, strict=True))
    return _number(saved)


def _number(value: Any) -> Any:
    is_text = isinstance(value, str) and value.startswith("float ")
    return float(value.removeprefix("float ")) if is_text else value
