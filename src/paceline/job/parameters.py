"""Selection of a model's parameters by name patterns, for parameter groups and frozen layers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from paceline.errors import JobError

if TYPE_CHECKING:
    from torch import nn


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# `bias`, or `[bias, "*norm*"]`
Patterns: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_listed)]
# for each parameter's name in a checkpoint, all names of the parameter; tied parameters have several
Names: TypeAlias = Mapping[str, Sequence[str]]


def matching(key: str, patterns: Iterable[str], names: Names) -> list[str]:
    """Return the names of the parameters that at least one pattern matches.

    A plain pattern (`bias`, `encoder.norm`) matches one or more whole components of a dotted name. A pattern with
    `*`, `?` or `[` matches the whole name or one component.

    Args:
        key: the job's key with the patterns, for the error.

    Raises:
        JobError: a pattern matches no parameter; the message names similar parameters.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        own = [name for name, aliases in names.items() if any(_matches(pattern, alias) for alias in aliases)]
        if not own:
            raise JobError(
                "job.pattern_unmatched",
                '{key}: no parameter of the model matches "{pattern}". {hint}',
                key=key,
                pattern=pattern,
                hint=_like(pattern, names),
            )
        found |= dict.fromkeys(own)
    return [name for name in names if name in found]


def names_of(model: nn.Module) -> Names:
    """Return all names of each parameter of an undivided model."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}


def _matches(pattern: str, name: str) -> bool:
    if any(letter in pattern for letter in "*?["):
        return fnmatchcase(name, pattern) or any(fnmatchcase(part, pattern) for part in name.split("."))
    return f".{pattern}." in f".{name}."


def _like(pattern: str, names: Names) -> str:
    """Return parameter names similar to the pattern, or the first names if none is similar."""
    plain = pattern.strip("*.")
    inside = [name for name in names if plain and plain.lower() in name.lower()]
    parts = dict.fromkeys(part for name in names for part in (name, *name.split(".")))
    close = inside or difflib.get_close_matches(plain, parts, n=3)
    if inside:
        return f'Names with "{plain}" in them: {_few(inside)}: "*{plain}*" matches them.'
    return f"Did you mean {_few(close)}?" if close else f"Its parameters are {_few(list(names))}."


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
