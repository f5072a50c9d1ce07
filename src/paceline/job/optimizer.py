"""The optimizer and learning-rate schedule of a job."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from paceline.errors import JobError
from paceline.job.spec import Spec

if TYPE_CHECKING:
    import torch


class OptimizerSpec(Spec):
    """`optimizer: adamw`, or `{name: sgd, lr: 0.1, momentum: 0.9}`.

    LARS (You et al., 2017, arXiv:1708.03888) and LAMB (You et al., 2020, arXiv:1904.00962) are for large batches:
    they scale each layer's step by the ratio of its weight norm to its update norm.
    """

    short: ClassVar[str | None] = "name"
    name: Literal["sgd", "adam", "adamw", "lars", "lamb"]
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)  # sgd, lars
    nesterov: bool = False  # sgd
    betas: tuple[float, float] = (0.9, 0.999)  # adam, adamw, lamb
    eps: float = Field(1e-8, gt=0)
    trust: float = Field(1e-3, gt=0)  # lars: the trust coefficient

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> OptimizerSpec:
        _refuse_unused(self, _OPTIMIZERS[self.name].options)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum, e.g. {name: sgd, lr: 0.1, momentum: 0.9, nesterov: true}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas should be at least 0 and less than 1, got {self.betas}")
        return self

    @property
    def state_tensors(self) -> int:
        """Number of tensors kept for a parameter, each of the parameter's shape and type."""
        return 0 if self.name == "sgd" and not self.momentum else _OPTIMIZERS[self.name].state_tensors

    @property
    def further_state_bytes(self) -> int:
        """Bytes kept for a parameter besides `state_tensors`."""
        return _OPTIMIZERS[self.name].further_state_bytes

    def build(self, parameters: Iterable[torch.nn.Parameter], *, fused: bool = False) -> torch.optim.Optimizer:
        """Build the optimizer of a model's trainable parameters.

        Weight decay applies to all of them, except with LARS and LAMB.

        Args:
            fused: use torch's fused step if torch has one for these parameters' device and dtype.

        Raises:
            JobError: no parameter is trainable.
        """
        parameters = [p for p in parameters if p.requires_grad]
        if not parameters:
            raise JobError("the model has no parameters to train: none has requires_grad")
        kind = _OPTIMIZERS[self.name]
        options = {option: getattr(self, option) for option in kind.options}
        if kind.path.startswith("torch."):
            from paceline.device import has_fused_optimizers

            has_fused = all(p.is_floating_point() and has_fused_optimizers(p.device.type) for p in parameters)
            options["fused"] = True if fused and has_fused else None
        optimizer: torch.optim.Optimizer = resolve_name(kind.path)(parameters, **options)
        return optimizer


class _Optimizer(NamedTuple):
    """Class of an optimizer, its options, and the state that it keeps for a parameter."""

    path: str
    options: tuple[str, ...]
    state_tensors: int
    further_state_bytes: int = 0


_COMMON = ("lr", "weight_decay")
_ADAM = (*_COMMON, "betas", "eps")
_STEP_BYTES = 4  # Adam's step counter, a float32
_OPTIMIZERS = {
    "sgd": _Optimizer("torch.optim:SGD", (*_COMMON, "momentum", "nesterov"), 1),
    "adam": _Optimizer("torch.optim:Adam", _ADAM, 2, _STEP_BYTES),
    "adamw": _Optimizer("torch.optim:AdamW", _ADAM, 2, _STEP_BYTES),
    "lars": _Optimizer("paceline.job.zoo.optimizers:LARS", (*_COMMON, "momentum", "trust"), 1),
    "lamb": _Optimizer("paceline.job.zoo.optimizers:LAMB", _ADAM, 2, _STEP_BYTES),
}


class ScheduleSpec(Spec):
    """Learning-rate schedule: linear warm-up, then `constant`, `linear`, `cosine` or `step` decay.

    `decay_steps` is the step at which the decay ends; without it, the job's stop rule must name steps or epochs.
    """

    short: ClassVar[str | None] = "name"
    name: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int | None = Field(None, ge=1)
    final: float = Field(0.0, ge=0, le=1)  # the rate at the end, as a share of the first
    milestones: tuple[int, ...] = ()  # step: the steps at which the rate is multiplied by `factor`
    factor: float = Field(0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> ScheduleSpec:
        if (self.name == "step") != bool(self.milestones):
            raise ValueError(
                "the step schedule (and no other) needs milestones, e.g. {name: step, milestones: [300, 600]}"
            )
        _refuse_unused(self, _SCHEDULE_KEYS[self.name])
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"the decay should end after the warm-up of {self.warmup_steps} steps, but decay_steps is "
                f"{self.decay_steps}"
            )
        return self

    def factor_at(self, step: int, total_steps: int | None) -> float:
        """The learning rate at optimizer step `step` (0-based) as a share of the optimizer's `lr`.

        Warm-up rises by equal amounts and is at 1 in its last step; the decay starts after it and is at `final` from
        its end on. `total_steps` is what the stop rule allows at most; used where `decay_steps` is not given.

        Raises:
            JobError: the decay has no end, for neither `decay_steps` nor `total_steps` is known.
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
                f"schedule {self.name} does not know where the decay ends: give schedule.decay_steps, or "
                "stop.epochs or stop.steps"
            )
        progress = min(1.0, (step - self.warmup_steps) / max(1, end - self.warmup_steps))
        remaining = 1 - progress if self.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final + (1 - self.final) * remaining


_SCHEDULE_KEYS = {
    "constant": ("warmup_steps",),
    "linear": ("warmup_steps", "decay_steps", "final"),
    "cosine": ("warmup_steps", "decay_steps", "final"),
    "step": ("warmup_steps", "milestones", "factor"),
}


def _refuse_unused(spec: OptimizerSpec | ScheduleSpec, keys: tuple[str, ...]) -> None:
    """Refuse a key that the chosen kind ignores, which is most likely a mistake."""
    unused = [key for key in spec.model_dump(exclude_defaults=True) if key not in ("name", *keys)]
    if unused:
        raise ValueError(f"{spec.name} has no {' or '.join(unused)}; it takes {', '.join(keys)}")
