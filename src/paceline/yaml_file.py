"""Reader of YAML files that records line numbers, and messages for mistakes in the files."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, JsonValue
from pydantic_core import ErrorDetails

from paceline.errors import InvalidValue, PacelineError, Problem
from paceline.text import closest, nearest


@dataclass(frozen=True)
class FileKind:
    """Type of a YAML file, for messages.

    Attributes:
        name: name of the kind, such as `job`.
        needs: the required keys, as text.
        example: example of a key with its value, in backticks.
        error: class of the errors for files of this kind.
    """

    name: str
    needs: str
    example: str
    error: type[PacelineError]


def read_yaml(file: Path, kind: FileKind) -> tuple[dict[Any, Any], YamlPositions]:
    """Read the keys and values of a file, and their positions.

    Raises:
        PacelineError: the file cannot be read, is not YAML, or is not a mapping. The class is `kind.error`, and the
            message names the line.
    """
    return _parse(_read_text(file, kind), file, kind)


def parse_value(text: str) -> Any:
    """Read one YAML value: a scalar, a list or a map.

    Raises:
        ValueError: the text is not YAML; the message explains the error.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None and (repeated := next(_repeated_keys(root, set()), None)):
            raise ValueError(f'it has the key "{repeated[0].value}" twice')
        return None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise ValueError(error.problem or error.context) from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ValueError(" ".join(str(error).split())) from None


def to_yaml(values: dict[str, Any], *, flow: bool = False) -> str:
    """Convert plain values to YAML that `read_yaml` reads back unchanged.

    With `flow`, the innermost lists and mappings are on one line each.
    """
    style: dict[str, Any] = {"default_flow_style": None, "width": 140, "allow_unicode": True} if flow else {}
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, **style)
    return text


class Positions(Protocol):
    """Positions of keys, for messages."""

    def place(self, path: KeyPath) -> tuple[int, str]:
        """Return the line number of a key (0 if unknown), and its position as text."""


@dataclass(frozen=True)
class YamlPositions:
    """Positions of keys in a parsed YAML file."""

    file: Path
    root: yaml.MappingNode

    def place(self, path: KeyPath) -> tuple[int, str]:
        """Return the position of the deepest existing key on `path`.

        The result is `(line, "examples/digits.yaml, line 7")`. The line is 0 if no key of `path` exists.
        """
        line = 0
        node: yaml.Node = self.root
        for part in path:
            below = _child(node, part)
            if below is None:
                break
            line, node = below
        return line, f"{self.file}, line {line}" if line else str(self.file)


class _Loader(yaml.SafeLoader):
    """Safe loader that reads `1e-3` as a number, as in YAML 1.2 (PyYAML requires `1.0e-3`)."""


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes text that `_Loader` would read as a number."""


_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _read_text(file: Path, kind: FileKind) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise kind.error("file.absent", "{file}: no such file", file=file) from None
    except IsADirectoryError:
        raise kind.error(
            "file.is_a_folder",
            "{file} is a folder. Name the YAML file of the {kind} in this folder.",
            file=file,
            kind=kind.name,
        ) from None
    except UnicodeDecodeError as error:
        raise kind.error(
            "file.not_utf8",
            "{file} is not UTF-8 text: byte {start} is 0x{byte:02x}",
            file=file,
            start=error.start,
            byte=error.object[error.start],
        ) from None
    except OSError as error:
        raise kind.error(
            "file.unreadable", "{file} cannot be read: {reason}", file=file, reason=error.strerror
        ) from None


def _parse(text: str, file: Path, kind: FileKind) -> tuple[dict[Any, Any], YamlPositions]:
    try:
        if file.suffix == ".py":
            raise kind.error(
                "file.python",
                "{file} is a Python file, but this command reads a {kind} in YAML, such as {example}. Run a script "
                "with `python {file}`. A {kind} refers to functions of this file as {name}:NAME.",
                file=file,
                kind=kind.name,
                example=kind.example,
                name=file.name,
            )
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise kind.error(
                "file.empty",
                "{file} is empty. A {kind} needs at least {needs}.",
                file=file,
                kind=kind.name,
                needs=kind.needs,
            )
        if not isinstance(root, yaml.MappingNode):
            found = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            wanted = f"a {kind.name} is a group of keys with values, such as {kind.example}"
            raise kind.error(
                "file.not_a_mapping",
                "{file}, line {line}: {wanted}, not {found}",
                file=file,
                line=_line(root),
                wanted=wanted,
                found=found,
            )
        if repeated := [
            Problem(
                "file.key_repeated",
                '{file}, line {line}: the key "{key}" already appears in line {first}',
                file=file,
                line=_line(key),
                key=key.value,
                first=_line(first),
            )
            for key, first in _repeated_keys(root, set())
        ]:
            raise kind.error.of_problems(repeated)
        return loader.construct_document(root), YamlPositions(file, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise kind.error(
            "file.not_yaml",
            "{file}{place}: this is not valid YAML: {problem}",
            file=file,
            place=place,
            problem=error.problem or error.context,
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML does not allow; a date that does not exist
        raise kind.error(
            "file.not_yaml_value",
            "{file}: this is not valid YAML: {reason}",
            file=file,
            reason=" ".join(str(error).split()),
        ) from None


def _repeated_keys(node: yaml.Node, seen: set[int]) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Find each duplicate key, with its first occurrence.

    YAML forbids duplicate keys, but PyYAML silently keeps the last one.
    """
    if id(node) in seen:  # an alias of a node that was already visited
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item, seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, yaml.ScalarNode] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                yield key, first[key.value]
            yield from _repeated_keys(value, seen)


