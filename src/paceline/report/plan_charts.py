"""Charts of a plan's page: time against memory and cost, parts, pipeline, more devices."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.planning.cost.layout import Span
from paceline.planning.explain.batch_advice import BatchAdvice
from paceline.planning.explain.what_if import ScaledPlan
from paceline.report.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from paceline.report.figure import Axis, Bars, Figure, Note, Points, Rule
from paceline.units import digits, percent, seconds

TIME_COLOURS = {
    "compute": BLUE,
    "recompute": SKY,
    "launch": "#5C6570",
    "tp": VERMILLION,
    "cp": "#8C2D04",
    "ep": PURPLE,
    "fsdp": ORANGE,
    "pp": "#F0E442",
    "bubble": "#C3C9D1",
    "dp": "#B35C9E",
    "optimizer": GREEN,
    "other": GREY,
}
SPAN_COLOURS = {"forward": BLUE, "backward": GREEN, "weight": ORANGE, "wait": "rgba(128,136,148,.22)"}
_HOLDER_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, "#F0E442", "#5C6570", "#8C2D04", GREY)


@dataclass(frozen=True)
class Point:
    """A plan in a picture of two figures; the larger, the worse for both."""

    name: str
    about: str
    x: float
    y: float


def pareto(
    points: Sequence[Point], x: str, *, room: float | None = None, log: bool = False, hours: bool = False
) -> Figure:
    """Step time (or `hours` of training) over something else; joined are those that no other beats in both.

    The first point is the plan that was chosen.

    `room`: the most that there is of x. Named in the picture are the chosen point, and those whose names are words.
    """
    factor, unit = (1.0, "h") if hours else (1e3, "ms") if max(p.y for p in points) < 1 else (1.0, "s")
    points = [replace(p, y=p.y * factor) for p in points]
    figure = Figure(Axis(x, grid=False), Axis("hours" if hours else f"{unit} per step"), height=360, legend=False)
    chosen, edge = points[0], front(points)
    if len(edge) > 1:
        at = [p.x for p in edge], [p.y for p in edge]
        figure.traces.append(Points("front", *at, GREEN, dash="dot", steps=True, hints=()))
    for name, shown, size, colour in (
        ("others", [p for p in points[1:] if p not in edge], 7, GREY),
        ("best", [p for p in edge if p is not chosen], 10, GREEN),
        ("chosen", [chosen], 17, VERMILLION),
    ):
        if shown:
            figure.traces.append(
                Points(
                    name,
                    [p.x for p in shown],
                    [p.y for p in shown],
                    colour,
                    width=0,
                    marks=size,
                    symbol="star" if name == "chosen" else "circle",
                    words=[p.name if p in edge or not p.name.isdecimal() else "" for p in shown],
                    side="right" if log else "left",
                    hints=[f"{_wrapped(p.about)}\n{digits(p.y)} {unit}, {digits(p.x)} {x}" for p in shown],
                )
            )
    if room is not None:
        figure.rules.append(Rule(room, f"{digits(room)} GiB each", PURPLE))
    xs, ys = [p.x for p in points] + ([room] if room else []), [p.y for p in points]
    if log:
        marks = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
        figure.y.log, figure.y.span = True, (min(ys) / 1.32, max(ys) * 1.32)
        figure.y.ticks = [(mark, f"{mark:g}") for mark in marks]
        figure.x.span = _padded(xs, 0.1, 0.3)
    else:
        figure.y.span, figure.x.span = _padded(ys, 0.12, 0.08), _padded(xs, 0.1, 0.08)
    return figure


def _padded(values: Sequence[float], before: float, after: float) -> tuple[float, float]:
    """A range with a margin at both ends, in parts of its width.

    Positions count in such a picture, so it need not begin at 0.
    """
    low, high = min(values), max(values)
    width = (high - low) or 0.2 * high or 1.0
    return max(0.0, low - before * width), high + after * width


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in x and y, by x."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not kept or point.y < kept[-1].y:
            kept.append(point)
    return kept


def stacked(
    plans: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    names: Mapping[str, str],
    what: str,
    room: float | None = None,
) -> Figure:
    """A bar of parts for each plan, from the top, under its text.

    `room`: a line at the upper limit.
    """
    rows = list(range(len(plans)))
    figure = Figure(
        Axis(what, from_zero=True),
        Axis(span=(len(plans) - 0.65, -0.7), ticks=(), grid=False),
        height=64 + 44 * len(plans),
        legend=False,
        stacked=True,
    )
    for part, values in parts.items():
        name = names.get(part, part)
        hints = [f"{name} {digits(value)} {what}" for value in values]
        figure.traces.append(Bars(name, list(values), rows, colours[part], thick=0.46, hints=hints))
    figure.notes = [Note(f"{row + 1}  {plan}", row - 0.42, inside=True) for row, plan in enumerate(plans)]
    if room is not None:
        figure.rules.append(Rule(room, "", PURPLE))
    return figure


def holder_colours(holders: Sequence[str]) -> dict[str, str]:
    """One colour for each holder of memory."""
    return {holder: _HOLDER_COLOURS[i % len(_HOLDER_COLOURS)] for i, holder in enumerate(holders)}


def pipeline(spans: Sequence[Span]) -> Figure:
    """A row for each pipeline stage, from the top, with its work over time."""
    end = max(span.end_s for span in spans)
    factor, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    stages = sorted({span.stage for span in spans})
    ticks = stages if len(stages) <= 16 else stages[:: math.ceil(len(stages) / 16)]
    figure = Figure(
        Axis(f"{unit} since the step began", span=(0, end * factor)),
        Axis(span=(len(stages) - 0.5, -0.5), ticks=[(stage, f"stage {stage + 1}") for stage in ticks], grid=False),
        height=70 + max(22, min(34, 420 // len(stages))) * len(stages),
        legend=False,
    )
    for kind, colour in SPAN_COLOURS.items():
        own = [span for span in spans if span.what == kind]
        lengths, starts = [(s.end_s - s.start_s) * factor for s in own], [s.start_s * factor for s in own]
        hints = [
            f"{_span_words(span)}\nfrom {digits(start)} {unit}, for {digits(length)} {unit}"
            for span, start, length in zip(own, starts, lengths, strict=True)
        ]
        if own:
            edge = 0 if len(spans) > 800 else 0.6
            y = [span.stage for span in own]
            figure.traces.append(Bars(kind, lengths, y, colour, starts=starts, thick=0.82, edge=edge, hints=hints))
    return figure


def scaling(points: Sequence[ScaledPlan], chosen: int) -> Figure:
    """Speedup over devices on axes that double, against the ideal."""
    known = [p for p in points if p.speedup is not None and p.prediction is not None]
    ideal = [p.devices / known[0].devices for p in known]
    at = [p.devices for p in known]
    top = max(*ideal, *(p.speedup for p in known if p.speedup is not None))
    marks = [2**n for n in range(math.ceil(math.log2(top)) + 1)]
    speed = f"times the speed of {known[0].devices:,}"
    figure = Figure(
        Axis("devices", log=True, ticks=[(n, f"{n:,}") for n in at], span=(at[0] / 1.15, at[-1] * 1.9)),
        Axis(speed, log=True, ticks=[(n, f"{n} ×") for n in marks], span=(0.76, top * 1.2)),
        height=360,
        legend=False,
    )
    hints = [
        f"{p.devices:,} devices\n{_wrapped(str(p.plan))}\n{seconds(p.prediction.step_time_s)} a step"
        for p in known
        if p.prediction
    ]
    figure.traces = [
        Points("ideal", at, ideal, GREY, dash="dash", hints=()),
        Points(
            "predicted",
            at,
            [p.speedup for p in known],
            BLUE,
            width=2.5,
            marks=[15 if n == chosen else 9 for n in at],
            mark_colours=[VERMILLION if n == chosen else BLUE for n in at],
            words=[str(percent(p.efficiency or 0.0)) for p in known],
            side="below",
            hints=hints,
        ),
    ]
    return figure


def batches(advice: BatchAdvice) -> Figure:
    """Throughput over the global batch, with the job's own and the useful one."""
    at = [point.global_batch for point in advice.points]
    special = {advice.now.global_batch: "now", advice.useful.global_batch: "useful"}
    if advice.keeps:
        special = {advice.now.global_batch: "now, and useful"}
    throughput = Points(
        "throughput",
        at,
        [point.throughput for point in advice.points],
        BLUE,
        width=2.5,
        marks=[13 if n in special else 8 for n in at],
        mark_colours=[VERMILLION if "useful" in special.get(n, "") else BLUE for n in at],
        words=[special.get(n, "") for n in at],
        side="below",
        hints=[
            f"{n:,} samples: {digits(p.throughput)} samples/s\n{_wrapped(str(p.plan))}"
            for n, p in zip(at, advice.points, strict=True)
        ],
    )
    return Figure(
        Axis("global batch, samples", log=True, ticks=[(n, f"{n:,}") for n in at]),
        Axis("samples per second", from_zero=True),
        traces=[throughput],
        legend=False,
    )


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 60))


def _span_words(span: Span) -> str:
    if span.what == "wait":
        return f"stage {span.stage + 1} waits"
    return f"stage {span.stage + 1}: {span.what} of microbatch {span.microbatch + 1}"
