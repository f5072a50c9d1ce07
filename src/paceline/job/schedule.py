"""Learning-rate schedules of a job."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.errors import InvalidValue, JobError
from paceline.job.optimizer import refuse_unused
from paceline.job.spec import Args, Spec, check_call, load_object, resolve_import_path
from paceline.text import nearest

if TYPE_CHECKING:
    import torch

Period = Literal["step", "epoch", "evaluation"]


class ScheduleSpec(Spec):
    """The learning-rate schedule of a job: one of paceline's own, or a scheduler of torch.

    Examples are `schedule: cosine` and `{name: OneCycleLR, args: {max_lr: 0.1}, every: step}`.

    Paceline's own schedules are a linear warm-up, then `constant`, `linear`, `cosine` or `step` decay. `decay_steps` is
    the step at which the decay ends. Without `decay_steps`, the job's stop rule must set `steps` or `epochs`.
    """

    short: ClassVar[str | None] = "name"
    name: str = "constant"  # constant, linear, cosine, step; a class of torch.optim.lr_scheduler; or an import path
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int | None = Field(None, ge=1)
    final: float = Field(0.0, ge=0, le=1)  # final learning rate, as a fraction of `lr`
    milestones: tuple[int, ...] = ()  # for `step`: the steps at which the learning rate is multiplied by `factor`
    factor: float = Field(0.1, gt=0, lt=1)
    args: Args = Field(default_factory=dict)  # arguments of a scheduler class
    # when a scheduler class is stepped: by default after every step, or after every evaluation for ReduceLROnPlateau
    every: Period | None = None
    metric: str | None = None  # for ReduceLROnPlateau: the validation metric to follow, by default the loss

    @field_validator("name")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        if ":" in value:
            return resolve_import_path(value, info.context)
        if value not in _SCHEDULE_KEYS and value not in _TORCH:
            raise InvalidValue(
                "schedule.unknown",
                'unknown schedule "{name}". {hint}',
                name=value,
                hint=nearest(value, (*_SCHEDULE_KEYS, *_TORCH)),
            )
        return value

    @field_validator("args")
    @classmethod
    def _resolve_functions(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        value = _with_functions(value, lambda path: resolve_import_path(path, info.context))
        if isinstance(inner := value.get("schedulers"), list):
            value["schedulers"] = [cls.model_validate(entry, context=info.context)._as_inner() for entry in inner]
        return value

    def _as_inner(self) -> dict[str, Any]:
        """Return the settings of a scheduler inside another one.

        Keys that would be ignored are errors.
        """
        found = self.model_dump(exclude_defaults=True)
        if not self.by_class or found.keys() - {"name", "args"}:
            raise InvalidValue(
                "schedule.inner",
                "schedulers must contain classes of torch.optim.lr_scheduler, each with a name and args, not {entry}",
                entry=found,
            )
        return found

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> ScheduleSpec:
        if self.by_class:
            refuse_unused(self, self.name, ("args", "every", "metric"))
            if self.metric is not None and not self.follows_metric:
                raise InvalidValue(
                    "schedule.no_metric", "{name} does not use a metric; only ReduceLROnPlateau does", name=self.name
                )
            if self.follows_metric and self.period != "evaluation":
                raise InvalidValue(
                    "schedule.every_with_metric",
                    "ReduceLROnPlateau follows a validation metric, so it steps at evaluations. Leave `every` out.",
                )
            return self
        if (self.name == "step") != bool(self.milestones):
            raise InvalidValue(
                "schedule.milestones",
                "the schedule step needs milestones, e.g. {{name: step, milestones: [300, 600]}}, and other "
                "schedules cannot have milestones",
            )
        refuse_unused(self, self.name, _SCHEDULE_KEYS[self.name])
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise InvalidValue(
                "schedule.decay_before_warmup",
                "the decay should end after the warm-up of {warmup_steps} steps, but decay_steps is {decay_steps}",
                warmup_steps=self.warmup_steps,
                decay_steps=self.decay_steps,
            )
        return self

    @property
    def by_class(self) -> bool:
        """True if a scheduler class sets the learning rates; otherwise `factor_at` returns them."""
        return self.name not in _SCHEDULE_KEYS

    @property
    def follows_metric(self) -> bool:
        """True if each step of the scheduler needs the value of a validation metric."""
        return self.name.rpartition(":")[2] == "ReduceLROnPlateau"

    @property
    def period(self) -> Period:
        """The event after which the scheduler is stepped."""
        return self.every or ("evaluation" if self.follows_metric else "step")

    @property
    def ends_with_run(self) -> bool:
        """True if a cycle (OneCycleLR) is as long as the run."""
        inner = [ScheduleSpec.model_validate(entry) for entry in self.args.get("schedulers", ())]  # type: ignore[union-attr]
        own = self.name == "OneCycleLR" and not _LENGTHS & self.args.keys()
        return own or any(spec.ends_with_run for spec in inner)

    def factor_at(self, step: int, total_steps: int | None) -> float:
        """Return the learning rate at step `step` (0-based) as a fraction of `lr`.

        The warm-up is linear and reaches 1 in its last step. The decay then starts and reaches `final` at its end.
        If `decay_steps` is not given, the decay ends at `total_steps`, the limit of the stop rule.

        Raises:
            JobError: the decay has no end, because neither `decay_steps` nor `total_steps` is known.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        if self.name == "step":
            return self.factor ** sum(step >= milestone for milestone in self.milestones)
        end = self.decay_steps or total_steps
        if end is None:
            raise JobError(
                "schedule.end_unknown",
                "schedule {name} needs to know where the decay ends. Give schedule.decay_steps, or stop.epochs or "
                "stop.steps.",
                name=self.name,
            )
        progress = min(1.0, (step - self.warmup_steps) / max(1, end - self.warmup_steps))
        remaining = 1 - progress if self.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final + (1 - self.final) * remaining

    def refuse_short_cycle(self, total: int | None) -> None:
        """Raise a JobError for a OneCycleLR that ends before the run.

        Args:
            total: number of scheduler steps in the whole run; None if this number is not limited.
        """
        args: dict[str, Any] = self.args
        length = args.get("total_steps") or args.get("epochs", 0) * args.get("steps_per_epoch", 0)
        if self.name == "OneCycleLR" and length and total is not None and total > length:
            raise JobError(
                "schedule.cycle_too_short",
                "schedule OneCycleLR has a cycle of {length} steps, but the stop rule allows {total}, and no "
                "learning rate is defined after the cycle. Leave total_steps and epochs out, so that the cycle is "
                "as long as the run.",
                length=length,
                total=total,
            )

    def build(self, optimizer: torch.optim.Optimizer, total: int | None) -> Any:
        """Build the scheduler that the job names by its class.

        Args:
            total: number of scheduler steps in the whole run; None if the stop rule sets no limit.

        Raises:
            JobError: the class does not exist or rejects the arguments.
        """
        return _built(self.name, self.args, optimizer, total)


