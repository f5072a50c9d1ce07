"""Numbers as people read them: three digits that count, one unit for a value and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.stats import Interval

_SECONDS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"), (math.inf, 1 / 3600, "h"))
_BYTES = ((1e3, 1.0, "B"), (1e6, 1e-3, "kB"), (1e9, 1e-6, "MB"), (math.inf, 1e-9, "GB"))


@dataclass(frozen=True)
class Shown:
    """A figure for the page: its text and unit, the interval's text where it has one, and the number itself."""

    value: float
    text: str
    unit: str = ""
    interval: str | None = None

    def __str__(self) -> str:
        return f"{self.text}\N{NO-BREAK SPACE}{self.unit}" if self.unit else self.text


def seconds(x: float | Interval) -> Shown:
    """`23.4 ms`, `1.52 s`, `2.61 min`."""
    return _scaled(x, _SECONDS)


def milliseconds(x: float) -> Shown:
    """`+1.82 ms`, of a difference; all of a table have one unit."""
    return Shown(x, f"{1e3 * x:+,.2f}", "ms")


def size(x: float) -> Shown:
    """`512 B`, `1.07 MB`."""
    return _scaled(x, _BYTES)


def rate(x: float | Interval, unit: str = "samples/s") -> Shown:
    """`3,320 samples/s`."""
    return _scaled(x, ((math.inf, 1.0, unit),))


def ratio(x: float | Interval) -> Shown:
    """`1.52 ×`"""
    return _scaled(x, ((math.inf, 1.0, "×"),))


def percent(x: float | Interval) -> Shown:
    """`76.1 %`, of a share."""
    return _scaled(x, ((math.inf, 100.0, "%"),))


def number(x: float) -> Shown:
    """`0.978`, of what has no unit."""
    return _scaled(x, ((math.inf, 1.0, ""),))


def joules(x: float) -> Shown:
    """`0.61 J`"""
    return _scaled(x, ((1.0, 1e3, "mJ"), (math.inf, 1.0, "J")))


def digits(x: float) -> str:
    """Three digits that count, thousands apart: `0.0123`, `1.52`, `23.4`, `3,320`."""
    if not math.isfinite(x):
        return str(x)
    places = 0 if x == 0 else max(0, min(6, 2 - math.floor(math.log10(abs(x)))))
    return f"{x:,.{places}f}"


def _scaled(x: float | Interval, scales: Sequence[tuple[float, float, str]]) -> Shown:
    middle = x.middle if isinstance(x, Interval) else x
    _, factor, unit = next((s for s in scales if abs(middle) < s[0]), scales[-1])
    interval = f"{digits(x.low * factor)} to {digits(x.high * factor)}" if isinstance(x, Interval) else None
    return Shown(middle, digits(middle * factor), unit, interval)
