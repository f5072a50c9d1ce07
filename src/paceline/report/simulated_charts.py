"""Charts of a simulated scaling: speedup and efficiency with their intervals, beside published curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from paceline.benchmark.simulated.curve import Point, SimulatedCurve
from paceline.benchmark.simulated.findings import PAYS
from paceline.benchmark.simulated.published import Likeness
from paceline.report.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, empty_figure
from paceline.stats import Interval
from paceline.units import digits, percent, seconds

_BAND = "rgba(0,114,178,.18)"
PUBLISHED = (ORANGE, GREEN, PURPLE, SKY)  # colours of published curves
_TOP = 1.6  # of the efficiency, the most that is drawn


def speedup(curve: SimulatedCurve) -> go.Figure:
    """Speedup over devices on axes that double, with its interval, against the ideal."""
    points, base = curve.fitting, curve.base
    at = [point.devices for point in points]
    ideal = [point.devices / base.devices for point in points]
    figure = empty_figure("devices", f"times the speed of {base.devices:,}")
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
    figure.update_yaxes(type="log", tickvals=marks, ticktext=[f"{mark:g} ×" for mark in marks])
    _doubling(figure, at)
    return figure


def efficiency(curve: SimulatedCurve, published: Sequence[Likeness]) -> go.Figure:
    """Efficiency over devices with its interval, the 50 % line, and published curves."""
    points = curve.fitting
    at = [point.devices for point in points]
    figure = empty_figure("devices", "efficiency, %")
    every = sorted({*at, *(n for one in published for n in one.held.curve.devices)})
    _line(figure, [every[0], every[-1]], [100.0, 100.0], "ideal", GREY, dash="dash")
    _line(figure, [every[0], every[-1]], [100 * PAYS] * 2, "50 %", VERMILLION, dash="dot")
    shares = [point.efficiency for point in points if point.efficiency is not None]
    _band(figure, at, [share.times(100) for share in shares])
    _predicted(figure, points, [100 * share.middle for share in shares], [""] * len(points))
    for one, colour in zip(published, PUBLISHED, strict=False):
        held = one.held
        figure.add_scatter(
            x=held.curve.devices,
            y=[100 * share for share in held.efficiency],
            name=escape(held.curve.title),
            showlegend=False,  # the table below has its colour
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": "dashdot"},
            marker={"size": 8, "symbol": "diamond"},
            hovertemplate=f"measured by others<br>{escape(held.curve.title)}<br>%{{x:,}} devices: %{{y:.3~g}} %"
            "<extra></extra>",
        )
    top = 100 * max(1.1, min(_TOP, 1.05 * max(share.high for share in shares)))
    figure.update_yaxes(range=[0, top])
    _doubling(figure, every)
    return figure


def _line(figure: go.Figure, x: Sequence[float], y: Sequence[float], name: str, colour: str, *, dash: str) -> None:
    line = {"color": colour, "dash": dash, "width": 2}
    figure.add_scatter(x=list(x), y=list(y), name=name, mode="lines", line=line, hoverinfo="skip")


def _band(figure: go.Figure, at: Sequence[int], intervals: Sequence[Interval]) -> None:
    """An area between the ends of the intervals."""
    figure.add_scatter(
        x=[*at, *reversed(at)],
        y=[*(one.low for one in intervals), *(one.high for one in reversed(intervals))],
        name="80 % interval",
        mode="lines",
        fill="toself",
        fillcolor=_BAND,
        line={"width": 0, "color": _BAND},
        hoverinfo="skip",
    )


def _predicted(figure: go.Figure, points: Sequence[Point], y: Sequence[float], text: Sequence[str]) -> None:
    figure.add_scatter(
        x=[point.devices for point in points],
        y=list(y),
        name="predicted",
        mode="lines+markers+text",
        line={"color": BLUE, "width": 2.5},
        marker={"size": 8, "color": BLUE},
        text=list(text),
        textposition="top left",
        hovertext=[_hover(point) for point in points],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(point: Point) -> str:
    assert point.candidate is not None
    assert point.step_time_s is not None
    assert point.efficiency is not None
    share = point.efficiency
    return (
        f"predicted, {point.devices:,} devices<br>{escape(str(point.candidate.plan))}<br>"
        f"{seconds(point.step_time_s.middle)} a step<br>"
        f"efficiency {percent(share.middle)} ({percent(share.low)} to {percent(share.high)})"
    )


def _doubling(figure: go.Figure, at: Sequence[int]) -> None:
    """A logarithmic axis of devices, its ticks at powers of two."""
    first, last = math.floor(math.log2(at[0])), math.ceil(math.log2(at[-1]))
    marks = [2**power for power in range(first, last + 1)][:: max(1, -(-(last - first) // 6))]
    figure.update_xaxes(
        type="log",
        tickvals=marks,
        ticktext=[f"{mark:,}" for mark in marks],
        range=[math.log10(at[0]) - 0.08, math.log10(at[-1]) + 0.12],
        showgrid=False,
    )
