"""A chart as plain values, which `templates/charts.js` draws; curves, and compared bars."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

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
Middle = Callable[[Sequence[float]], float]
_BAR_PX, _TITLE_PX = 24, 46
_LABEL_WIDTH = 26  # characters; a longer plan is broken into lines
POINTS = 400  # a curve of more is drawn by the means of its stretches


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


def lines(
    series: Sequence[Line],
    over: str,
    what: str,
    *,
    marks: Sequence[Mark] = (),
    middle: Middle = statistics.fmean,
    log_if_wide: bool = False,
) -> Figure:
    """Series over one axis; `marks` are events."""
    figure = Figure(Axis(over), Axis(what), legend=len(series) > 1)
    for line in series:
        x, y = (list(line.x), list(line.y)) if line.marked else thinned(line, middle)
        dash: Dash = "dash" if line.dashed else "solid"
        figure.traces.append(Points(line.name, x, y, line.colour, dash=dash, marks=7 if line.marked else 0))
    figure.rules = [Rule(mark.x, mark.text, PURPLE, "dot") for mark in marks]
    values = [y for line in series for y in line.y if y is not None and math.isfinite(y)]
    if log_if_wide and values and min(values) > 0 and max(values) > 30 * min(values):
        figure.y.log = True
    elif not all(line.marked for line in series) and (not values or min(values) >= 0):
        figure.y.from_zero = True
    return figure


def panelled(names: Sequence[str], panels: Sequence[Panel]) -> Figure:
    """A bar per name in each panel, panels under each other, empty ones left out."""
    labels = ["\n".join(textwrap.wrap(name, _LABEL_WIDTH)) for name in names]
    rows = sum(label.count("\n") + 1 for label in labels)
    places, place = [], 0.0
    for label in labels:
        lines_of_label = label.count("\n") + 1
        places.append(place + lines_of_label / 2)
        place += lines_of_label
    drawn = [
        _panel(panel, labels, places, rows) for panel in panels if any(value is not None for value in panel.values)
    ]
    return Figure(height=sum(panel.height for panel in drawn), legend=False, panels=drawn)


def _panel(panel: Panel, labels: Sequence[str], places: Sequence[float], rows: int) -> Figure:
    shown = [None if value is None else value * panel.factor for value in panel.values]
    most = max(value for value in shown if value is not None)
    bars = Bars(
        panel.title,
        shown,
        places,
        [SERIES[i % len(SERIES)] for i in range(len(labels))],
        words=["" if value is None else str(digits(value)) for value in shown],
    )
    return Figure(
        Axis(panel.title, span=(0, 1.25 * most or 1), ticks=(), grid=False),
        Axis(span=(rows, 0), ticks=list(zip(places, labels, strict=True)), grid=False),
        height=_TITLE_PX + _BAR_PX * rows,
        traces=[bars],
        legend=False,
    )


def steps_per_point(steps: int) -> int:
    """Number of steps that one point of a curve stands for."""
    return max(1, math.ceil(steps / POINTS))


def thinned(line: Line, middle: Middle) -> tuple[list[float], list[float | None]]:
    """At most `POINTS` points, each the middle of a stretch of the line. A stretch without any value is a gap."""
    size = steps_per_point(len(line.x))
    if size == 1:
        return list(line.x), list(line.y)
    stretches = [slice(start, start + size) for start in range(0, len(line.x), size)]
    known = [[y for y in line.y[stretch] if y is not None] for stretch in stretches]
    return [line.x[stretch][-1] for stretch in stretches], [middle(values) if values else None for values in known]


Dash = Literal["solid", "dash", "dot", "dashdot"]
INK = "currentColor"  # the colour of the page's text, in the light and the dark theme


@dataclass
class Axis:
    """One axis of a figure.

    Attributes:
        span: first and last value of the axis, in either order; None: the range of the drawn values.
        ticks: values with their labels; None: round numbers.
        from_zero: whether the axis begins at 0; `span` overrides it.
    """

    title: str = ""
    log: bool = False
    span: tuple[float, float] | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    from_zero: bool = False
    grid: bool = True


@dataclass
class Points:
    """Points with a line through them, marks at them, or both.

    Attributes:
        x, y: values; a y of None is a gap.
        width: width of the line in pixels; 0: no line.
        steps: whether the line is a staircase: along x first, then along y.
        marks: sizes of the marks in pixels, one for all or one each; 0: no mark.
        mark_colours: colours of the marks, if different from the colour of the line.
        symbol: shapes of the marks, one for all or one each: `circle`, `ring`, `square`, `diamond`, `triangle`,
            `cross`, `star` or `tick`.
        words: a text beside each point, on the side that `side` names.
        low, high: ends of each point's interval.
        fill: `area` fills the closed line, `stack` fills the space above the previous traces.
        hints: a pointer text for each point; None: names and values, (): no text.
        in_legend: whether the legend has the name.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    width: float = 2
    dash: Dash = "solid"
    steps: bool = False
    marks: float | Sequence[float] = 0
    mark_colours: Sequence[str] | None = None
    symbol: str | Sequence[str] = "circle"
    words: Sequence[str] | None = None
    side: str = "right"
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    fill: Literal["", "area", "stack"] = ""
    hints: Sequence[str] | None = None
    in_legend: bool = True


@dataclass
class Bars:
    """Horizontal bars at places of the y axis.

    Attributes:
        x: lengths of the bars; None draws no bar.
        y: places of the bars.
        colour, opacity: one for all or one each.
        starts: begin of each bar; None: 0, or the end of the previous bar if the figure stacks bars.
        thick: thickness of the bars, as a fraction of the distance between two places.
        edge: width of each bar's edge, in pixels.
        words: a text at the end of each bar.
        low, high: ends of each bar's interval.
        hints: a pointer text for each bar; None: its name and its length.
    """

    name: str
    x: Sequence[float | None]
    y: Sequence[float]
    colour: str | Sequence[str]
    opacity: Sequence[float] | None = None
    starts: Sequence[float] | None = None
    thick: float = 0.72
    edge: float = 0
    words: Sequence[str] | None = None
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    hints: Sequence[str] | None = None


@dataclass
class Note:
    """A text at a place of the y axis.

    The text begins at the left edge of the chart or, if `inside`, at the left edge of its axes.
    """

    text: str
    y: float
    bold: bool = False
    inside: bool = False


@dataclass
class Rule:
    """A vertical line at a value of the x axis, with a text along it."""

    x: float
    text: str
    colour: str
    dash: Dash = "dash"


@dataclass
class Figure:
    """A chart, or several below each other (`panels`).

    Attributes:
        height: height in pixels, including the legend.
        unified: whether the hint shows all traces at one x.
        stacked: whether bars at one place follow each other.
    """

    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    height: int = 330
    traces: list[Points | Bars] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    legend: bool = True
    unified: bool = False
    stacked: bool = False
    panels: list[Figure] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        """The figure as JSON values, without defaults; non-finite numbers become None."""
        found: dict[str, Any] = _plain(self)
        return found


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        kind = {"kind": type(value).__name__.lower()} if isinstance(value, Points | Bars) else {}
        return kind | {f.name: _plain(own) for f in fields(value) if (own := getattr(value, f.name)) != _default(f)}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _default(of: Any) -> Any:
    return of.default_factory() if of.default_factory is not MISSING else of.default
