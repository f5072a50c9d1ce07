"""The common base of a job's parts: strict keys, frozen values, and one-word short forms."""

from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, model_validator

# keywords for a user's or a built-in object: plain values, for a job is also a file
Args: TypeAlias = dict[str, JsonValue]


class Spec(BaseModel):
    """A part of a job. Unknown keys are errors; values do not change after they were read.

    `short` names the field that a bare string stands for: `optimizer: adamw` is `optimizer: {name: adamw}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    short: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {cls.short: value} if cls.short and isinstance(value, str) else value
