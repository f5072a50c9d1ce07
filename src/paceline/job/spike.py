"""Policy of a job for spikes of the training loss."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.job.spec import Spec


class SpikeSpec(Spec):
    """`spike: rewind`, or `{policy: skip, threshold: 6, window: 100}`.

    A loss is a spike beyond the median of the last `window` losses plus `threshold` times their spread.
    """

    short: ClassVar[str | None] = "policy"
    policy: Literal["off", "skip", "rewind"] = "off"
    threshold: float = Field(10.0, gt=0)  # standard deviations, by the median absolute deviation
    window: int = Field(50, ge=10)  # steps; no spike before so many

    @model_validator(mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        """`off` as YAML reads it: false."""
        if isinstance(value, dict):
            return value | {"policy": "off"} if value.get("policy") is False else value
        return {"policy": "off"} if value is False else value
