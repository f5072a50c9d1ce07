"""SVG drawings of the figures in `charts`, for pages and image files. They need no JavaScript.

Horizontal positions are percentages of the chart's width, so a drawing fits every window and its text keeps its size.
Vertical positions are in pixels. Paths have their own coordinate system, which is stretched along x.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from markupsafe import Markup, escape

from paceline.report.charts import Axis, Bars, Figure, Points, Rule

T = TypeVar("T")
_DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "8 3 2 3", "long": "14 5"}
_TURN = {"above": (-7, -9, "end"), "below": (7, 17, "start"), "left": (-7, 15, "end"), "right": (9, 4, "start")}
_WIDE = 1000  # width of the coordinate system of paths
_HINTS = 60  # largest number of tooltips of a curve
_WIDTHS = (260, 440, 860)  # axis widths in pixels, for which labels are chosen: phone, half page, full page
_FONT_PX, _LINE_PX = 13, 16
_X_PX, _TITLE_PX = 22, 20  # heights of the labels and of the title under the x axis
_KEY_PX = 22
_MARGIN_PX = 20  # margin of an image, left and right together


def chart(figure: Figure) -> Markup:
    """Draw a figure with its legend as HTML, for the style sheet of the pages."""
    legend = Markup("") if figure.panels or not figure.legend else _legend(figure.traces)
    return legend + Markup("").join(_block(panel) for panel in figure.panels or [figure])


def picture(figure: Figure, width: int, title: str, style: str) -> str:
    """Draw a figure as a standalone SVG file.

    Args:
        width: width of the picture in pixels.
        title: description for screen readers.
        style: style sheet for the elements of the drawing.
    """
    parts, height = [], 0
    for panel in figure.panels or [figure]:
        axes = _Axes(panel, width)
        left = max((text_px(line) for label in axes.labels for line in label.split("\n")), default=0) + 12
        if panel.y.title or axes.heading:
            parts.append(f'<text class="head" x="0" y="{height + 14}">{escape(axes.heading or panel.y.title)}</text>')
            height += _TITLE_PX
        inside = f'x="{left}" y="{height}" width="{width - left - 20}" height="{axes.height}"'
        parts.append(f'<svg {inside} overflow="visible">{axes.drawn()}</svg>')
        height += axes.height
    if figure.legend:
        keys, x = [], 0
        for trace in figure.traces:
            if not isinstance(trace, Points) or trace.in_legend:
                if x and x + text_px(trace.name) + 44 > width:
                    x, height = 0, height + 20
                key = f'<svg x="{x}" y="{height + 5}" width="{_KEY_PX}" height="10">{_key(trace)}</svg>'
                keys.append(f'{key}<text x="{x + 28}" y="{height + 15}">{escape(trace.name)}</text>')
                x += text_px(trace.name) + 44
        parts += keys
        height += 24
    wide, high, corner = width + _MARGIN_PX, height + _MARGIN_PX, -_MARGIN_PX // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" width="{wide}" height="{high}" role="img" '
        f'viewBox="{corner} {corner} {wide} {high}"><title>{escape(title)}</title><style>{style}</style>'
        f'<rect class="paper" x="{corner}" y="{corner}" width="100%" height="100%"/>'
        f"{''.join(parts)}</svg>\n"
    )


def text_px(text: str) -> int:
    """Estimate the width of a text in pixels, because the font is not known."""
    widths = {**dict.fromkeys("il.,:;'| ", 0.36), **dict.fromkeys("mwMW%", 0.92)}
    return math.ceil(_FONT_PX * sum(widths.get(letter, 0.63) for letter in text))


def _block(figure: Figure) -> Markup:
    """Draw axes below their heading. The longest y label determines the left margin."""
    axes = _Axes(figure)
    heading = axes.heading or figure.y.title
    head = f'<div class="{"bold" if axes.heading else "ytitle"}">{escape(heading)}</div>' if heading else ""
    label = max((line for text in axes.labels for line in text.split("\n")), key=text_px, default="")
    room = f'<span class="room" aria-hidden="true">{escape(label)}</span>'
    return Markup(f'{head}<div class="axes">{room}<svg width="100%" height="{axes.height}">{axes.drawn()}</svg></div>')


def _legend(traces: Sequence[Points | Bars]) -> Markup:
    named = [trace for trace in traces if not isinstance(trace, Points) or trace.in_legend]
    keys = "".join(
        f'<span><svg width="{_KEY_PX}" height="10">{_key(trace)}</svg>{escape(trace.name)}</span>' for trace in named
    )
    return Markup(f'<div class="legend">{keys}</div>')


def _key(trace: Points | Bars) -> str:
    """Draw the sample of a trace for the legend."""
    colour = _at(trace.colour, 0)
    if isinstance(trace, Bars) or trace.fill == "stack" or (trace.fill and not trace.width):
        look = "band" if not isinstance(trace, Bars) and trace.fill == "band" else "edge"
        return f'<rect class="{look}" width="{_KEY_PX}" height="10" fill="{colour}"/>'
    line = f'<path d="M0 5H{_KEY_PX}" {_stroke(trace)}/>' if trace.width else ""
    if not trace.marks:
        return line
    size = min(_at(trace.marks, 0), 9)
    return line + f'<g transform="translate({_KEY_PX / 2} 5)">{_symbol(_at(trace.symbol, 0), size, colour)}</g>'


@dataclass
class _Placed:
    """A trace with its start and end positions, which may depend on earlier traces.

    Attributes:
        starts, ends: for bars, the start and end of each bar along x. For a stacked area, its lower and upper edge
            along y at each point.
    """

    trace: Points | Bars
    starts: list[float]
    ends: list[float]


class _Axes:
    """A pair of axes with its traces."""

    def __init__(self, figure: Figure, width: int | None = None) -> None:
        self.figure = figure
        # an image has a fixed width; on a page, the style sheet hides labels that do not fit
        self.tier = len(_WIDTHS) if width is None else sum(width > each + 60 for each in _WIDTHS) - 1
        # a panel of bars has a title above, and no labels below
        self.heading = figure.x.title if figure.x.ticks is not None and not figure.x.ticks else ""
        self.heading = "" if figure.stacked else self.heading
        self.placed = _placed(figure)
        self.span_x = _span(figure.x, "x", self.placed, [rule.x for rule in figure.rules])
        self.span_y = _span(figure.y, "y", self.placed, [])
        self.height = figure.height
        self.top = 4 if self.heading else 8
        self.bottom = self.height - (4 if self.heading else _X_PX + (_TITLE_PX if figure.x.title else 0))
        self._x, self._y = _scale(figure.x, self.span_x), _scale(figure.y, self.span_y)
        self.ticks_x = _ticks(figure.x, self.span_x, 7)
        self.ticks_y = _ticks(figure.y, self.span_y, (self.bottom - self.top) / 45)
        self.labels = [text for _, text in self.ticks_y]

    def x(self, value: float) -> float:
        """Return the position of a value along x, from 0 to 1."""
        return self._x(value)

    def y(self, value: float) -> float:
        """Return the position of a value along y, in pixels from the top."""
        return self.bottom - self._y(value) * (self.bottom - self.top)

    def drawn(self) -> str:
        """Draw all elements, from the bottom layer to the top layer."""
        traces = "".join(map(self._trace, self.placed))
        notes = "".join(
            f'<text class="note{" bold" if note.bold else ""}" x="0" y="{self.y(note.y) + 4:.1f}">'
            f"{escape(note.text)}</text>"
            for note in self.figure.notes
        )
        return f"{self._frame()}{self._hints()}{traces}{''.join(map(self._rule, self.figure.rules))}{notes}"

    def _frame(self) -> str:
        figure, parts = self.figure, []
        tiers = _tiers([(self.x(value), text) for value, text in self.ticks_x])
        for (value, text), tier in zip(self.ticks_x, tiers, strict=True):
            at = _percent(self.x(value))
            if figure.x.grid:
                parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{self.top}" y2="{self.bottom}"/>')
            if tier is not None and tier <= self.tier:
                turn = 'text-anchor="end" dx="14"' if self.x(value) > 0.97 and len(text) > 4 else 'text-anchor="middle"'
                place = f'x="{at}" y="{self.bottom + 16}" {turn}'
                parts.append(f'<text class="xtick tier-{tier}" {place}>{escape(text)}</text>')
        for value, text in self.ticks_y:
            y, lines = self.y(value), text.split("\n")
            if figure.y.grid:
                parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
            for number, line in enumerate(lines):
                down = y + 4 + (number - (len(lines) - 1) / 2) * _LINE_PX
                parts.append(f'<text class="ytick" x="-7" y="{down:.1f}" text-anchor="end">{escape(line)}</text>')
        if not self.heading:
            parts.append(f'<line class="axis" x1="0" x2="100%" y1="{self.bottom}" y2="{self.bottom}"/>')
            if figure.x.title:
                place = f'x="50%" y="{self.height - 6}" text-anchor="middle"'
                parts.append(f'<text class="xtitle" {place}>{escape(figure.x.title)}</text>')
        return "".join(parts)

    def _rule(self, rule: Rule) -> str:
        place = self.x(rule.x)
        if not -0.01 <= place <= 1.01:
            return ""
        dash = f'stroke-dasharray="{_DASHES[rule.dash]}"'
        line = f'<path d="M0 {self.top}V{self.bottom}" stroke="{rule.colour}" stroke-width="1.5" {dash}/>'
        beside = f"translate({-5 if place > 0.02 else 13} {self.top + 2}) rotate(-90)"
        text = f'<text class="note" text-anchor="end" transform="{beside}">{escape(rule.text)}</text>'
        return f'<svg class="rule" x="{_percent(place)}">{line}{text if rule.text else ""}</svg>'

    # Traces

    def _trace(self, placed: _Placed) -> str:
        trace = placed.trace
        kind = "bars" if isinstance(trace, Bars) else "points"
        inside = self._bars(trace, placed) if isinstance(trace, Bars) else self._points(trace, placed)
        return f'<g class="trace {kind}" data-name="{escape(trace.name)}">{"".join(inside)}</g>'

    def _bars(self, bars: Bars, placed: _Placed) -> Iterator[str]:
        row = abs(self.y(1) - self.y(0))
        thick = min(bars.thick * row, 26)
        low, high = min(self.span_x), max(self.span_x)
        for number, (length, start, end) in enumerate(zip(bars.x, placed.starts, placed.ends, strict=True)):
            if length is None or not math.isfinite(length):
                continue
            first, last = self.x(min(max(start, low), high)), self.x(min(max(end, low), high))
            middle = self.y(bars.y[number])
            hint = bars.hints[number] if bars.hints else f"{bars.name} {number_text(length)}"
            opacity = f' fill-opacity="{bars.opacity[number]:g}"' if bars.opacity else ""
            if last > first:
                yield (
                    f'<rect class="point edge" x="{_percent(first)}" y="{middle - thick / 2:.1f}" '
                    f'width="{_percent(last - first)}" height="{thick:.1f}" fill="{_at(bars.colour, number)}"{opacity}>'
                    f"<title>{escape(hint)}</title></rect>"
                )
            if bars.low and bars.high and bars.low[number] < bars.high[number]:
                ends = [_percent(self.x(min(max(value[number], low), high))) for value in (bars.low, bars.high)]
                yield f'<line class="interval" x1="{ends[0]}" x2="{ends[1]}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
                cap = f'y1="{middle - 4:.1f}" y2="{middle + 4:.1f}"'
                yield from (f'<line class="interval" x1="{end}" x2="{end}" {cap}/>' for end in ends)
            if bars.words and bars.words[number]:
                far = bars.high[number] if bars.high else end
                yield _word(self.x(min(max(far, end), high)), middle, (6, 4, "start"), bars.words[number])

    def _points(self, points: Points, placed: _Placed) -> Iterator[str]:
        xs, ys = [self.x(value) for value in points.x], [self._height(value) for value in placed.ends]
        within = f'y="{self.top - 4}" height="{self.bottom - self.top + 8}"'
        box = f'viewBox="0 {self.top - 4} {_WIDE} {self.bottom - self.top + 8}" preserveAspectRatio="none"'
        paths = "".join(self._paths(points, xs, ys, placed))
        if paths:
            yield f'<svg class="in" width="100%" {within} {box}>{paths}</svg>'
        for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if y is None or not -0.001 <= x <= 1.001 or not self.top - 1 <= y <= self.bottom + 1:
                continue
            yield from self._mark(points, number, x, y)

    def _mark(self, points: Points, number: int, x: float, y: float) -> Iterator[str]:
        """Draw the interval of a point, its mark with the tooltip, and its label."""
        place = f'x="{_percent(x)}"'
        if points.low and points.high and not points.fill:
            low, high = (self._height(end[number]) for end in (points.low, points.high))
            if low is not None and high is not None and low > high:
                path = f"M0 {low:.1f}V{high:.1f}M-4 {low:.1f}h8M-4 {high:.1f}h8"
                yield f'<svg {place}><path class="interval" d="{path}" stroke="{points.colour}"/></svg>'
        size, hint = _at(points.marks, number), self._hint(points, number)
        if size or hint:
            colour = points.mark_colours[number] if points.mark_colours else points.colour
            mark = _symbol(_at(points.symbol, number), size, colour) if size else '<circle class="unseen" r="7"/>'
            title = f"<title>{escape(hint)}</title>" if hint else ""
            yield f'<svg {place} y="{y:.1f}">{title}{mark}</svg>'
        if points.words and points.words[number]:
            dx, dy, anchor = _TURN[points.side]
            if anchor == "start" and x > 0.86:
                dx, anchor = -dx, "end"
            elif anchor == "end" and x < 0.14:
                dx, anchor = -dx, "start"
            yield _word(x, y, (dx, dy, anchor), points.words[number])

    def _hint(self, points: Points, number: int) -> str:
        """Return the tooltip of a point. A line without marks has no tooltips at its points; see `_hints`."""
        if points.hints is not None:
            return points.hints[number] if points.hints else ""
        if not points.marks:
            return ""
        value = points.y[number]
        shown = "" if value is None else f" {number_text(value)}"
        return f"{points.name}{shown}, {number_text(points.x[number])} {self.figure.x.title}"

    def _paths(self, points: Points, xs: Sequence[float], ys: Sequence[float | None], placed: _Placed) -> Iterator[str]:
        if points.fill == "stack":
            floor = [self._height(value) for value in placed.starts]
            if area := _area(xs, ys, floor):
                yield f'<path class="edge" d="{area}" fill="{points.colour}"/>'
        elif points.fill == "band" and points.low and points.high:
            high, low = ([self._height(value) for value in end] for end in (points.high, points.low))
            yield f'<path d="{_area(xs, high, low)}" fill="{points.colour}" class="band" stroke="{points.colour}"/>'
        if points.width and (path := _line(xs, ys, points.steps)):
            yield f'<path d="{path}" {_stroke(points)}/>'

    def _height(self, value: float | None) -> float | None:
        if value is None or not math.isfinite(value) or (self.figure.y.log and value <= 0):
            return None
        return self.y(value)

    # The pointer

    def _hints(self) -> str:
        """Draw invisible areas whose tooltips show the values of all curves."""
        curves = [
            one.trace
            for one in self.placed
            if isinstance(one.trace, Points) and one.trace.hints is None and not one.trace.marks and one.trace.x
        ]
        at = sorted({x for curve in curves for x in curve.x})
        if not at:
            return ""
        size = math.ceil(len(at) / _HINTS)
        middles = [group[len(group) // 2] for group in (at[i : i + size] for i in range(0, len(at), size))]
        places = [self.x(x) for x in middles]
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(places)), 1.0]
        return "".join(
            f'<rect class="unseen" x="{_percent(first)}" width="{_percent(max(last - first, 0))}" y="{self.top}" '
            f'height="{self.bottom - self.top}"><title>{escape(self._values_at(curves, x))}</title></rect>'
            for x, (first, last) in zip(middles, pairwise(edges), strict=True)
        )

    def _values_at(self, curves: Sequence[Points], x: float) -> str:
        lines = [f"{number_text(x)} {self.figure.x.title}"]
        for curve in curves:
            number = min(bisect_left(curve.x, x), len(curve.x) - 1)
            value = curve.y[number]
            low, high = (end[number] if end else None for end in (curve.low, curve.high))
            between = "" if low is None or high is None else f" ({number_text(low)} to {number_text(high)})"
            lines.append(f"{curve.name} {'no value' if value is None else number_text(value)}{between}")
        return "\n".join(lines)


def number_text(value: float) -> str:
    """Format a number with up to four significant digits, for axes and tooltips."""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e15:
        mantissa, _, power = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(power)}" if power else mantissa
    places = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _placed(figure: Figure) -> list[_Placed]:
    """Compute where every trace starts and ends. A stacked trace starts at the end of the previous trace."""
    found, reached, tops = [], dict[float, float](), list[float]()
    for trace in figure.traces:
        if isinstance(trace, Bars):
            starts, ends = [], []
            for number, length in enumerate(trace.x):
                start = trace.starts[number] if trace.starts else 0.0
                if figure.stacked:
                    start = reached.get(trace.y[number], 0.0)
                    reached[trace.y[number]] = start + (length or 0.0)
                starts.append(start)
                ends.append(start + (length or 0.0))
            found.append(_Placed(trace, starts, ends))
        elif trace.fill == "stack":
            starts = [*tops, *[0.0] * (len(trace.y) - len(tops))]
            tops = [start + (y or 0.0) for start, y in zip(starts, trace.y, strict=True)]
            found.append(_Placed(trace, starts, tops))
        else:
            found.append(_Placed(trace, [], list(trace.y)))  # type: ignore[arg-type]
    return found


def _along(placed: _Placed, axis: str) -> Iterator[float | None]:
    """Yield the values of a trace that must lie within an axis."""
    trace = placed.trace
    if isinstance(trace, Bars):
        if axis == "y":
            yield from (y + side for y in trace.y for side in (-0.5, 0.5))
        else:
            yield from (*placed.starts, *placed.ends, *(trace.high or ()))
        return
    yield from trace.x if axis == "x" else placed.ends
    if axis == "y":
        yield from (*(trace.low or ()), *(trace.high or ()))


def _span(axis: Axis, name: str, placed: Sequence[_Placed], more: Sequence[float]) -> tuple[float, float]:
    """Return the first and last value of an axis."""
    if axis.span:
        return axis.span
    values = [value for one in placed for value in _along(one, name) if value is not None and math.isfinite(value)]
    values = [value for value in (*values, *more) if not axis.log or value > 0]
    if not values:
        return (1.0, 10.0) if axis.log else (0.0, 1.0)
    low, high = min(values), max(values)
    if axis.log:
        room = max(1.08, (high / low) ** 0.05)
        return low / room, high * room
    low = min(low, 0.0) if axis.from_zero else low
    room = 0.05 * (high - low or abs(high) or 1.0)
    lines = all(isinstance(one.trace, Points) and not one.trace.marks for one in placed)
    if name == "x" and lines and high > low:
        return low, high
    return low if axis.from_zero and low == 0 else low - room, high + room


def _scale(axis: Axis, span: tuple[float, float]) -> Callable[[float], float]:
    """Return a function that maps values on an axis to positions between 0 and 1."""
    turn: Callable[[float], float] = math.log10 if axis.log else float
    first, last = turn(span[0]), turn(span[1])
    return lambda value: (turn(value) - first) / ((last - first) or 1.0)


def _ticks(axis: Axis, span: tuple[float, float], count: float) -> list[tuple[float, str]]:
    """Return the ticks of the axis with labels, or else round numbers."""
    low, high = min(span), max(span)
    slack = 1e-9 * (high - low)
    if axis.ticks is not None:
        return [(value, text) for value, text in axis.ticks if low - slack <= value <= high + slack]
    if axis.log and high / low > 5:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        most = 1.2 * max(count, 3)
        for digits in ((1, 2, 5), (1,)):
            found = [d * 10.0**power for power in powers for d in digits if low <= d * 10.0**power <= high]
            if len(found) <= most or digits == (1,):
                break
        return [(value, number_text(value)) for value in found[:: math.ceil(len(found) / most) or 1]]
    rough = (high - low) / max(count, 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(number * step, number_text(number * step)) for number in numbers]


def _tiers(labels: Sequence[tuple[float, str]]) -> list[int | None]:
    """Return for each label the narrowest of `_WIDTHS` at which the label fits.

    The widths are given as indices. The entry is None if a label fits at no width.
    """
    found: list[int | None] = [None] * len(labels)
    taken: list[tuple[float, int]] = []
    for tier, width in enumerate(_WIDTHS):
        for number, (place, text) in enumerate(labels):
            own = text_px(text)
            free = all(abs(place - other) * width >= (own + size) / 2 + 6 for other, size in taken)
            if found[number] is None and free:
                found[number] = tier
                taken.append((place, own))
    return found


def _line(xs: Sequence[float], ys: Sequence[float | None], steps: bool = False) -> str:
    """Return an SVG path through points.

    A missing point leaves a gap. A point between two gaps is drawn as a dot.
    """
    path, before = "", False
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if y is None:
            before = False
            continue
        across, down = f"{x * _WIDE:.1f}", f"{y:.1f}"
        after = number + 1 < len(ys) and ys[number + 1] is not None
        path += f"L{across} {down}" if before and not steps else f"H{across}V{down}" if before else f"M{across} {down}"
        path += "" if before or after else "h.1"
        before = True
    return path


def _area(xs: Sequence[float], tops: Sequence[float | None], floors: Sequence[float | None]) -> str:
    """Return an SVG path around the area between two curves. Gaps divide the area."""
    path, stretch = "", list[tuple[float, float, float]]()
    for x, top, floor in [*zip(xs, tops, floors, strict=True), (0.0, None, None)]:
        if top is not None and floor is not None:
            stretch.append((x * _WIDE, top, floor))
        elif stretch:
            there = "L".join(f"{x:.1f} {top:.1f}" for x, top, _ in stretch)
            back = "L".join(f"{x:.1f} {floor:.1f}" for x, _, floor in reversed(stretch))
            path += f"M{there}L{back}Z"
            stretch = []
    return path


def _symbol(kind: str, size: float, colour: str) -> str:
    """Draw a mark with its centre at the origin."""
    r = size / 2
    style = f'class="point" fill="{"none" if kind == "ring" else colour}" stroke="{colour}" stroke-width="1.5"'
    corners: dict[str, list[tuple[float, float]]] = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "diamond": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
        "triangle": [(0, -1.1), (1.1, 0.9), (-1.1, 0.9)],
        "star": [
            (reach * math.sin(i * math.pi / 5), -reach * math.cos(i * math.pi / 5))
            for i, reach in enumerate([1.1, 0.45] * 5)
        ],
    }
    if kind == "cross":
        return f'<path {style} d="M{-r} {-r}L{r} {r}M{r} {-r}L{-r} {r}"/>'
    if kind == "tick":
        return f'<path class="point" stroke="{colour}" stroke-width="3" d="M0 {-r}V{r}"/>'
    if kind in corners:
        return f'<path {style} d="M{"L".join(f"{r * a:.1f} {r * b:.1f}" for a, b in corners[kind])}Z"/>'
    return f'<circle {style} r="{r:g}"/>'


def _stroke(points: Points) -> str:
    dash = f' stroke-dasharray="{_DASHES[points.dash]}"' if _DASHES[points.dash] else ""
    return f'class="line" stroke="{points.colour}" stroke-width="{points.width:g}"{dash}'


def _word(x: float, y: float, turn: tuple[float, float, str], text: str) -> str:
    dx, dy, anchor = turn
    place = f'x="{_percent(x)}" y="{y:.1f}" dx="{dx:g}" dy="{dy:g}" text-anchor="{anchor}"'
    return f'<text class="word" {place}>{escape(text)}</text>'


def _percent(part: float) -> str:
    return f"{100 * part:.2f}".rstrip("0").rstrip(".") + "%"


def _at(values: Any, number: int) -> Any:
    return values if isinstance(values, str | int | float) else values[number]
