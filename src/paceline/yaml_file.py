"""Reader of YAML files that remembers lines, and messages about the mistakes in them."""

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

from paceline.errors import PacelineError
from paceline.text import closest, nearest


@dataclass(frozen=True)
class FileKind:
    """Kind of YAML file, for messages.

    Attributes:
        name: `job`.
        needs: the keys that it cannot do without, as text.
        example: a key with its value, in backticks.
        error: class of its errors.
    """

    name: str
    needs: str
    example: str
    error: type[PacelineError]


def read_yaml(file: Path, kind: FileKind) -> tuple[dict[Any, Any], YamlPositions]:
    """Read the keys and values of a file, and where they stand.

    Raises:
        PacelineError: of the kind's class; the file cannot be read, is not YAML, or not a mapping. Names the line.
    """
    return _parse(_read_text(file, kind), file, kind)


def parse_value(text: str) -> Any:
    """Read one YAML value: a scalar, a list or a map.

    Raises:
        ValueError: the text is not YAML; says what is wrong.
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
    """Plain values as YAML that `read_yaml` reads back to equal ones.

    With `flow`, the innermost lists and mappings are on one line each.
    """
    style: dict[str, Any] = {"default_flow_style": None, "width": 140, "allow_unicode": True} if flow else {}
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, **style)
    return text


class Positions(Protocol):
    """Finds the place of a key, for messages."""

    def place(self, path: KeyPath) -> tuple[int, str]:
        """Line of a key (0 without one), and its place as text."""


@dataclass(frozen=True)
class YamlPositions:
    """Finds the line of a key in a parsed YAML file."""

    file: Path
    root: yaml.MappingNode

    def place(self, path: KeyPath) -> tuple[int, str]:
        """Position of the deepest existing key on `path`: `(line, "examples/digits.yaml, line 7")`; line 0 for none."""
        line = 0
        node: yaml.Node = self.root
        for part in path:
            below = _child(node, part)
            if below is None:
                break
            line, node = below
        return line, f"{self.file}, line {line}" if line else str(self.file)


class _Loader(yaml.SafeLoader):
    """YAML's safe types; `1e-3` is a number, as in YAML 1.2 (PyYAML wants `1.0e-3`)."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _read_text(file: Path, kind: FileKind) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise kind.error(f"{file}: no such file") from None
    except IsADirectoryError:
        raise kind.error(f"{file} is a folder; name the {kind.name}'s YAML file in it") from None
    except UnicodeDecodeError as error:
        raise kind.error(f"{file} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}") from None
    except OSError as error:
        raise kind.error(f"{file} cannot be read: {error.strerror}") from None


def _parse(text: str, file: Path, kind: FileKind) -> tuple[dict[Any, Any], YamlPositions]:
    try:
        if file.suffix == ".py":
            raise kind.error(
                f"{file} is a Python file, but this command reads a {kind.name} in YAML, such as {kind.example}. Run a "
                f"script by `python {file}`; a {kind.name} names its functions as {file.name}:NAME"
            )
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise kind.error(f"{file} is empty; a {kind.name} needs at least {kind.needs}")
        if not isinstance(root, yaml.MappingNode):
            found = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            wanted = f"a {kind.name} is a group of keys with values, such as {kind.example}"
            raise kind.error(f"{file}, line {_line(root)}: {wanted}, not {found}")
        if repeated := [
            f'{file}, line {_line(key)}: the key "{key.value}" is there already, in line {_line(first)}'
            for key, first in _repeated_keys(root, set())
        ]:
            raise kind.error("\n".join(repeated))
        return loader.construct_document(root), YamlPositions(file, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise kind.error(f"{file}{place}: this is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML does not allow; a date that does not exist
        raise kind.error(f"{file}: this is not valid YAML: {' '.join(str(error).split())}") from None


def _repeated_keys(node: yaml.Node, seen: set[int]) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Each key that is there twice, with the first of them.

    YAML forbids a key twice; PyYAML keeps the last one without a word.
    """
    if id(node) in seen:  # an alias of what was looked at already
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
        for key, value in reversed(node.value):  # a key of one's own comes after those that `<<` merged in
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

    def dotted(self, path: KeyPath) -> str:
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


def _finding(details: ErrorDetails, path: KeyPath, owner: type[BaseModel] | None, about: _File) -> str:
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
            for part in specs_of(about.spec.model_fields[str(path[-1])].annotation)
            for tag in get_args(part.model_fields["kind"].annotation)
        ]
        return f'{about.dotted(path)} needs the key "kind". {nearest("", kinds)}'
    if kind == "value_error":
        return f"{about.dotted(path)}: {wrong_value(details)}" if path else wrong_value(details)
    return f"{about.dotted(path)} {wrong_value(details)}"


def _unknown_key(path: KeyPath, owner: type[BaseModel] | None, about: _File) -> str:
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
        if any(key in part.model_fields for part in specs_of(field.annotation))
    ]


class _Step(NamedTuple):
    """A type on the way down a location.

    `internal`: pydantic's next entry there is its own (the member of a union) and no key.
    """

    members: Sequence[Any]
    internal: bool


def _named(location: KeyPath, spec: type[BaseModel]) -> tuple[KeyPath, type[BaseModel] | None]:
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


def annotation_below(annotation: Any, part: str | int) -> Any:
    """Annotation of the value under a key or index; None if unknown."""
    return next((found for member in _step(annotation).members if (found := _below(member, part)[1])), None)


def specs_of(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that a value with this annotation may be."""
    return [m for m in _step(annotation).members if _is_spec(m)]


def _is_spec(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
