"""The common base of a job's parts: strict keys, frozen values, and one-word short forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails

from paceline.errors import JobError
from paceline.extensions import ExtensionPoint

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


@dataclass(frozen=True)
class JobSection:
    """A section of a job.

    Attributes:
        spec: class with the keys of the section as fields.
    """

    spec: type[Spec]


SECTIONS = ExtensionPoint[JobSection]("section of a job", "paceline.job_sections", JobSection, {}, JobError)


def read_sections(
    values: Mapping[str, Any], own: Mapping[str, object], context: Any
) -> tuple[dict[str, Any], list[ErrorDetails]]:
    """Validate the sections of other packages.

    Args:
        values: the job as read from its file.
        own: the job's own keys, which are left as they are.
        context: pydantic's validation context.

    Returns:
        The values with each valid section as an instance of its spec, without the invalid sections; and the errors of
        the invalid sections.
    """
    whole = dict(values)
    errors: list[ErrorDetails] = []
    for key in [key for key in values if key not in own]:
        value = whole.pop(key)
        if not isinstance(key, str) or key not in SECTIONS:
            errors.append({"type": "extra_forbidden", "loc": (str(key),), "input": value, "msg": "unknown key"})
        elif value is not None:
            try:
                whole[key] = SECTIONS[key].spec.model_validate(value, context=context)
            except ValidationError as error:
                errors += [{**one, "loc": (key, *one["loc"])} for one in error.errors(include_url=False)]
    return whole, errors


def with_sections(job: type[BaseModel]) -> type[BaseModel]:
    """Return a class of jobs with the sections as fields, for messages about keys."""
    fields: dict[str, Any] = {name: (section.spec | None, None) for name, section in SECTIONS.loadable()[0].items()}
    return create_model(job.__name__, __base__=job, **fields)