def _child(node: yaml.Node, part: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return _line(node.value[part]), node.value[part]
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):  # the mapping's own keys follow those that `<<` has merged
            if key.value == str(part):
                return _line(key), value
    return None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


KeyPath: TypeAlias = tuple[str | int, ...]  # keys and list indices, from the top of the file down
# with the spec that has, or lacks, the path's last key
_Located: TypeAlias = tuple[KeyPath, type[BaseModel] | None, ErrorDetails]


def explain(
    errors: Sequence[ErrorDetails],
    spec: type[BaseModel],
    positions: Positions | None = None,
    *,
    name: str,
    hints: Mapping[str, str] = {},
) -> list[Problem]:
    """Explain all errors of a ValidationError, in the order of the file.

    If `positions` is given, each problem starts with its position.

    Args:
        spec: pydantic model of the whole file.
        name: what the file describes, such as `job`.
        hints: advice for some unknown keys, by key.
    """
    about = _File(spec, name, hints)
    findings: dict[Problem, int] = {}
    located: list[_Located] = [(*_named(details["loc"], spec), details) for details in errors]
    for path, group in itertools.groupby(_without_misspelled(located), key=lambda entry: entry[0]):
        line, place = positions.place(path) if positions else (0, "")
        entries = list(group)  # several errors if a value may have several types but has none of them
        wanted = [_WANTED[details["type"]] for _, _, details in entries if details["type"] in _WANTED]
        if len(wanted) == len(entries):
            found = [_wrong_type(about.dotted(path), " or ".join(wanted), entries[0][2]["input"])]
        else:
            found = [_finding(details, path, owner, about) for _, owner, details in entries]
        findings.update(dict.fromkeys((problem.at(place) if place else problem for problem in found), line))
    return sorted(findings, key=lambda problem: findings[problem])


@dataclass(frozen=True)
class _File:
    """The file whose mistakes are reported."""

    spec: type[BaseModel]
    name: str
    hints: Mapping[str, str]

    def dotted(self, path: KeyPath) -> str:
        """Format a key path, such as `hosts[0].cores`; an empty path is `the job`."""
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        return text.removeprefix(".") or f"the {self.name}"


