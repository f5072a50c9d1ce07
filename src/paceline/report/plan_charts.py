"""Charts of a plan's page: time against memory and cost, parts, pipeline, more devices."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import plotly.graph_objects as go

from paceline.planner.cost.prediction import Span
from paceline.planner.explain.batch_advice import BatchAdvice
from paceline.planner.explain.scaling import ScaledPlan
from paceline.report.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, empty_figure
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
) -> go.Figure:
    """Step time (or `hours` of training) over something else; joined are those that no other beats in both.

    The first point is the plan that was chosen.

    `room`: the most that there is of x. Named in the picture are the chosen point, and those whose names are words.
    """
    factor, unit = (1.0, "h") if hours else (1e3, "ms") if max(p.y for p in points) < 1 else (1.0, "s")
    points = [replace(p, y=p.y * factor) for p in points]
    figure = empty_figure(x, "hours" if hours else f"{unit} per step")
    chosen, edge = points[0], front(points)
    if len(edge) > 1:
        line = {"color": GREEN, "width": 2, "dash": "dot", "shape": "hv"}
        figure.add_scatter(x=[p.x for p in edge], y=[p.y for p in edge], mode="lines", line=line, hoverinfo="skip")
    for shown, marker in (
        ([p for p in points[1:] if p not in edge], {"size": 7, "color": GREY}),
        ([p for p in edge if p is not chosen], {"size": 10, "color": GREEN}),
        ([chosen], {"size": 17, "color": VERMILLION, "symbol": "star"}),
    ):
        if shown:
            figure.add_scatter(
                x=[p.x for p in shown],
                y=[p.y for p in shown],
                mode="markers+text",
                marker=marker,
                text=[escape(p.name) if p in edge or not p.name.isdecimal() else "" for p in shown],
                textposition="middle right" if log else "bottom left",
                cliponaxis=False,
                hovertext=[_hover(p.about) for p in shown],
                hovertemplate=f"%{{hovertext}}<br>%{{y:.4~g}} {unit}, %{{x:,.4~g}} {escape(x)}<extra></extra>",
            )
    if room is not None:
        figure.add_vline(x=room, line={"color": PURPLE, "dash": "dash", "width": 1.5})
        at = {"x": room, "xref": "x", "y": 0.5, "yref": "paper", "textangle": -90, "xshift": 10, "showarrow": False}
        figure.add_annotation(text=f"{digits(room)} GiB each", **at)
    xs, ys = [p.x for p in points] + ([room] if room else []), [p.y for p in points]
    if log:
        marks = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
        figure.update_yaxes(type="log", range=[math.log10(min(ys)) - 0.12, math.log10(max(ys)) + 0.12])
        figure.update_yaxes(tickvals=marks, ticktext=[f"{mark:g}" for mark in marks])
        figure.update_xaxes(range=_padded(xs, 0.1, 0.3))
    else:
        figure.update_yaxes(range=_padded(ys, 0.12, 0.08))
        figure.update_xaxes(range=_padded(xs, 0.1, 0.08))
    figure.update_xaxes(showgrid=False)
    figure.update_layout(showlegend=False, height=360)
    return figure


def _padded(values: Sequence[float], before: float, after: float) -> list[float]:
    """A range with a margin at both ends, in parts of its width.

    Positions count in such a picture, so it need not begin at 0.
    """
    low, high = min(values), max(values)
    width = (high - low) or 0.2 * high or 1.0
    return [max(0.0, low - before * width), high + after * width]


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
) -> go.Figure:
    """A bar of parts for each plan, from the top, under its text.

    `room`: a line at the upper limit.
    """
    figure = empty_figure(what, "")
    rows = list(range(len(plans)))
    for part, values in parts.items():
        name = escape(names.get(part, part))
        figure.add_bar(
            y=rows,
            x=list(values),
            name=name,
            orientation="h",
            width=0.46,
            marker={"color": colours[part]},
            hovertemplate=f"{name} %{{x:.3~g}} {escape(what)}<extra></extra>",
        )
    for row, plan in enumerate(plans):
        label = {"x": 0, "xanchor": "left", "y": row - 0.24, "yanchor": "bottom", "showarrow": False}
        figure.add_annotation(text=f"<b>{row + 1}</b>  {escape(plan)}", **label)
    figure.update_layout(barmode="stack", showlegend=False, height=64 + 44 * len(plans), hovermode="closest")
    figure.update_yaxes(range=[len(plans) - 0.65, -0.7], showgrid=False, fixedrange=True, showticklabels=False)
    figure.update_xaxes(rangemode="tozero")
    if room is not None:
        figure.add_vline(x=room, line={"color": PURPLE, "dash": "dash", "width": 1.5})
    return figure


def holder_colours(holders: Sequence[str]) -> dict[str, str]:
    """One colour for each holder of memory."""
    return {holder: _HOLDER_COLOURS[i % len(_HOLDER_COLOURS)] for i, holder in enumerate(holders)}


def pipeline(spans: Sequence[Span]) -> go.Figure:
    """A row for each pipeline stage, from the top, with its work over time."""
    end = max(span.end_s for span in spans)
    factor, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    figure = empty_figure(f"{unit} since the step began", "")
    stages = sorted({span.stage for span in spans})
    for kind, colour in SPAN_COLOURS.items():
        own = [span for span in spans if span.what == kind]
        if not own:
            continue
        figure.add_bar(
            y=[span.stage for span in own],
            x=[(span.end_s - span.start_s) * factor for span in own],
            base=[span.start_s * factor for span in own],
            name=kind,
            orientation="h",
            width=0.82,
            marker={
                "color": colour,
                "line": {"width": 0 if len(spans) > 800 else 0.6, "color": "rgba(255,255,255,.65)"},
            },
            customdata=[_span_words(span) for span in own],
            hovertemplate=f"%{{customdata}}<br>from %{{base:.4~g}} {unit}, for %{{x:.4~g}} {unit}<extra></extra>",
        )
    figure.update_layout(
        barmode="overlay",
        showlegend=False,
        height=70 + max(22, min(34, 420 // len(stages))) * len(stages),
        hovermode="closest",
    )
    ticks = stages if len(stages) <= 16 else stages[:: math.ceil(len(stages) / 16)]
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        fixedrange=True,
        tickvals=ticks,
        ticktext=[f"stage {stage + 1}" for stage in ticks],
    )
    figure.update_xaxes(range=[0, end * factor])
    return figure


def scaling(points: Sequence[ScaledPlan], chosen: int) -> go.Figure:
    """Speedup over devices on axes that double, against the ideal."""
    known = [p for p in points if p.speedup is not None and p.prediction is not None]
    figure = empty_figure("devices", f"times the speed of {known[0].devices:,}")
    ideal = [p.devices / known[0].devices for p in known]
    at = [p.devices for p in known]
    figure.add_scatter(
        x=at, y=ideal, name="ideal", mode="lines", line={"color": GREY, "dash": "dash", "width": 2}, hoverinfo="skip"
    )
    figure.add_scatter(
        x=at,
        y=[p.speedup for p in known],
        name="predicted",
        mode="lines+markers+text",
        line={"color": BLUE, "width": 2.5},
        marker={
            "opacity": 1,
            "size": [15 if p.devices == chosen else 9 for p in known],
            "color": [VERMILLION if p.devices == chosen else BLUE for p in known],
        },
        text=[str(percent(p.efficiency or 0.0)) for p in known],
        textposition="bottom right",
        cliponaxis=False,
        hovertext=[
            f"{p.devices:,} devices<br>{_hover(str(p.plan))}<br>{seconds(p.prediction.step_time_s)} a step"
            for p in known
            if p.prediction
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    figure.update_xaxes(
        type="log",
        tickvals=at,
        ticktext=[f"{n:,}" for n in at],
        range=[math.log10(at[0]) - 0.06, math.log10(at[-1]) + 0.28],
    )
    marks = [2**n for n in range(math.ceil(math.log2(max(ideal))) + 1)]
    figure.update_yaxes(
        type="log", tickvals=marks, ticktext=[f"{n} ×" for n in marks], range=[-0.12, math.log10(max(ideal)) + 0.08]
    )
    figure.update_layout(showlegend=False, height=360)
    return figure


def batches(advice: BatchAdvice) -> go.Figure:
    """Throughput over the global batch, with the job's own and the useful one."""
    figure = empty_figure("global batch, samples", "samples per second")
    at = [point.global_batch for point in advice.points]
    special = {advice.now.global_batch: "now", advice.useful.global_batch: "useful"}
    if advice.keeps:
        special = {advice.now.global_batch: "now, and useful"}
    figure.add_scatter(
        x=at,
        y=[point.throughput for point in advice.points],
        mode="lines+markers+text",
        line={"color": BLUE, "width": 2.5},
        marker={
            "opacity": 1,
            "size": [13 if n in special else 8 for n in at],
            "color": [VERMILLION if "useful" in special.get(n, "") else BLUE for n in at],
        },
        text=[special.get(n, "") for n in at],
        textposition="bottom right",
        cliponaxis=False,
        hovertext=[
            f"{n:,} samples: {digits(p.throughput)} samples/s<br>{_hover(str(p.plan))}"
            for n, p in zip(at, advice.points, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    figure.update_xaxes(type="log", tickvals=at, ticktext=[f"{n:,}" for n in at])
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(showlegend=False)
    return figure


def _hover(text: str) -> str:
    return "<br>".join(escape(line) for line in textwrap.wrap(text, 60))


def _span_words(span: Span) -> str:
    if span.what == "wait":
        return f"stage {span.stage + 1} waits"
    return f"stage {span.stage + 1}: {span.what} of microbatch {span.microbatch + 1}"
