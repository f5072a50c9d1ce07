"""Messages for pydantic's findings: the key, what is wrong with it, and the probable intention."""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue
from pydantic_core import ErrorDetails

from paceline.nearest import closest, nearest

Path: TypeAlias = tuple[str | int, ...]  # keys and list indices, from the top of the file down
# with the spec that has, or lacks, the path's last key
_Located: TypeAlias = tuple[Path, type[BaseModel] | None, ErrorDetails]


class Positions(Protocol):
    """Line numbers of a file's keys, for the start of each message."""

    def place(self, path: Path) -> tuple[int, str]:
        """Position of the deepest existing key on `path`: `(line, "examples/digits.yaml, line 7")`; line 0 for none."""


def explain(
    errors: Sequence[ErrorDetails],
    spec: type[BaseModel],
    positions: Positions | None = None,
    *,
    name: str,
    hints: Mapping[str, str] = {},
) -> str:
    """All findings of a ValidationError's `errors()`, one per line, in the order of the file.

    Each starts with its place if `positions` are given.

    Args:
        spec: model of the whole file.
        name: of what the file describes: `job`.
        hints: what to do about some unknown keys.
    """
    about = _File(spec, name, hints)
    findings: dict[str, int] = {}
    located: list[_Located] = [(*_named(details["loc"], spec), details) for details in errors]
    for path, group in itertools.groupby(_without_misspelled(located), key=lambda entry: entry[0]):
        line, place = positions.place(path) if positions else (0, "")
        entries = list(group)  # several where a value may be of several types and is of none
        wanted = [_WANTED[details["type"]] for _, _, details in entries if details["type"] in _WANTED]
        if len(wanted) == len(entries):
            text = f"{about.dotted(path)} should be {' or '.join(wanted)}, got {_shown(entries[0][2]['input'])}"
        else:
            text = "\n".join(_finding(details, path, owner, about) for _, owner, details in entries)
        findings[f"{place}: {text}" if place else text] = line
    return "\n".join(sorted(findings, key=lambda text: findings[text]))


@dataclass(frozen=True)
class _File:
    """The file whose mistakes are told."""

    spec: type[BaseModel]
    name: str
    hints: Mapping[str, str]

    def dotted(self, path: Path) -> str:
        """The path as text: `hosts[0].cores`; `the job` for its top."""
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        return text.removeprefix(".") or f"the {self.name}"


