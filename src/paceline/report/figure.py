"""A chart as plain values: axes, points, bars and notes, which `templates/charts.js` draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

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
