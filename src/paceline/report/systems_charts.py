"""Charts of a comparison of systems: times beside paceline's, and losses over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from paceline.benchmark.systems.compared import ComparedWay
from paceline.report.charts import BLUE, GREY, SERIES, VERMILLION, Line, empty_figure, lines

_ROW_PX, _FRAME_PX = 26, 90


def steps(ways: Sequence[ComparedWay], names: Sequence[str]) -> go.Figure:
    """Step times as bars with intervals, the shortest on top.

    paceline's have a colour of their own; systems that compute something else are pale.
    """
    order = sorted(range(len(ways)), key=lambda i: -ways[i].step_s.middle)
    figure = empty_figure("ms a step", "")
    middle = [ways[i].step_s.middle * 1e3 for i in order]
    figure.add_bar(
        y=[escape(names[i]) for i in order],
        x=middle,
        orientation="h",
        width=0.7,
        marker={
            "color": [_colour(ways[i]) for i in order],
            "opacity": [1.0 if ways[i].same else 0.4 for i in order],
        },
        error_x={
            "type": "data",
            "array": [min(ways[i].step_s.high * 1e3, 3 * x) - x for i, x in zip(order, middle, strict=True)],
            "arrayminus": [x - ways[i].step_s.low * 1e3 for i, x in zip(order, middle, strict=True)],
            "thickness": 1.2,
            "width": 4,
        },
        hovertemplate="%{y}<br>%{x:.3~g} ms<extra></extra>",
    )
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(automargin=True)
    return figure.update_layout(height=_FRAME_PX + _ROW_PX * len(ways), showlegend=False)


def losses(courses: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> go.Figure:
    """Loss over seconds since the first step, a line for each way: name, seconds, losses."""
    series = [
        Line(name, x, y, SERIES[i % len(SERIES)], dashed=i >= len(SERIES)) for i, (name, x, y) in enumerate(courses)
    ]
    figure = lines(series, "seconds", "training loss", log_if_wide=True)
    return figure.update_layout(height=figure.layout.height + 18 * max(0, len(series) - 3))


def _colour(way: ComparedWay) -> str:
    if way.system == "paceline":
        return VERMILLION
    return GREY if way.system == "plain" else BLUE
