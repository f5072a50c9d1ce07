"""Formatting of numbers for people, with one form for each type.

It is used on the screen, on pages, in errors and in logs.

Bytes that are stored or sent (memory, files, messages) are in binary units: KiB, MiB, GiB. Speeds are in decimal units,
as vendors state them: GB/s for memory and collectives (as nccl-tests), Gbit/s for links between hosts. Numbers have at
most three significant digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.stats import Interval

# Upper bound of each scale, its factor, and its unit.
_SECONDS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"), (math.inf, 1 / 3600, "h"))
# 1023.5 KiB would round to a number of four digits, so it is shown as 1 MiB.
_BYTES = tuple((1023.5 * 1024**i, 1024.0**-i, unit) for i, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))
_BYTES_PER_S = ((1e3, 1.0, "B/s"), (1e6, 1e-3, "kB/s"), (1e9, 1e-6, "MB/s"), (math.inf, 1e-9, "GB/s"))
_FLOPS = ((1e12, 1e-9, "GFLOP/s"), (math.inf, 1e-12, "TFLOP/s"))
_DAY_S = 86_400.0
_SPANS = (*((least, factor, unit) for least, factor, unit in _SECONDS[:-1]), (2 * _DAY_S, 1 / 3600, "h"))
_KWH = ((1e3, 1.0, "kWh"), (1e6, 1e-3, "MWh"), (math.inf, 1e-6, "GWh"))
_KG = ((1e3, 1.0, "kg"), (math.inf, 1e-3, "t"))
_LARGE = ((1e6, 1.0, ""), (1e9, 1e-6, "million"), (1e12, 1e-9, "billion"), (math.inf, 1e-12, "trillion"))


@dataclass(frozen=True)
class Shown:
    """Formatted figure: its number, text and unit, and the text of its interval, if any."""

    value: float
    text: str
    unit: str = ""
    interval: str | None = None

    def __str__(self) -> str:
        return f"{self.text} {self.unit}" if self.unit else self.text

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def size(size_bytes: float) -> Shown:
    """Format stored or sent bytes: `512 B`, `64 KiB`, `1.02 MiB`, `75.3 GiB`; whole numbers have no decimals."""
    _, factor, unit = next((scale for scale in _BYTES if abs(size_bytes) < scale[0]), _BYTES[-1])
    text = digits(size_bytes * factor)
    return Shown(size_bytes, text.rstrip("0").rstrip(".") if "." in text else text, unit)


def bandwidth(bytes_per_s: float) -> Shown:
    """Format bytes per second in decimal units: `94.9 MB/s`, `11.2 GB/s`."""
    return _scaled(bytes_per_s, _BYTES_PER_S)


def flops(per_s: float) -> Shown:
    """Format floating-point operations per second: `412 GFLOP/s`, `1.21 TFLOP/s`."""
    return _scaled(per_s, _FLOPS)


def seconds(x: float | Interval) -> Shown:
    """Format a duration: `23.4 ms`, `1.52 s`, `2.61 min`."""
    return _scaled(x, _SECONDS)


def span(x: float) -> Shown:
    """Format the duration of a whole training run: `23.4 s`, `5.20 h`, `61.2 days`."""
    return _scaled(x, (*_SPANS, (math.inf, 1 / _DAY_S, "days")))


def milliseconds(x: float) -> Shown:
    """Format a difference between durations: `+1.82 ms`. All differences in a table have the same unit."""
    return Shown(x, f"{1e3 * x:+,.2f}", "ms")


def clock(seconds: float) -> str:
    """Format a duration like a clock: `1:05`, `1:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(x: float | Interval, unit: str = "samples/s") -> Shown:
    """Format a rate per second: `3,320 samples/s`."""
    return _scaled(x, ((math.inf, 1.0, unit),))


def ratio(x: float | Interval) -> Shown:
    """Format a factor: `1.52 ×`."""
    return _scaled(x, ((math.inf, 1.0, "×"),))


def percent(x: float | Interval, places: int | None = None) -> Shown:
    """Format a share: `15.2 %`, `80 %`. By default, shares below 20 % and with an interval have one decimal."""
    middle = x.middle if isinstance(x, Interval) else x
    if places is None:
        places = 1 if isinstance(x, Interval) or abs(middle) < 0.2 else 0
    interval = f"{100 * x.low:.{places}f} to {100 * x.high:.{places}f}" if isinstance(x, Interval) else None
    return Shown(middle, f"{100 * middle:.{places}f}", "%", interval)


def number(x: float) -> Shown:
    """Format a number without a unit: `0.978`."""
    return _scaled(x, ((math.inf, 1.0, ""),))


def large(x: float) -> Shown:
    """Format a large number in words: `70.6 billion`, `1.20 million`, `4,810`."""
    return Shown(x, f"{x:,.0f}") if abs(x) < _LARGE[0][0] else _scaled(x, _LARGE)


def joules(x: float) -> Shown:
    """Format an energy: `610 mJ`, `2.10 J`."""
    return _scaled(x, ((1.0, 1e3, "mJ"), (math.inf, 1.0, "J")))


def kilowatt_hours(x: float) -> Shown:
    """Format the energy of a whole training run: `12.0 kWh`, `3.45 MWh`."""
    return _scaled(x, _KWH)


def kilograms(x: float) -> Shown:
    """Format a mass: `12.0 kg`, `3.45 t`."""
    return _scaled(x, _KG)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Format a count with its noun: `1 rank`, `1,024 ranks`, `2 microbatches`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def money(x: float) -> str:
    """Format an amount in the user's currency: `35,040`, `3.57`."""
    return f"{x:,.0f}" if abs(x) >= 100 else digits(x)


def digits(x: float) -> str:
    """Format a number to three significant digits with thousands separators: `0.0123`, `1.52`, `23.4`, `3,320`."""
    if not math.isfinite(x):
        return str(x)
    places = 0 if x == 0 else max(0, min(6, 2 - math.floor(math.log10(abs(x)))))
    return f"{x:,.{places}f}"


def _scaled(x: float | Interval, scales: Sequence[tuple[float, float, str]]) -> Shown:
    middle = x.middle if isinstance(x, Interval) else x
    _, factor, unit = next((scale for scale in scales if abs(middle) < scale[0]), scales[-1])
    interval = f"{digits(x.low * factor)} to {digits(x.high * factor)}" if isinstance(x, Interval) else None
    return Shown(middle, digits(middle * factor), unit, interval)
