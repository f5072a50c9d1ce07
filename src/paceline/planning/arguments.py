"""Arguments of rules and codecs in a plan: `NAME[:VALUE][,KEY=VALUE…]`, their types, defaults and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import PlanError
from paceline.nearest import nearest


@dataclass(frozen=True)
class Argument:
    """One argument that a rule or codec takes.

    Attributes:
        convert: makes the value of its text; raises ValueError for text that is none.
        default: its value where it is not given; None: it must be given.
        what: what it is, for error texts: "a whole number, at least 1".
    """

    convert: Callable[[str], Any]
    default: Any
    what: str


def whole(least: int) -> Callable[[str], int]:
    """Converter to a whole number of at least `least`."""

    def convert(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise ValueError
        return int(text)

    return convert


def between(least: float, most: float, *, open_below: bool = False) -> Callable[[str], float]:
    """Converter to a number from `least` (excluded with `open_below`) to `most`."""

    def convert(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (open_below and value == least):
            raise ValueError
        return value

    return convert


def whole_or_inf(text: str) -> float:
    """A whole number of at least 0, or infinity for `inf`."""
    return math.inf if text == "inf" else float(whole(0)(text))


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """Converter to one of some words."""

    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return convert


def pieces(key: str, text: str) -> tuple[str, dict[str, str]]:
    """Split the text into its name and arguments.

    The value after the colon is under "", unless it has a key.

    Raises:
        PlanError: it has another form.
    """
    head, *options = text.split(",")
    name, colon, value = head.partition(":")
    given: dict[str, str] = {}
    if colon and "=" in value:
        options = [value, *options]
    elif colon:
        given[""] = value
    for option in options:
        word, equals, setting = option.partition("=")
        if not equals or not word or word in given:
            raise PlanError(f'{key}={text}: "{option}" is not understood; write {name}:VALUE,KEY=VALUE, each key once')
        given[word] = setting
    return name, given


def converted(where: str, name: str, takes: Mapping[str, Argument], given: Mapping[str, str]) -> dict[str, Any]:
    """Values of all arguments in `takes`, from their text or by default.

    Args:
        where: the text of the plan that is read, for errors: `sync=local:8`.

    Raises:
        PlanError: an argument that `name` does not take, or a value that is none.
    """
    for word in given:
        if word not in takes:
            if word and len(takes) > 1:
                raise PlanError(
                    f'{where}: "{word}" is not one of its settings. {nearest(word, [w for w in takes if w])}'
                )
            unknown = word or f"'{given[word]}'"
            keys = ", ".join(f"{key}=" for key in takes if key)
            raise PlanError(f"{where}: {name} takes no {unknown}" + (f"; it takes {keys}" if keys else ""))
    values: dict[str, Any] = {}
    for word, argument in takes.items():
        if word not in given:
            if argument.default is None:
                raise PlanError(f"{where}: {name} needs {argument.what}, e.g. {where}:8")
            values[word] = argument.default
            continue
        try:
            values[word] = argument.convert(given[word])
        except ValueError:
            raise PlanError(f'{where}: {word or name} is {argument.what}, not "{given[word]}"') from None
    return values
