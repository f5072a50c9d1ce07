"""Values of `sync=` and `compress=`: rules and codecs, their arguments, and their checks.

No rule is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paceline.errors import PlanError
from paceline.job.read.nearest import nearest

ENTRY_POINTS = "paceline.sync_rules"
ALGORITHMS = ("auto", "flat", "ring", "tree", "hierarchical")


@dataclass(frozen=True)
class SyncSpec:
    """`NAME[:VALUE][,KEY=VALUE…]`, e.g. `allreduce:ring`, `local:8`, `diloco:30,fragments=4,overlap=5`.

    Attributes:
        name: of a built-in rule, or of one that an installed package registers under the entry point `paceline.sync_rules`.
        arguments: the rule's own, converted and with their defaults; those of another package's rule as they are written, the value
            after the colon under "".
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SyncSpec:
        """Read the value of `sync=`.

        Raises:
            PlanError: an unknown rule or argument (with the nearest), or a value that it does not take.
        """
        name, given = _pieces("sync", text)
        if name in RULES:
            arguments = _converted(f"sync={text}", RULES[name], given)
            _check_together(text, arguments)
            return cls(name, arguments)
        if name in others():
            return cls(name, given)
        raise PlanError(f'sync={text}: unknown rule "{name}". {nearest(name, [*RULES, *others()])}')

    @property
    def agrees_every_step(self) -> bool:
        """True if every step uses the gradients of all replicas, so that replicas stay equal.

        Assumed of rules from outside paceline.
        """
        return self.name not in LOCAL


@dataclass(frozen=True)
class CompressSpec:
    """`CODEC[:VALUE][+CODEC]`, e.g. `int8`, `topk:0.01+bf16`: the second one codes the numbers that the first one keeps."""

    codecs: tuple[tuple[str, float | None], ...]  # each with its value

    @classmethod
    def parse(cls, text: str) -> CompressSpec:
        """Read the value of `compress=`, but for `none` and `auto`.

        Raises:
            PlanError: an unknown codec, a value that it does not take, or two that do not go together.
        """
        found: list[tuple[str, float | None]] = []
        for word in text.split("+"):
            name, given = _pieces("compress", word)
            if name not in CODECS:
                raise PlanError(f'compress={text}: unknown codec "{name}". {nearest(name, ["none", "auto", *CODECS])}')
            found.append((name, _converted(f"compress={text}", CODECS[name], given).get("")))
        first, *rest = (name for name, _ in found)
        if len(rest) > 1 or (rest and (first not in KEEPS_NUMBERS or rest[0] not in NUMBERS)):
            raise PlanError(
                f"compress={text}: {' or '.join(KEEPS_NUMBERS)} may be followed by one of {', '.join(NUMBERS)}, which codes the numbers "
                f"that it keeps, e.g. compress=topk:0.01+bf16; other codecs stand alone"
            )
        return cls(tuple(found))


@dataclass(frozen=True)
class _Argument:
    """One argument that a rule or codec takes."""

    convert: Callable[[str], Any]
    default: Any  # None: it must be given
    what: str  # "a whole number, at least 1"


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise ValueError
        return int(text)

    return convert


def _between(least: float, most: float, *, open_below: bool = False) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (open_below and value == least):
            raise ValueError
        return value

    return convert


def _one_of(choices: Iterable[str]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return convert


_PERIOD = _Argument(_whole(1), None, "the number of steps between agreements, at least 1")
RULES: dict[str, dict[str, _Argument]] = {  # by name, the value after the colon under ""
    "allreduce": {"": _Argument(_one_of(ALGORITHMS), "auto", f"one of {', '.join(ALGORITHMS)}")},
    "local": {"": _PERIOD},
    "diloco": {
        "": _PERIOD,
        "fragments": _Argument(_whole(1), 1, "into how many parts the model is divided, which are sent at different steps, at least 1"),
        "overlap": _Argument(_whole(0), 0, "for how many steps training goes on while a fragment travels, at least 0"),
        "lr": _Argument(_between(0, 10, open_below=True), 0.7, "the outer learning rate, above 0"),
        "momentum": _Argument(_between(0, 0.9999), 0.9, "the outer Nesterov momentum, from 0 to below 1"),
    },
}
LOCAL = ("local", "diloco")  # between their agreements replicas differ
CODECS: dict[str, dict[str, _Argument]] = {
    "fp16": {},
    "bf16": {},
    "int8": {},
    "int4": {},
    "1bit": {},
    "topk": {"": _Argument(_between(0, 1, open_below=True), 0.01, "the share of the numbers that is kept, above 0 and at most 1")},
    "powersgd": {"": _Argument(_whole(1), 4, "the rank of the factors, a whole number, at least 1")},
}
KEEPS_NUMBERS = ("topk", "powersgd")
NUMBERS = ("fp16", "bf16", "int8", "int4")


@cache
def others() -> dict[str, EntryPoint]:
    """The rules that installed packages register."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def problem_with(key: str, value: object) -> str | None:
    """The problem with a value of `sync` or `compress`; None if it is valid."""
    if not isinstance(value, str) or not value:
        return f'{key} is text, e.g. {key}={"allreduce:ring" if key == "sync" else "int8"}, not "{value}"'
    if key == "compress" and value in ("none", "auto"):
        return None
    try:
        (SyncSpec if key == "sync" else CompressSpec).parse(value)
    except PlanError as error:
        return str(error)
    return None


def _check_together(text: str, arguments: Mapping[str, Any]) -> None:
    """Check the fragments of a rule against its period.

    Each fragment is sent once in a period, and has arrived before it is sent again.
    """
    period, fragments, overlap = arguments[""], arguments.get("fragments", 1), arguments.get("overlap", 0)
    if fragments > 1 and fragments > period:
        raise PlanError(
            f"sync={text}: {fragments} fragments are sent at different steps of a period of {period}: fragments={period} at most"
        )
    if overlap and overlap >= period:
        raise PlanError(
            f"sync={text}: a fragment must have arrived before it is sent again after {period} steps: overlap={period - 1} at most"
        )


def _pieces(key: str, text: str) -> tuple[str, dict[str, str]]:
    """Split the text into its name and options; the value after the colon is under ""."""
    head, *options = text.split(",")
    name, colon, value = head.partition(":")
    given = {"": value} if colon else {}
    for option in options:
        word, equals, setting = option.partition("=")
        if not equals or not word or word in given:
            raise PlanError(f'{key}={text}: "{option}" is not understood; write {name}:VALUE,KEY=VALUE, each key once')
        given[word] = setting
    return name, given


def _converted(where: str, takes: dict[str, _Argument], given: Mapping[str, str]) -> dict[str, Any]:
    name = where.partition("=")[2].partition(":")[0].partition(",")[0].partition("+")[0]
    for word in given:
        if word not in takes:
            extra = f'"{word}" is not one of its settings. {nearest(word, [w for w in takes if w])}' if word else "it takes no value"
            raise PlanError(
                f"{where}: {extra if word and len(takes) > 1 else f'{name} takes no {word or chr(39) + given[word] + chr(39)}'}"
            )
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
