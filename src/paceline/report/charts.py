"""Data classes that describe charts, which `svg` draws."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.units import digits

# Colours of the style sheet, which defines each for light and dark pages. Line colours contrast with the page. Area
# colours differ in brightness, so they stay distinct in greyscale. From dark to light: BLUE, GREY, VERMILLION, SLATE,
# LEAF, AMBER, PINK, PALE, ICE.
BLUE, VERMILLION, GREEN = "var(--blue)", "var(--vermillion)", "var(--green)"
PURPLE, OCHRE, AZURE, GREY = "var(--purple)", "var(--ochre)", "var(--azure)", "var(--grey)"
LEAF, AMBER, PINK, ICE = "var(--leaf)", "var(--amber)", "var(--pink)", "var(--ice)"
PALE, SLATE = "var(--pale)", "var(--slate)"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, OCHRE, AZURE)
Middle = Callable[[Sequence[float]], float]
_BAR_PX, _TITLE_PX = 24, 16
_LABEL_WIDTH = 24  # characters; a longer label is wrapped
_FEWEST = 100  # minimum number of points of each curve in a chart of many curves
POINTS = 400  # a curve with more points is drawn as the middle, minimum and maximum of intervals


@dataclass(frozen=True)
class Line:
    """Series of points. A `y` of None leaves a gap. A long series is thinned unless it is `marked`."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str = BLUE
    marked: bool = False


@dataclass(frozen=True)
class Mark:
    """Event at position `x`, drawn as a vertical line."""

    x: float
    text: str


@dataclass(frozen=True)
class Panel:
    """Values of one figure, one value for each compared item.

    A missing value is None. Values are multiplied by `factor` when they are drawn.
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
    """Draw series over a common x axis. Each event in `marks` becomes a vertical line."""
    figure = Figure(Axis(over), Axis(what), legend=len(series) > 1)
    symbols = ["circle", "square", "diamond", "triangle"]
    for number, line in enumerate(series):
        if line.marked:
            mark = symbols[number % len(symbols)]
            figure.traces.append(Points(line.name, line.x, line.y, line.colour, marks=7, symbol=mark))
            continue
        short = thinned(line, middle, max(_FEWEST, 2 * POINTS // max(len(series), 2)))
        points = Points(line.name, short.x, short.y, line.colour, dash=DASHES[number % len(DASHES)])
        if short.low:
            points.low, points.high, points.fill = short.low, short.high, "band"
        figure.traces.append(points)
    figure.rules = [Rule(mark.x, mark.text, PURPLE, "dot") for mark in marks]
    values = [y for line in series for y in line.y if y is not None and math.isfinite(y)]
    if log_if_wide and values and min(values) > 0 and max(values) > 30 * min(values):
        figure.y.log = True
    elif not all(line.marked for line in series) and (not values or min(values) >= 0):
        figure.y.from_zero = True
    return figure


def panelled(names: Sequence[str], panels: Sequence[Panel]) -> Figure:
    """Draw panels below each other, each with one bar per name.

    Panels without values are skipped.
    """
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
    """Return the number of steps that each point of a curve represents."""
    return max(1, math.ceil(steps / POINTS))


@dataclass(frozen=True)
class Thinned:
    """Line that has been reduced to a limited number of points.

    Attributes:
        x, y: for each interval, its last x and the mean or median of its y values. A y is None if the interval has no
            values.
        low, high: minimum and maximum of each interval; empty if the line did not have to be reduced.
    """

    x: list[float]
    y: list[float | None]
    low: list[float | None]
    high: list[float | None]


def thinned(line: Line, middle: Middle, most: int = POINTS) -> Thinned:
    """Reduce a line to at most `most` intervals.

    The minimum and maximum of each interval preserve spikes.
    """
    size = math.ceil(len(line.x) / most) or 1
    if size == 1:
        return Thinned(list(line.x), list(line.y), [], [])
    stretches = [slice(start, start + size) for start in range(0, len(line.x), size)]
    known = [[y for y in line.y[stretch] if y is not None and math.isfinite(y)] for stretch in stretches]
    return Thinned(
        [line.x[stretch][-1] for stretch in stretches],
        [middle(values) if values else None for values in known],
        [min(values, default=None) for values in known],
        [max(values, default=None) for values in known],
    )


Dash = Literal["solid", "dash", "dot", "dashdot", "long"]
# patterns that distinguish lines without colours
DASHES: tuple[Dash, ...] = ("solid", "dash", "dot", "dashdot", "long")
INK = "currentColor"  # colour of the page's text in either theme


@dataclass
class Axis:
    """One axis of a figure.

    Attributes:
        span: first and last value of the axis; None means the range of the drawn values. An axis may run from high to
            low.
        ticks: values with their labels; None places ticks at round numbers.
        from_zero: whether the axis begins at 0; `span` overrides this.
    """

    title: str = ""
    log: bool = False
    span: tuple[float, float] | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    from_zero: bool = False
    grid: bool = True


@dataclass
class Points:
    """Points, drawn as a line, as marks, or as both.

    Attributes:
        x, y: coordinates of the points; a y of None leaves a gap.
        width: width of the line in pixels; 0 draws no line.
        steps: whether the line is a staircase that goes along x first and then along y.
        marks: sizes of the marks in pixels, one for all points or one per point; 0 draws no mark.
        mark_colours: colours of the marks; None uses the colour of the line.
        symbol: shapes of the marks, one for all points or one per point: `circle`, `ring`, `square`, `diamond`,
            `triangle`, `cross`, `star` or `tick`.
        words: label of each point.
        side: position of the labels relative to their points.
        low, high: lower and upper end of each point's interval.
        fill: `band` fills the space between `low` and `high`; `stack` fills the space above the previous traces.
        hints: tooltip of each point; None shows names and values, and an empty sequence shows none.
        in_legend: whether the legend includes these points.
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
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    fill: Literal["", "band", "stack"] = ""
    hints: Sequence[str] | None = None
    in_legend: bool = True


@dataclass
class Bars:
    """Horizontal bars.

    Attributes:
        x: lengths of the bars. A length of None draws no bar.
        y: positions of the bars on the y axis.
        colour, opacity: one value for all bars or one per bar.
        starts: start of each bar. With None, a bar starts at 0, or at the end of the previous bar in a stacked figure.
        thick: thickness of the bars, as a fraction of the distance between adjacent bars.
        words: label at the end of each bar.
        low, high: lower and upper end of each bar's interval.
        hints: tooltip of each bar; None shows its name and length.
    """

    name: str
    x: Sequence[float | None]
    y: Sequence[float]
    colour: str | Sequence[str]
    opacity: Sequence[float] | None = None
    starts: Sequence[float] | None = None
    thick: float = 0.72
    words: Sequence[str] | None = None
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    hints: Sequence[str] | None = None


@dataclass
class Note:
    """Text at the left edge of the axes, level with a y value."""

    text: str
    y: float
    bold: bool = False


@dataclass
class Rule:
    """Vertical line at an x value, with text along the line."""

    x: float
    text: str
    colour: str
    dash: Dash = "dash"


@dataclass
class Figure:
    """A chart, or several charts below each other, called panels.

    Attributes:
        height: height of the axes in pixels, including the labels below them.
        stacked: whether each bar begins where the previous bar at the same position ends.
    """

    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    height: int = 290
    traces: list[Points | Bars] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    legend: bool = True
    stacked: bool = False
    panels: list[Figure] = field(default_factory=list)