def _built(name: str, args: Mapping[str, Any], optimizer: torch.optim.Optimizer, total: int | None) -> Any:
    kind = load_object(name if ":" in name else f"torch.optim.lr_scheduler:{name}")
    called = {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
    called = _with_functions(called, load_object)
    if "schedulers" in called:
        inner = [ScheduleSpec.model_validate(entry) for entry in called["schedulers"]]
        called["schedulers"] = [_built(spec.name, spec.args, optimizer, total) for spec in inner]
    if name == "OneCycleLR" and not _LENGTHS & called.keys():
        if total is None:
            raise JobError(
                "schedule.cycle_end_unknown",
                "schedule OneCycleLR needs to know where the cycle ends. Give total_steps in its args, or "
                "stop.steps or stop.epochs.",
            )
        called["total_steps"] = total
    if name == "ChainedScheduler":
        called.setdefault("optimizer", optimizer)
        positional: tuple[Any, ...] = ()
    else:
        positional = (optimizer,)
    check_call(name, kind, *positional, **called)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the order of calls, which the training loop ensures
        try:
            return kind(*positional, **called)
        except (TypeError, ValueError, KeyError) as error:
            raise JobError("schedule.not_made", "schedule {name}: {error}", name=name, error=error) from error


def _with_functions(args: Mapping[str, Any], each: Any) -> dict[str, Any]:
    """Return the arguments with the import paths in `lr_lambda` and `scale_fn` replaced by functions."""

    def replaced(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(replaced, value))
        return each(value) if isinstance(value, str) else value

    return {key: replaced(value) if key in ("lr_lambda", "scale_fn") else value for key, value in args.items()}


_LENGTHS = {"total_steps", "epochs"}  # arguments that set the length of a OneCycleLR
_SCHEDULE_KEYS = {
    "constant": ("warmup_steps",),
    "linear": ("warmup_steps", "decay_steps", "final"),
    "cosine": ("warmup_steps", "decay_steps", "final"),
    "step": ("warmup_steps", "milestones", "factor"),
}
_TORCH = (
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
)
