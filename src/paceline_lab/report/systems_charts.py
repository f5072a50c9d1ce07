"""Charts of a comparison of systems: times beside paceline's, and losses over time."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.charts import BLUE, GREY, SERIES, VERMILLION, Line, lines
from paceline.report.figure import Axis, Bars, Figure
from paceline.units import digits
from paceline_lab.systems.compared import ComparedWay

_ROW_PX, _FRAME_PX = 26, 90


def steps(ways: Sequence[ComparedWay], names: Sequence[str]) -> Figure:
    """Step times as bars with intervals, the shortest on top.

    paceline's have a colour of their own; systems that compute something else are pale.
    """
    order = sorted(range(len(ways)), key=lambda i: ways[i].step_s.middle)
    middle, places = [ways[i].step_s.middle * 1e3 for i in order], list(range(len(order)))
    bars = Bars(
        "step",
        middle,
        places,
        [_colour(ways[i]) for i in order],
        opacity=[1.0 if ways[i].same else 0.4 for i in order],
        low=[ways[i].step_s.low * 1e3 for i in order],
        high=[min(ways[i].step_s.high * 1e3, 3 * x) for i, x in zip(order, middle, strict=True)],
        hints=[f"{names[i]}\n{digits(x)} ms" for i, x in zip(order, middle, strict=True)],
    )
    return Figure(
        Axis("ms a step", from_zero=True),
        Axis(
            span=(len(order) - 0.4, -0.6), ticks=[(p, names[i]) for p, i in zip(places, order, strict=True)], grid=False
        ),
        height=_FRAME_PX + _ROW_PX * len(ways),
        traces=[bars],
        legend=False,
    )


def losses(courses: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> Figure:
    """Loss over seconds since the first step, a line for each way: name, seconds, losses."""
    series = [
        Line(name, x, y, SERIES[i % len(SERIES)], dashed=i >= len(SERIES)) for i, (name, x, y) in enumerate(courses)
    ]
    figure = lines(series, "seconds", "training loss", log_if_wide=True)
    figure.height += 18 * max(0, len(series) - 3)
    return figure


def _colour(way: ComparedWay) -> str:
    if way.system == "paceline":
        return VERMILLION
    return GREY if way.system == "plain" else BLUE
