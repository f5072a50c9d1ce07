"""Reader of YAML files that remembers the line of every key, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import PacelineError


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


def to_yaml(values: dict[str, Any], *, flow: bool = False) -> str:
    """Plain values as YAML that `read_yaml` reads back to equal ones.

    With `flow`, the innermost lists and mappings are on one line each.
    """
    style: dict[str, Any] = {"default_flow_style": None, "width": 140, "allow_unicode": True} if flow else {}
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, **style)
    return text


@dataclass(frozen=True)
class YamlPositions:
    """Finds the line of a key in a parsed YAML file."""

    file: Path
    root: yaml.MappingNode

    def place(self, path: tuple[str | int, ...]) -> tuple[int, str]:
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
        if repeated := "\n".join(f"{file}, {finding}" for finding in _repeated_keys(root, set())):
            raise kind.error(repeated)
        return loader.construct_document(root), YamlPositions(file, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise kind.error(f"{file}{place}: this is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML does not allow; a date that does not exist
        raise kind.error(f"{file}: this is not valid YAML: {' '.join(str(error).split())}") from None


def _repeated_keys(node: yaml.Node, seen: set[int]) -> Iterator[str]:
    """YAML forbids a key twice; PyYAML keeps the last one without a word."""
    if id(node) in seen:  # an alias of what was looked at already
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item, seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                yield f'line {_line(key)}: the key "{key.value}" is there already, in line {_line(first[key.value])}'
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
