"""Charts of a simulated scaling: speedup and efficiency with their intervals, beside published curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.report.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from paceline.report.figure import Axis, Dash, Figure, Points
from paceline.stats import Interval
from paceline.units import digits, percent, seconds
from paceline_lab.simulated.curve import Point, SimulatedCurve
from paceline_lab.simulated.findings import PAYS
from paceline_lab.simulated.published import Likeness

_BAND = "rgba(0,114,178,.18)"
PUBLISHED = (ORANGE, GREEN, PURPLE, SKY)  # colours of published curves
_TOP = 1.6  # of the efficiency, the most that is drawn


def speedup(curve: SimulatedCurve) -> Figure:
    """Speedup over devices on axes that double, with its interval, against the ideal."""
    points, base = curve.fitting, curve.base
    at = [point.devices for point in points]
    ideal = [point.devices / base.devices for point in points]
    figure = Figure(Axis("devices"), Axis(f"times the speed of {base.devices:,}"))
    _line(figure, at, ideal, "ideal", GREY, dash="dash")
    gains = [point.speedup for point in points if point.speedup is not None]
    _band(figure, at, gains)
    text = [
        f"{digits(gain.middle)} ×" if point is curve.last else "" for point, gain in zip(points, gains, strict=True)
    ]
    _predicted(figure, points, [gain.middle for gain in gains], text)
    least, most = min(gain.low for gain in gains), max(*ideal, *(gain.high for gain in gains))
    first, last = math.floor(math.log2(min(least, 1.0))), math.ceil(math.log2(most))
    marks = [2.0**power for power in range(first, last + 1)][:: max(1, (last - first) // 8)]
    figure.y.log, figure.y.ticks = True, [(mark, f"{mark:g} ×") for mark in marks]
    _doubling(figure, at)
    return figure


def efficiency(curve: SimulatedCurve, published: Sequence[Likeness]) -> Figure:
    """Efficiency over devices with its interval, the 50 % line, and published curves."""
    points = curve.fitting
    at = [point.devices for point in points]
    figure = Figure(Axis("devices"), Axis("efficiency, %"))
    every = sorted({*at, *(n for one in published for n in one.held.curve.devices)})
    _line(figure, [every[0], every[-1]], [100.0, 100.0], "ideal", GREY, dash="dash")
    _line(figure, [every[0], every[-1]], [100 * PAYS] * 2, "50 %", VERMILLION, dash="dot")
    shares = [point.efficiency for point in points if point.efficiency is not None]
    _band(figure, at, [share.times(100) for share in shares])
    _predicted(figure, points, [100 * share.middle for share in shares], [""] * len(points))
    for one, colour in zip(published, PUBLISHED, strict=False):
        held = one.held
        shares_of = [100 * share for share in held.efficiency]
        figure.traces.append(
            Points(
                held.curve.title,
                list(held.curve.devices),
                shares_of,
                colour,
                dash="dashdot",
                marks=8,
                symbol="diamond",
                in_legend=False,  # the table below explains its colour
                hints=[
                    f"measured by others\n{held.curve.title}\n{n:,} devices: {digits(share)} %"
                    for n, share in zip(held.curve.devices, shares_of, strict=True)
                ],
            )
        )
    top = 100 * max(1.1, min(_TOP, 1.05 * max(share.high for share in shares)))
    figure.y.span = (0, top)
    _doubling(figure, every)
    return figure


def _line(figure: Figure, x: Sequence[float], y: Sequence[float], name: str, colour: str, *, dash: Dash) -> None:
    figure.traces.append(Points(name, list(x), list(y), colour, dash=dash, hints=()))


def _band(figure: Figure, at: Sequence[int], intervals: Sequence[Interval]) -> None:
    """An area between the ends of the intervals."""
    ends = [*(one.low for one in intervals), *(one.high for one in reversed(intervals))]
    figure.traces.append(Points("80 % interval", [*at, *reversed(at)], ends, _BAND, width=0, fill="area", hints=()))


def _predicted(figure: Figure, points: Sequence[Point], y: Sequence[float], text: Sequence[str]) -> None:
    x, hints = [point.devices for point in points], [_hover(point) for point in points]
    figure.traces.append(
        Points("predicted", x, list(y), BLUE, width=2.5, marks=8, words=list(text), side="above", hints=hints)
    )


def _hover(point: Point) -> str:
    assert point.candidate is not None
    assert point.step_time_s is not None
    assert point.efficiency is not None
    share = point.efficiency
    return (
        f"predicted, {point.devices:,} devices\n{point.candidate.plan}\n"
        f"{seconds(point.step_time_s.middle)} a step\n"
        f"efficiency {percent(share.middle)} ({percent(share.low)} to {percent(share.high)})"
    )


def _doubling(figure: Figure, at: Sequence[int]) -> None:
    """A logarithmic axis of devices, its ticks at powers of two."""
    first, last = math.floor(math.log2(at[0])), math.ceil(math.log2(at[-1]))
    marks = [2**power for power in range(first, last + 1)][:: max(1, -(-(last - first) // 6))]
    figure.x.log, figure.x.grid = True, False
    figure.x.ticks = [(mark, f"{mark:,}") for mark in marks]
    figure.x.span = (at[0] / 1.2, at[-1] * 1.32)