def wrong_value(details: ErrorDetails) -> str:
    """Expected and actual value as text: `should be a whole number, got 'abc'`."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        return f"should be one of {', '.join(choices)}, got {value!r}" + (
            f". {nearest(value, choices)}" if isinstance(value, str) else ""
        )
    wanted = _WANTED.get(kind) or details["msg"].removeprefix("Input should be ").replace("or equal to ", "")
    return f"should be {_BOUNDS.get(kind, wanted).format(**context)}, got {_shown(value)}"


_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "more than {gt}",
    "less_than": "less than {lt}",
}
_WANTED = (
    dict.fromkeys(("int_parsing", "int_type", "int_from_float", "int_parsing_size"), "a whole number")
    | dict.fromkeys(("float_parsing", "float_type"), "a number")
    | dict.fromkeys(("bool_parsing", "bool_type"), "true or false")
    | dict.fromkeys(("tuple_type", "list_type"), "a list")
    | dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a group of keys with values")
    | {
        "string_type": "text",
        "path_type": "a path",
        "finite_number": "a finite number",
        "string_pattern_mismatch": "letters, digits, dots, dashes and underscores only",
        "invalid-json-value": "text, a number, true, false, null, or a list or group of such",
        "too_long": "a shorter list",
        "recursion_loop": "without a reference to itself",
    }
)


def _without_misspelled(located: list[_Located]) -> list[_Located]:
    """The findings without missing keys that are there under a misspelled name.

    The misspelled name has a finding of its own.
    """
    meant = {
        (*path[:-1], closest(str(path[-1]), owner.model_fields))
        for path, owner, details in located
        if owner and details["type"] == "extra_forbidden"
    }
    return [entry for entry in located if entry[2]["type"] != "missing" or entry[0] not in meant]


def _finding(details: ErrorDetails, path: Path, owner: type[BaseModel] | None, about: _File) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown_key(path, owner, about)
    if kind == "missing":
        last = path[-1]
        if isinstance(last, int):
            return f"{about.dotted(path[:-1])} has too few entries"
        return f'{about.dotted(path[:-1])} needs the key "{last}"'
    if kind == "union_tag_invalid":
        kinds = [k.strip("'") for k in context["expected_tags"].split(", ")]
        return f'{about.dotted(path)} has no kind "{context["tag"]}". {nearest(context["tag"], kinds)}'
    if kind == "union_tag_not_found":
        kinds = [
            tag
            for part in _specs(about.spec.model_fields[str(path[-1])].annotation)
            for tag in get_args(part.model_fields["kind"].annotation)
        ]
        return f'{about.dotted(path)} needs the key "kind". {nearest("", kinds)}'
    if kind == "value_error":
        return f"{about.dotted(path)}: {wrong_value(details)}" if path else wrong_value(details)
    return f"{about.dotted(path)} {wrong_value(details)}"


def _unknown_key(path: Path, owner: type[BaseModel] | None, about: _File) -> str:
    key, known = str(path[-1]), list(owner.model_fields) if owner else []
    text = f'unknown key "{key}" in {about.dotted(path[:-1])}. '
    if key in about.hints:
        return text + about.hints[key]
    if key != "name":  # which several parts have
        homes = [f'under "{section}"' for section in _sections_with(key, about.spec) if section != path[0]]
        if key in about.spec.model_fields:
            homes.append(f"at the top of the {about.name}")
        if homes:
            return f"{text}It belongs {' or '.join(homes)}."
    return text + nearest(key, known)


def _sections_with(key: str, spec: type[BaseModel]) -> list[str]:
    return [
        name
        for name, field in spec.model_fields.items()
        if any(key in part.model_fields for part in _specs(field.annotation))
    ]


class _Step(NamedTuple):
    """A type on the way down a location.

    `internal`: pydantic's next entry there is its own (the member of a union) and no key.
    """

    members: Sequence[Any]
    internal: bool


def _named(location: Path, spec: type[BaseModel]) -> tuple[Path, type[BaseModel] | None]:
    """The keys of pydantic's `location` and the spec that has (or lacks) the last one.

    Pydantic's own entries are left out.
    """
    path: list[str | int] = []
    annotation: Any = spec
    owner: type[BaseModel] | None = spec
    for part in location:
        step = _step(annotation)
        if step.internal:
            annotation = _member(step.members, str(part))
            continue
        if part == "[key]":
            continue
        owner, annotation = _below(step.members[0] if step.members else None, part)
        path.append(part)
    return tuple(path), owner


def _step(annotation: Any) -> _Step:
    if annotation is JsonValue:
        return _Step((dict[str, JsonValue],), internal=True)
    if get_origin(annotation) is Annotated:
        return _step(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [m for m in get_args(annotation) if m is not types.NoneType]
        return _Step(members, internal=len(members) > 1)
    return _Step((annotation,), internal=False)


def _member(members: Sequence[Any], tag: str) -> Any:
    """The member of a union that `tag` stands for.

    A spec is known by its kind, anything else by being the only one that can hold more.
    """
    for member in members:
        if _is_spec(member):
            if tag in get_args(member.model_fields["kind"].annotation):
                return member
        elif get_origin(member) is not None:
            return member
    return None


def _below(annotation: Any, part: str | int) -> tuple[type[BaseModel] | None, Any]:
    """The spec that `annotation` is (if any), and the annotation of the value under its key `part`."""
    if _is_spec(annotation):
        field = annotation.model_fields.get(str(part))
        return annotation, field.annotation if field else None
    values = [a for a in get_args(annotation) if a is not Ellipsis]
    return None, values[-1] if values and get_origin(annotation) is not Literal else None


def _specs(annotation: Any) -> list[type[BaseModel]]:
    return [m for m in _step(annotation).members if _is_spec(m)]


def _is_spec(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
