"""The adapter of a job: small trained layers beside the frozen layers of the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from paceline.errors import InvalidValue
from paceline.job.parameters import Patterns
from paceline.job.spec import Spec

ALL_LINEAR: Literal["all-linear"] = "all-linear"


class LoraSpec(Spec):
    """Low-rank adapters (LoRA, arXiv:2106.09685), created by the library `peft`.

    A layer with the weight W computes with W + alpha / r · B A instead. Only A, of r rows, and B, of r columns, are
    trained. `targets` are patterns of the names of layers; `all-linear` means all linear layers except the output head.
    `dropout` is the dropout probability of the adapters' inputs. With `dora` (arXiv:2402.09353), the norms of the
    adapted weight's rows are trained, too. `train` are patterns of parameters that are trained directly, such as a new
    classification head.
    """

    r: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: Patterns = (ALL_LINEAR,)
    dropout: float = Field(0.0, ge=0, lt=1)
    dora: bool = False
    train: Patterns = ()

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or (ALL_LINEAR in value and len(value) > 1):
            raise InvalidValue(
                "adapter.targets_ambiguous",
                "targets must be {all_linear}, or patterns of the names of layers, such as [q_proj, v_proj]",
                all_linear=ALL_LINEAR,
            )
        return value


class AdapterSpec(Spec):
    """The adapter of a job, such as `{lora: {r: 16, alpha: 32}}`."""

    lora: LoraSpec

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: object) -> object:
        """Let `adapter: lora` and `adapter: {lora: }` mean the defaults."""
        value = {value: None} if isinstance(value, str) else value
        return {k: {} if v is None else v for k, v in value.items()} if isinstance(value, dict) else value
