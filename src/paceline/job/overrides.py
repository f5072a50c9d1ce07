"""Overrides of a job's keys, such as `optimizer.lr=3e-4`, for `--set` and `Job.load(…, set=…)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel

from paceline.errors import JobError, Problem
from paceline.job.spec import Spec
from paceline.yaml_file import KeyPath, Positions, annotation_below, parse_value, specs_of

# a mapping from dotted keys to values, `KEY=VALUE` strings as on the command line, or a sequence of both
Overrides: TypeAlias = Mapping[str, Any] | Sequence[str | tuple[str, Any]]


@dataclass(frozen=True)
class OverriddenPositions:
    """Positions of a job's keys, some of which were overridden.

    Attributes:
        labels: for each overridden path, the position that messages show, e.g. `--set optimizer.lr`.
        file: positions of the other keys; None if the job does not come from a file.
    """

    labels: Mapping[KeyPath, str]
    file: Positions | None = None

    def place(self, path: KeyPath) -> tuple[int, str]:
        """Return the position of the override that changed a key's value.

        For a key without an override, return its position in the file.
        """
        above = [label for own, label in self.labels.items() if path[: len(own)] == own]
        below = [label for own, label in self.labels.items() if path and own[: len(path)] == path]
        if found := above[-1:] or below:
            return 0, ", ".join(found)
        return self.file.place(path) if self.file else (0, "")


def override(
    values: Mapping[str, Any], changes: Overrides, spec: type[BaseModel], positions: Positions | None = None
) -> tuple[dict[str, Any], OverriddenPositions]:
    """Override keys of a job that consists of plain values.

    A section in its short form accepts the keys of its long form. For example, `optimizer: adamw` with
    `optimizer.lr=0.1` becomes `{name: adamw, lr: 0.1}`.

    Args:
        values: the job as read from a file; it is not modified.
        changes: strings with YAML values, `["optimizer.lr=3e-4"]`, or a mapping, `{"optimizer.lr": 3e-4}`.
        spec: the class of the job.
        positions: positions of the keys in `values`.

    Returns:
        The changed values, and the positions of the keys for messages.

    Raises:
        JobError: a change is not of the form KEY=VALUE, is not YAML, names a key of a value that has no keys, or
            replaces an earlier change. The message lists all such changes.
    """
    if isinstance(changes, str):
        changes = [changes]
    changed = deepcopy(dict(values))
    labels: dict[KeyPath, str] = {}
    wrong: list[Problem] = []
    for change in changes.items() if isinstance(changes, Mapping) else changes:
        try:
            label, key, value = _parsed(change)
            path = _set(changed, key, value, spec, label)
            if path in labels:
                raise JobError("set.key_twice", "{label}: this key is set twice. Leave one out.", label=label)
            if undone := [other for own, other in labels.items() if own[: len(path)] == path]:
                raise JobError(
                    "set.replaces_other",
                    "{label}: this overrides {other}. Leave one out.",
                    label=label,
                    other=list(undone),
                )
            labels[path] = label
        except JobError as error:
            wrong += error.problems
    if wrong:
        raise JobError.of_problems(wrong)
    return changed, OverriddenPositions(labels, positions)


def _parsed(change: str | tuple[str, Any]) -> tuple[str, str, Any]:
    """Return the label for messages, the dotted key and the value of a change."""
    if not isinstance(change, str):
        key, value = change
        return f"set {key}", key, value
    key, equals, text = change.partition("=")
    key = key.strip()
    if not equals or not key:
        raise JobError(
            "set.not_key_value",
            "--set {change}: write a key of the job and its value as KEY=VALUE, e.g. optimizer.lr=3e-4",
            change=change,
        )
    if not text.strip():
        raise JobError(
            "set.value_missing",
            '--set {key}: there is no value after "=". Write null for no value, or "" for an empty text.',
            key=key,
        )
    try:
        return f"--set {key}", key, parse_value(text)
    except ValueError as error:
        raise JobError(
            "set.not_yaml", "--set {key}: {text!r} is not a YAML value: {error}", key=key, text=text, error=error
        ) from None


def _set(values: dict[str, Any], key: str, value: Any, spec: type[BaseModel], label: str) -> KeyPath:
    """Set the value of a dotted key in place; return the key's path."""
    *above, last = key.split(".")
    container: Any = values
    annotation: Any = spec
    path: list[str | int] = []
    for part in above:
        place = _place_in(container, part, path, label)
        annotation = annotation_below(annotation, place)
        below = container.get(place) if isinstance(container, dict) else container[place]
        if below is None:
            below = {}
        elif isinstance(below, str):
            below = _long_form(below, annotation)
        container[place] = container = below
        path.append(place)
    place = _place_in(container, last, path, label)
    container[place] = value
    return (*path, place)


def _place_in(container: Any, part: str, path: Sequence[str | int], label: str) -> str | int:
    """Return the key or index that a part of a dotted key names."""
    if not part:
        raise JobError(
            "set.empty_key",
            "{label}: parts of a key cannot be empty; they are joined by single dots, e.g. optimizer.lr",
            label=label,
        )
    if isinstance(container, dict):
        return part
    where = ".".join(map(str, path))
    if not isinstance(container, list):
        raise JobError(
            "set.no_keys", "{label}: {where} is {value!r}, which has no keys", label=label, where=where, value=container
        )
    if not (part.isascii() and part.isdecimal()):
        raise JobError(
            "set.list_without_number",
            "{label}: {where} is a list. Use the number of an entry, e.g. {where}.0",
            label=label,
            where=where,
        )
    if int(part) >= len(container):
        raise JobError(
            "set.entry_missing",
            "{label}: {where} has no entry {entry}; it has {entries}, counted from 0. To add an entry, set the "
            "whole list",
            label=label,
            where=where,
            entry=part,
            entries=len(container),
        )
    return int(part)


def _long_form(text: str, annotation: Any) -> Any:
    specs = [spec for spec in specs_of(annotation) if issubclass(spec, Spec)]
    return specs[0].long_form(text) if specs else text
