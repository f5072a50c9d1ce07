"""Combinations of a sweep: a whole grid, or random draws."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from paceline.errors import JobError
from paceline.text import nearest
from paceline.yaml_file import parse_value

_RANGE = re.compile(r"([A-Za-z_]+)\(([^()]*)\)")
_EXAMPLE = "e.g. --grid optimizer.lr=1e-4,1e-3, or --grid 'optimizer.lr=loguniform(1e-5,1e-2)' with --random"
_MOST = 10_000  # largest number of combinations in a grid
_TRIES = 100  # attempts per draw to find a combination that was not drawn before


@dataclass(frozen=True)
class Range:
    """Range of values for random draws.

    Attributes:
        kind: `uniform`, `loguniform` (uniform in the logarithm), or `int` (integers, including both bounds).
    """

    kind: Literal["uniform", "loguniform", "int"]
    low: float
    high: float

    def draw(self, rng: random.Random) -> float | int:
        """Draw a value, rounded to four digits beyond the digits that both bounds share."""
        if self.kind == "int":
            return rng.randint(int(self.low), int(self.high))
        if self.kind == "uniform":
            value = rng.uniform(self.low, self.high)
        else:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        shared = math.ceil(math.log10(max(abs(self.low), abs(self.high)) / (self.high - self.low)))
        return min(max(float(f"{value:.{min(17, 4 + max(0, shared))}g}"), self.low), self.high)

    @property
    def size(self) -> float:
        """Number of different values in the range."""
        return self.high - self.low + 1 if self.kind == "int" else math.inf


Values: TypeAlias = "tuple[Any, ...] | Range"
RANGES = ("uniform", "loguniform", "int")


def values_of(texts: Sequence[str]) -> dict[str, Values]:
    """Parse `KEY=V1,V2,…` and `KEY=loguniform(LOW,HIGH)` into values or ranges by key.

    Raises:
        JobError: a text has neither form, or a key appears twice.
    """
    found: dict[str, Values] = {}
    for text in texts:
        key, equals, listed = (part.strip() for part in text.partition("="))
        if not (key and equals and listed):
            raise JobError(
                "sweep.not_key_values",
                "--grid {text}: give a key of the job and its values, {example}",
                text=text,
                example=_EXAMPLE,
            )
        if key in found:
            raise JobError(
                "sweep.key_twice", "--grid {key} is given twice. List all of its values in one --grid", key=key
            )
        found[key] = _range(key, listed) if _RANGE.fullmatch(listed) else _list(key, listed)
    if not found:
        raise JobError("sweep.no_key", "a sweep needs the values of at least one key, {example}", example=_EXAMPLE)
    return found


def _list(key: str, text: str) -> tuple[Any, ...]:
    try:
        return tuple(parse_value(f"[{text}]"))
    except (ValueError, TypeError) as error:
        raise JobError(
            "sweep.not_yaml",
            "--grid {key}: {text!r} is not a list of YAML values: {error}",
            key=key,
            text=text,
            error=error,
        ) from None


def _range(key: str, text: str) -> Range:
    kind, inside = cast("re.Match[str]", _RANGE.fullmatch(text)).groups()
    if kind not in RANGES:
        raise JobError(
            "sweep.unknown_range",
            "--grid {key}: unknown range {kind!r}. {hint}",
            key=key,
            kind=kind,
            hint=nearest(kind, RANGES),
        )
    try:
        low, high = (float(end) for end in inside.split(","))
    except ValueError:
        raise JobError(
            "sweep.range_ends",
            "--grid {key}: {kind} needs two numbers, e.g. {kind}(1,8), not ({inside})",
            key=key,
            kind=kind,
            inside=inside,
        ) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise JobError(
            "sweep.range_order",
            "--grid {key}: the lower bound of {text} must be less than the upper bound",
            key=key,
            text=text,
        )
    if kind == "loguniform" and low <= 0:
        raise JobError(
            "sweep.range_not_positive", "--grid {key}: both bounds of {text} must be more than 0", key=key, text=text
        )
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise JobError(
            "sweep.range_not_whole", "--grid {key}: both bounds of {text} must be integers", key=key, text=text
        )
    return Range(cast("Any", kind), low, high)


def combinations(space: Mapping[str, Values], draws: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Return the combinations to run; each maps job keys to values.

    Args:
        draws: number of different random combinations; None returns the whole grid.
        seed: seed of the draws.

    Raises:
        JobError: a whole grid has a range or too many combinations, or there are fewer combinations than draws.
    """
    ranges = [key for key, values in space.items() if isinstance(values, Range)]
    size = math.prod(values.size if isinstance(values, Range) else len(values) for values in space.values())
    if draws is None:
        if ranges:
            raise JobError(
                "sweep.range_in_grid",
                "--grid {key}: values are drawn from a range, so give the number of draws: --random 20",
                key=ranges[0],
            )
        if size > _MOST:
            raise JobError(
                "sweep.too_many",
                "the grid has {size:,} combinations, more than {most:,}. Draw a sample of them with --random",
                size=size,
                most=_MOST,
            )
        lists = cast("Mapping[str, tuple[Any, ...]]", space)
        return [dict(zip(lists, each, strict=True)) for each in itertools.product(*lists.values())]
    if draws > min(size, _MOST):
        raise JobError(
            "sweep.too_many_draws",
            "--random {draws}: only {size:,.0f} combinations exist",
            draws=draws,
            size=min(size, _MOST),
        )
    rng = random.Random(seed)
    if size <= _MOST:  # the space has no range of real numbers
        every = list(_finite(space))
        return rng.sample(every, draws)
    found: list[dict[str, Any]] = []
    for _ in range(_TRIES * draws):
        drawn = {key: v.draw(rng) if isinstance(v, Range) else rng.choice(v) for key, v in space.items()}
        if drawn not in found:
            found.append(drawn)
        if len(found) == draws:
            return found
    raise JobError(
        "sweep.range_too_narrow",
        "--random {draws}: only {count} different combinations were found. Widen the ranges",
        draws=draws,
        count=len(found),
    )


def _finite(space: Mapping[str, Values]) -> Iterator[dict[str, Any]]:
    lists = [range(int(v.low), int(v.high) + 1) if isinstance(v, Range) else v for v in space.values()]
    return (dict(zip(space, each, strict=True)) for each in itertools.product(*lists))


def shown(value: Any) -> str:
    """Format a parameter's value for tables: `0.0003`, `[accuracy, f1]`."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shown(entry)}' for key, entry in value.items())}}}"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def titled(parameters: Mapping[str, Any]) -> str:
    """Format a combination: `optimizer.lr=0.0003, seed=1`."""
    return ", ".join(f"{key}={shown(value)}" for key, value in parameters.items())


def short_names(keys: Sequence[str]) -> list[str]:
    """Return the shortest unique suffixes of the keys: `lr` for `optimizer.lr`."""

    def ending(key: str, parts: int) -> str:
        return ".".join(key.split(".")[-parts:])

    for parts in range(1, 1 + max(key.count(".") for key in keys)):
        names = [ending(key, parts) for key in keys]
        if len(set(names)) == len(names):
            return names
    return list(keys)
