"""The shape that every part of a job shares: strict keys, frozen values, and a short form where one word is enough."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Spec(BaseModel):
    """A part of a job. Unknown keys are errors; values do not change after they were read.

    `short` names the field that a bare string stands for: `optimizer: adamw` is `optimizer: {name: adamw}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    short: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {cls.short: value} if cls.short and isinstance(value, str) else value
