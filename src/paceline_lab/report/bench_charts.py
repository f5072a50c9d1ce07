"""Charts of a benchmark's page: speedup, plans beside each other, losses."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.charts import BLUE, GREEN, GREY, ORANGE, SERIES, Line, Panel, lines, panelled
from paceline.report.figure import Axis, Figure, Points
from paceline.units import digits
from paceline_lab.scaling.result import AUTO, Curve, MeasuredSetting


def scaling(settings: Sequence[MeasuredSetting]) -> Figure:
    """Speedup over devices, strong and weak, against the ideal.

    A point without a speedup is hollow, stands at 1 and says so.
    """
    compared = sorted((s for s in settings if s.speedup is not None), key=lambda s: s.devices)
    most = max(s.devices for s in compared)
    tops = [s.speedup.high for s in compared if s.speedup is not None]
    room = 1.22 if all(s.is_speedup for s in compared) else 1.45  # space for the text beside the last point
    top = min(1.12 * max(most, *tops), 1.6 * most)  # a very wide interval is cut off
    ticks = [(n, str(n)) for n in sorted({1, *(s.devices for s in compared)})]
    figure = Figure(
        Axis("devices", span=(0, most * room), ticks=ticks, grid=False),
        Axis("times the speed of one device", span=(0, top)),
        traces=[Points("ideal", [0, most], [0, most], GREY, dash="dash", hints=())],
    )
    plain = [s for s in compared if s.devices > 1 and s.fixed]
    others = [s for s in compared if s not in plain]
    only_auto = all(s.label.startswith(AUTO) for s in others)
    for name, points, colour, side in (
        ("strong scaling", [s for s in plain if s.scaling == "strong"], BLUE, "below"),
        ("weak scaling", [s for s in plain if s.scaling == "weak"], ORANGE, "above"),
        ("plan of auto" if only_auto else "other plans", others, GREEN, "right"),
    ):
        if points:
            figure.traces.append(_curve(name, points, colour, side, from_one=points[0] in plain))
    return figure


def _curve(name: str, points: Sequence[MeasuredSetting], colour: str, side: str, *, from_one: bool) -> Points:
    """Draw points with their intervals; a curve begins at one device."""
    gains = [p.speedup for p in points if p.speedup is not None]
    at = [gain.middle if p.is_speedup else 1.0 for p, gain in zip(points, gains, strict=True)]
    words = [
        f"{digits(gain.middle)} ×" if p.is_speedup else "no difference" for p, gain in zip(points, gains, strict=True)
    ]
    one = [1.0] if from_one else []  # the first point of a curve, which has no interval
    return Points(
        name,
        [*one, *(p.devices for p in points)],
        [*one, *at],
        colour,
        width=2.5 if from_one else 0,
        marks=8,
        symbol=["circle" for _ in one] + ["circle" if p.is_speedup else "ring" for p in points],
        words=["" for _ in one] + words,
        side=side,
        low=[*one, *(min(gain.low, y) for y, gain in zip(at, gains, strict=True))],
        high=[*one, *(max(gain.high, y) for y, gain in zip(at, gains, strict=True))],
        hints=["1 device" for _ in one] + [f"{p.label}\n{p.plan}\n{t}" for p, t in zip(points, words, strict=True)],
    )


def compared(
    names: Sequence[str],
    wire_bytes: Sequence[float | None],
    step_time_s: Sequence[float],
    time_to_target_s: Sequence[float | None],
    final_loss: Sequence[float | None],
) -> Figure:
    """Figures of several plans as bars beside each other. Values are in the order of the names."""
    panels = [
        Panel("bytes on the wire per step, KiB", wire_bytes, 1 / 1024),
        Panel("step time, ms", step_time_s, 1e3),
        Panel("time to target, s", time_to_target_s),
        Panel("final loss", final_loss),
    ]
    return panelled(names, panels)


def losses(curves: Sequence[tuple[MeasuredSetting, str, Curve]], over: str) -> Figure:
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
    figure.height += 18 * max(0, len(series) - 3)  # the legend's lines
    return figure