def wrong_value(key: str, details: ErrorDetails) -> Problem:
    """Explain the wrong value of a key: `lr should be a number, got 'abc'`."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "value_error":
        if isinstance(error := context["error"], InvalidValue):
            return error.problems[0].at(key) if key else error.problems[0]
        return Problem("file.value_refused", "{key}{reason}", key=f"{key}: " if key else "", reason=error)
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        return Problem(
            "file.choice_unknown",
            "{key} should be one of {choices}, got {value!r}{hint}",
            key=key,
            choices=choices,
            value=value,
            hint=f". {nearest(value, choices)}" if isinstance(value, str) else "",
        )
    if kind in _BOUNDS:
        bound = _BOUNDS[kind].format(**context)
        return Problem(
            "file.value_out_of_range",
            "{key} should be {bound}, got {value}",
            key=key,
            bound=bound,
            value=_shown(value),
        )
    wanted = _WANTED.get(kind) or details["msg"].removeprefix("Input should be ").replace("or equal to ", "")
    return _wrong_type(key, wanted, value)


def _wrong_type(key: str, wanted: str, value: Any) -> Problem:
    return Problem(
        "file.wrong_type", "{key} should be {wanted}, got {value}", key=key, wanted=wanted, value=_shown(value)
    )


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
    """Drop findings about missing keys that are present under a misspelled name.

    The misspelled name has a finding of its own.
    """
    meant = {
        (*path[:-1], closest(str(path[-1]), owner.model_fields))
        for path, owner, details in located
        if owner and details["type"] == "extra_forbidden"
    }
    return [entry for entry in located if entry[2]["type"] != "missing" or entry[0] not in meant]


def _finding(details: ErrorDetails, path: KeyPath, owner: type[BaseModel] | None, about: _File) -> Problem:
    kind, context = details["type"], details.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown_key(path, owner, about)
    if kind == "missing":
        last, above = path[-1], about.dotted(path[:-1])
        if isinstance(last, int):
            return Problem("file.too_few_entries", "{key} has too few entries", key=above)
        return Problem("file.missing_key", '{above} needs the key "{key}"', above=above, key=last)
    if kind == "union_tag_invalid":
        kinds = [k.strip("'") for k in context["expected_tags"].split(", ")]
        return Problem(
            "file.unknown_kind",
            '{key} has no kind "{kind}". {hint}',
            key=about.dotted(path),
            kind=context["tag"],
            hint=nearest(context["tag"], kinds),
        )
    if kind == "union_tag_not_found":
        kinds = [
            tag
            for part in specs_of(about.spec.model_fields[str(path[-1])].annotation)
            for tag in get_args(part.model_fields["kind"].annotation)
        ]
        return Problem(
            "file.missing_kind", '{key} needs the key "kind". {hint}', key=about.dotted(path), hint=nearest("", kinds)
        )
    return wrong_value("" if kind == "value_error" and not path else about.dotted(path), details)


def _unknown_key(path: KeyPath, owner: type[BaseModel] | None, about: _File) -> Problem:
    key, known = str(path[-1]), list(owner.model_fields) if owner else []
    return Problem(
        "file.unknown_key",
        'unknown key "{key}" in {above}. {hint}',
        key=key,
        above=about.dotted(path[:-1]),
        hint=_hint(key, path, known, about),
    )


def _hint(key: str, path: KeyPath, known: list[str], about: _File) -> str:
    if key in about.hints:
        return about.hints[key]
    if key != "name":  # several parts have a key `name`
        homes = [f'under "{section}"' for section in _sections_with(key, about.spec) if section != path[0]]
        if key in about.spec.model_fields:
            homes.append(f"at the top of the {about.name}")
        if homes:
            return f"It belongs {' or '.join(homes)}."
    return nearest(key, known)


def _sections_with(key: str, spec: type[BaseModel]) -> list[str]:
    return [
        name
        for name, field in spec.model_fields.items()
        if any(key in part.model_fields for part in specs_of(field.annotation))
    ]


class _Step(NamedTuple):
    """Type at one level of a pydantic error location.

    `internal` is True if the next entry of the location names the member of a union and is no key.
    """

    members: Sequence[Any]
    internal: bool


def _named(location: KeyPath, spec: type[BaseModel]) -> tuple[KeyPath, type[BaseModel] | None]:
    """Return the keys of pydantic's `location` and the spec of the last one.

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
    """Return the member of a union that `tag` identifies.

    A spec is identified by its kind. Among other members, the first one with further levels, such as a list, is chosen.
    """
    for member in members:
        if _is_spec(member):
            if tag in get_args(member.model_fields["kind"].annotation):
                return member
        elif get_origin(member) is not None:
            return member
    return None


def _below(annotation: Any, part: str | int) -> tuple[type[BaseModel] | None, Any]:
    """Return the spec in `annotation`, and the annotation of its key `part`."""
    if _is_spec(annotation):
        field = annotation.model_fields.get(str(part))
        return annotation, field.annotation if field else None
    values = [a for a in get_args(annotation) if a is not Ellipsis]
    return None, values[-1] if values and get_origin(annotation) is not Literal else None


def annotation_below(annotation: Any, part: str | int) -> Any:
    """Return the annotation of the value under a key or index; None if unknown."""
    return next((found for member in _step(annotation).members if (found := _below(member, part)[1])), None)


def specs_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models that a value with this annotation may be."""
    return [m for m in _step(annotation).members if _is_spec(m)]


def _is_spec(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
