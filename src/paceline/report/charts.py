"""The charts of a page as plotly figures, transparent for light and dark pages."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go

from paceline.report.definitions import PARTS
from paceline.units import digits

# Okabe & Ito (2008): told apart with every kind of colour vision, and on white as well as on black.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8A8F98",
)
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
PART_COLOURS = {
    "data": ORANGE,
    "compute": BLUE,
    "bubble": SKY,
    "comm": VERMILLION,
    "imbalance": PURPLE,
    "optimizer": GREEN,
    "checkpoint": GREY,
}
WALL_COLOURS = {  # of a run's wall-clock, by the parts of `training.record.goodput.PARTS`
    "useful": GREEN,
    "start": SKY,
    "restart": VERMILLION,
    "recovery": ORANGE,
    "recut": BLUE,
    "replay": PURPLE,
    "checkpoint": GREY,
    "evaluation": "#B9A44C",
    "between": "#C3C8CF",
}
Middle = Callable[[Sequence[float]], float]
_BAR_PX, _TITLE_PX = 24, 46
_LABEL_WIDTH = 26  # characters; a longer plan is broken into lines
POINTS = 400  # a curve of more is drawn by the means of its stretches


@dataclass(frozen=True)
class Bar:
    """One rank's step in a breakdown: seconds by part, and the ideal step time."""

    group: str
    rank: str
    parts_s: dict[str, float]
    ideal_s: float | None = None


@dataclass(frozen=True)
class Line:
    """Points of one series over one axis; None is a gap. A long one is thinned unless its points are marked."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str = BLUE
    dashed: bool = False
    marked: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at `x`, drawn as a vertical line."""

    x: float
    text: str


@dataclass(frozen=True)
class Panel:
    """One figure for everything compared: values in the order of the names.

    None where there is no value; drawn times `factor`.
    """

    title: str
    values: Sequence[float | None]
    factor: float = 1.0


def breakdown(bars: Sequence[Bar], noun: str = "step") -> go.Figure:
    """One step of each rank as stacked bars of its parts, under group headings.

    A tick marks the ideal.
    """
    longest = max(sum(bar.parts_s.values()) for bar in bars)
    factor, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    places, headings, rows = _rows(bars)
    figure = empty_figure(f"{unit} per {noun}", "")
    for part, definition in PARTS.items():
        figure.add_bar(
            y=places,
            x=[bar.parts_s.get(part, 0.0) * factor for bar in bars],
            name=definition.name,
            orientation="h",
            width=0.72,
            marker={"color": PART_COLOURS[part]},
            customdata=[f"{escape(bar.group)}, {escape(bar.rank)}" for bar in bars],
            hovertemplate=f"%{{customdata}}<br>{definition.name} %{{x:.3~g}} {unit}<extra></extra>",
        )
    marked = [(place, bar.ideal_s * factor) for place, bar in zip(places, bars, strict=True) if bar.ideal_s is not None]
    if marked:
        figure.add_scatter(
            y=[place for place, _ in marked],
            x=[ideal for _, ideal in marked],
            name="ideal",
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 27, "line": {"width": 3}},
            hovertemplate=f"ideal %{{x:.3~g}} {unit}<extra></extra>",
        )
    for place, heading in headings:
        figure.add_annotation(
            text=f"<b>{escape(heading)}</b>", x=0, y=place, xref="paper", xanchor="left", xshift=-48, showarrow=False
        )
    figure.update_layout(barmode="stack", height=76 + 29 * rows, showlegend=False, hovermode="closest")
    ranks = [escape(bar.rank) for bar in bars]
    figure.update_yaxes(tickvals=places, ticktext=ranks, range=[rows - 0.4, -0.6], showgrid=False, fixedrange=True)
    figure.update_xaxes(rangemode="tozero")
    return figure


def _rows(bars: Sequence[Bar]) -> tuple[list[float], list[tuple[float, str]], float]:
    """The bars' places from the top, the headings with theirs, and the number of rows."""
    places, headings, place = [], [], 0.0
    for number, bar in enumerate(bars):
        if number == 0 or bar.group != bars[number - 1].group:
            place += 0.25 if number else 0.0
            if bar.group:
                headings.append((place, bar.group))
                place += 0.9
        places.append(place)
        place += 1.0
    return places, headings, place


def lines(
    series: Sequence[Line],
    over: str,
    what: str,
    *,
    marks: Sequence[Mark] = (),
    middle: Middle = statistics.fmean,
    log_if_wide: bool = False,
) -> go.Figure:
    """Series over one axis; `marks` are events."""
    figure = empty_figure(over, what)
    for line in series:
        x, y = (list(line.x), list(line.y)) if line.marked else _thinned(line, middle)
        style = {"mode": "lines+markers", "marker": {"size": 7}} if line.marked else {"mode": "lines"}
        stroke = {"width": 2, "color": line.colour, "dash": "dash" if line.dashed else "solid"}
        figure.add_scatter(x=x, y=y, name=escape(line.name), line=stroke, **style)
    for mark in marks:
        note = {"text": escape(mark.text), "textangle": -90, "yanchor": "top", "xanchor": "right"}
        figure.add_vline(x=mark.x, line={"color": PURPLE, "dash": "dot", "width": 1.5}, annotation=note)
    values = [y for line in series for y in line.y if y is not None and math.isfinite(y)]
    if log_if_wide and values and min(values) > 0 and max(values) > 30 * min(values):
        figure.update_yaxes(type="log", dtick=1)
    elif not all(line.marked for line in series) and (not values or min(values) >= 0):
        figure.update_yaxes(rangemode="tozero")
    figure.for_each_trace(
        lambda trace: trace.update(
            hovertemplate=f"{trace.name}<br>{over} %{{x:,.4~g}}<br>{escape(what)} %{{y:,.4~g}}<extra></extra>"
        )
    )
    figure.update_layout(showlegend=len(series) > 1)
    return figure


