"""Charts of a benchmark's page: speedup, plans beside each other, losses."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from paceline.benchmark.result import Curve, MeasuredSetting
from paceline.report.charts import BLUE, GREEN, GREY, ORANGE, SERIES, Line, Panel, empty_figure, lines, panelled
from paceline.units import digits


def scaling(settings: Sequence[MeasuredSetting]) -> go.Figure:
    """Speedup over devices, strong and weak, against the ideal.

    A point without a speedup is hollow, stands at 1 and says so.
    """
    figure = empty_figure("devices", "times the speed of one device")
    compared = sorted((s for s in settings if s.speedup is not None), key=lambda s: s.devices)
    most = max(s.devices for s in compared)
    figure.add_scatter(
        x=[0, most],
        y=[0, most],
        name="ideal",
        mode="lines",
        line={"color": GREY, "dash": "dash", "width": 2},
        hoverinfo="skip",
    )
    plain = [s for s in compared if s.devices > 1 and s.label == f"{s.devices} devices"]
    for name, points, colour, side in (
        ("strong scaling", [s for s in plain if s.scaling == "strong"], BLUE, "bottom right"),
        ("weak scaling", [s for s in plain if s.scaling == "weak"], ORANGE, "top left"),
        ("other plans", [s for s in compared if s not in plain], GREEN, "middle right"),
    ):
        if points:
            figure.add_scatter(**_curve(points, colour, from_one=points[0] in plain), name=name, textposition=side)
    tops = [s.speedup.high for s in compared if s.speedup is not None]
    room = 1.22 if all(s.is_speedup for s in compared) else 1.45  # for the words beside the last point
    figure.update_xaxes(range=[0, most * room], tickvals=sorted({1, *(s.devices for s in compared)}), showgrid=False)
    top = min(1.12 * max(most, *tops), 1.6 * most)  # a very wide interval leaves the chart
    figure.update_yaxes(range=[0, top], dtick=1 if most <= 8 else None)
    return figure


def _curve(points: Sequence[MeasuredSetting], colour: str, *, from_one: bool) -> dict[str, object]:
    """A trace through the points, each with its interval.

    A curve begins at one device.
    """
    gains = [p.speedup for p in points if p.speedup is not None]
    at = [gain.middle if p.is_speedup else 1.0 for p, gain in zip(points, gains, strict=True)]
    words = [
        f"{digits(gain.middle)} ×" if p.is_speedup else "no difference" for p, gain in zip(points, gains, strict=True)
    ]
    more = [max(gain.high - y, 0.0) for y, gain in zip(at, gains, strict=True)]
    less = [max(y - gain.low, 0.0) for y, gain in zip(at, gains, strict=True)]
    about = [f"{escape(p.label)}<br>{escape(p.plan)}<br>{text}" for p, text in zip(points, words, strict=True)]
    one = [0.0] if from_one else []  # the first point of a curve, which is exact
    return {
        "x": [1 for _ in one] + [p.devices for p in points],
        "y": [1.0 for _ in one] + at,
        "error_y": {"type": "data", "array": one + more, "arrayminus": one + less, "thickness": 1.5, "width": 7},
        "mode": "lines+markers+text" if from_one else "markers+text",
        "text": ["" for _ in one] + words,
        "line": {"color": colour, "width": 2.5},
        "marker": {
            "size": 8,
            "color": colour,
            "symbol": ["circle" for _ in one] + ["circle" if p.is_speedup else "circle-open" for p in points],
            "line": {"width": 2, "color": colour},
        },
        "hovertext": ["1 device" for _ in one] + about,
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def compared(
    names: Sequence[str],
    wire_bytes: Sequence[float | None],
    step_time_s: Sequence[float],
    time_to_target_s: Sequence[float | None],
    final_loss: Sequence[float | None],
) -> go.Figure:
    """Figures of several plans as bars beside each other. Values are in the order of the names."""
    panels = [
        Panel("bytes on the wire per step, KiB", wire_bytes, 1 / 1024),
        Panel("step time, ms", step_time_s, 1e3),
        Panel("time to target, s", time_to_target_s),
        Panel("final loss", final_loss),
    ]
    return panelled(names, panels)


def losses(curves: Sequence[tuple[MeasuredSetting, str, Curve]], over: str) -> go.Figure:
    """The training loss of each setting over `steps`, `seconds` or `samples`.

    A plan keeps its colour; weak scaling is dashed.
    """
    plans = list(dict.fromkeys(setting.plan for setting, _, _ in curves))
    series = [
        Line(
            name,
            getattr(curve, over),
            curve.losses,
            SERIES[plans.index(setting.plan) % len(SERIES)],
            dashed=setting.scaling == "weak",
        )
        for setting, name, curve in curves
    ]
    figure = lines(series, over, "training loss", log_if_wide=True)
    return figure.update_layout(height=figure.layout.height + 18 * max(0, len(series) - 3))  # the legend's lines