def parts_over_steps(steps: Sequence[int], parts_s: dict[str, Sequence[float]], noun: str = "step") -> go.Figure:
    """The parts of the step time over training, as stacked areas that sum to it."""
    figure = empty_figure(f"{noun}s", f"ms per {noun}")
    for part, definition in PARTS.items():
        x, y = _thinned(Line(part, steps, [1e3 * s for s in parts_s[part]]), statistics.fmean)
        figure.add_scatter(
            x=x,
            y=y,
            name=definition.name,
            mode="lines",
            stackgroup="step",
            line={"width": 0, "color": PART_COLOURS[part]},
            fillcolor=PART_COLOURS[part],
            hovertemplate="%{y:.3~g} ms",
        )
    figure.update_layout(hovermode="x unified", showlegend=False)
    return figure


def panelled(names: Sequence[str], panels: Sequence[Panel]) -> go.Figure:
    """A bar per name in each panel, panels under each other, empty ones left out."""
    panels = [panel for panel in panels if any(value is not None for value in panel.values)]
    labels = ["<br>".join(escape(line) for line in textwrap.wrap(name, _LABEL_WIDTH)) for name in names]
    rows = sum(label.count("<br>") + 1 for label in labels)
    panel_px = _TITLE_PX + _BAR_PX * rows
    figure = empty_figure("", "")
    figure.update_layout(height=panel_px * len(panels), showlegend=False, margin={"l": 8, "r": 12, "t": 0, "b": 4})
    whole = 1.0 / len(panels)
    for number, panel in enumerate(panels):
        top = 1.0 - number * whole
        axis = "" if number == 0 else str(number + 1)
        shown = [None if value is None else value * panel.factor for value in panel.values]
        known = [value for value in shown if value is not None]
        figure.add_bar(
            x=shown,
            y=labels,
            orientation="h",
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            marker={"color": [SERIES[i % len(SERIES)] for i in range(len(names))]},
            text=["" if value is None else digits(value) for value in shown],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"%{{y}}<br>{escape(panel.title)} %{{x:,.4~g}}<extra></extra>",
        )
        common = figure.layout.xaxis.to_plotly_json()
        plain = {"showgrid": False, "showline": False, "automargin": True}
        figure.update_layout(
            {
                f"xaxis{axis}": common
                | plain
                | {"range": [0, 1.25 * max(known) or 1], "anchor": f"y{axis}", "showticklabels": False},
                f"yaxis{axis}": plain
                | {
                    "domain": [top - whole, top - whole * _TITLE_PX / panel_px],
                    "anchor": f"x{axis}",
                    "autorange": "reversed",
                },
            }
        )
        at = {
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "y": top - whole * 10 / panel_px,
            "xanchor": "left",
            "yanchor": "top",
        }
        figure.add_annotation(text=f"<b>{escape(panel.title)}</b>", showarrow=False, **at)
    return figure


def empty_figure(x: str, y: str) -> go.Figure:
    """A figure without traces in the style of all pages, its axes named."""
    axis = {
        "automargin": True,
        "zeroline": False,
        "gridcolor": "rgba(128,136,148,.22)",
        "linecolor": "rgba(128,136,148,.5)",
    }
    return go.Figure(
        layout={
            "template": "none",
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", "size": 13},
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
            "height": 330,
            "xaxis": axis | {"title": {"text": x, "standoff": 8, "font": {"size": 13}}, "showline": True},
            "yaxis": axis | {"title": {"text": y, "standoff": 8, "font": {"size": 13}}},
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
            "hoverlabel": {
                "namelength": -1,
                "bgcolor": "#171b21",
                "bordercolor": "#171b21",
                "font": {"color": "#ffffff"},
            },
        }
    )


def steps_per_point(steps: int) -> int:
    """Number of steps that one point of a curve stands for."""
    return max(1, math.ceil(steps / POINTS))


def _thinned(line: Line, middle: Middle) -> tuple[list[float], list[float | None]]:
    """At most `POINTS` points, each the middle of a stretch of the line.

    A stretch without any value is a gap.
    """
    size = steps_per_point(len(line.x))
    if size == 1:
        return list(line.x), list(line.y)
    stretches = [slice(start, start + size) for start in range(0, len(line.x), size)]
    known = [[y for y in line.y[stretch] if y is not None] for stretch in stretches]
    return [line.x[stretch][-1] for stretch in stretches], [middle(values) if values else None for values in known]
