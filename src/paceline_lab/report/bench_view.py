"""HTML page of a benchmark's `Report`: headline, cards, table and charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import RunError
from paceline.planning.shortlist import Trial
from paceline.report import figures
from paceline.report.charts import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LEAF,
    OCHRE,
    SERIES,
    Axis,
    Bars,
    Figure,
    Line,
    Panel,
    Points,
    lines,
    panelled,
)
from paceline.report.figures import PARTS, RANK_FIGURES, SYNTHETIC, RankFigure
from paceline.report.page import PAGE, Card, Cell, Chart, Row, not_by_paceline, write_page
from paceline.stats import LEAST_REPEATS, Interval
from paceline.units import Shown, digits
from paceline_lab.report.figures import DEFINITIONS, template_named
from paceline_lab.scaling.result import AUTO, MeasuredSetting, Report
from paceline_lab.scaling.table import excess_s, headline_of

_TIMES = {"time_to_target": "time_to_target_s", "training_time": "training_time_s", "step_time": "step_time_s"}
_VISIBLE = 0.02  # relative difference between the speedup and the ratio of the shown medians that the page explains


def write_bench_page(report: Report, folder: Path) -> Path:
    """Write the page `report.html` of a benchmark into the benchmark's folder.

    The paths of runs in the report are relative to this folder.

    Raises:
        RunError: the benchmark has no finished run, or the file cannot be written.
    """
    settings = report.settings
    if not settings:
        raise RunError(
            "bench.nothing_measured",
            "{folder}: the benchmark has measured nothing yet, and its page needs at least one run of one setting. "
            "Run its command again to continue.",
            folder=folder,
        )
    with not_by_paceline(folder, "benchmark"):
        one = next((s for s in settings if s.devices == 1), None)
        best = headline_of(settings, report.auto) or _any(settings)
        there = {s.title: [run for run in s.runs if (folder / run).is_dir()] for s in settings}
        view = {
            "created": _for_people(report.created),
            "best": best,
            "verdict": _verdict(best, one, report),
            "remark": _medians_say(best, one) if best.is_speedup else "",
            "cards": _cards(best, one),
            "warnings": _warnings(report),
            "lost": _lost(best, one),
            "table": _rows(report, one),
            "parts": list(PARTS),
            "scalings": [
                kind for kind in ("strong", "weak") if any(s.scaling == kind for s in settings if s.devices > 1)
            ],
            "any_alike": any(s.speedup is not None and not s.is_speedup for s in settings),
            "runs": {name: runs for name, runs in there.items() if runs},
            "scaling": _scaling(settings, one, report.of_auto),
            "bars": _is_bars(settings),
            "tried": [_tried(row) for row in report.tried],
            "plans": _plans(settings),
            "breakdown": _breakdown(settings, one),
            "losses": _losses(settings),
        }
        return write_page(
            folder / PAGE,
            template_named("bench.html.j2"),
            definitions=DEFINITIONS,
            facts={
                "machine": report.cluster,
                "command": report.command,
                "plans": " · ".join(dict.fromkeys(s.plan for s in settings)),
            },
            environment=report.environment,
            on_cores=report.on_cores,
            report=report,
            view=view,
        )


def _for_people(created: str) -> str:
    try:
        return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return created


# The headline


def _verdict(best: MeasuredSetting, one: MeasuredSetting | None, report: Report) -> str:
    """State the result and its plan in one sentence. State a speedup only if it is significant."""
    if best is one:
        return "Measured on one device; with more of them (--devices 1,2) this page shows how the job scales."
    chosen = best is report.of_auto
    plan = f"by plan {report.auto_as_told or best.plan}, which auto chose" if chosen else f"by plan {best.plan}"
    devices = "one device" if best.devices == 1 else f"{best.devices} devices"
    if best.speedup is None:
        return f"{devices} measured {plan}; to see the gain, also measure one device (--devices 1,{best.devices})."
    if not best.is_speedup:
        why = "too few repeats to tell" if len(best.pairs) < LEAST_REPEATS else "the intervals overlap"
        return f"No difference between 1 device and {devices} {plan}: {why}."
    gain = units.digits(best.speedup.middle)
    if best.speedup.middle < 1:
        return f"Slower with {devices} {plan}: {gain} of the speed of one device."
    same = ", at the same batch per device" if best.scaling == "weak" else ""
    return f"{gain} times as fast with {devices} {plan}{same}."


def _medians_say(best: MeasuredSetting, one: MeasuredSetting | None) -> str:
    """Explain any visible difference between the speedup and the ratio of the shown medians."""
    if one is None or best.speedup is None:
        return ""
    ratio = best.throughput.middle / one.throughput.middle
    if abs(ratio / best.speedup.middle - 1) < _VISIBLE:
        return ""
    if best.training_time_s is not None and best.scaling == "strong":
        return f"The speedup compares whole trainings; the steps alone are {units.digits(ratio)} times as fast."
    return (
        "The speedup is the median over rounds in which both were measured in turn. The ratio of the two medians "
        f"shown here is {units.digits(ratio)}."
    )


def _warnings(report: Report) -> list[str]:
    interrupted = (
        "The benchmark was interrupted, so some runs are missing. To continue, run the same command with --out and "
        "this directory."
    )
    known = {interrupted: not report.complete, SYNTHETIC: report.synthetic}
    return [*(note for note, holds in known.items() if holds), *report.warnings]


def _cards(best: MeasuredSetting, one: MeasuredSetting | None) -> list[Card]:
    """Return the cards of the headline, whose figures all belong to one setting."""

    def of_one(name: str, shown: Callable[[Interval], Shown] = units.seconds) -> str:
        if one is None or one is best or getattr(one, name) is None:
            return ""
        value = shown(getattr(one, name))
        return f"1 device: {value} ({value.interval})"

    cards = []
    if best.speedup is not None and best.is_speedup:
        efficiency = Card("efficiency", _efficiency(best), f"of the ideal {best.devices} ×")
        cards = [Card("speedup", _speedup(best)), efficiency]
    elif best.speedup is not None:
        step_time = Card("step_time", units.seconds(best.step_time_s), of_one("step_time_s"))
        cards = [Card("speedup", "no difference"), step_time]
    cards.append(Card("throughput", units.rate(best.throughput), of_one("throughput", units.rate)))
    used = {card.term for card in cards}
    term = next((t for t, name in _TIMES.items() if t not in used and getattr(best, name) is not None), None)
    if term is not None:
        cards.append(Card(term, units.seconds(getattr(best, _TIMES[term])), of_one(_TIMES[term])))
    return cards


def _lost(best: MeasuredSetting, one: MeasuredSetting | None) -> list[tuple[str, Shown]]:
    """Return the time by which each part of the headline's step exceeds the ideal.

    The parts are in descending order. The last entry has no name and is the sum of all parts.
    """
    if one is None or best.devices == 1 or best.scaling != "strong" or not best.ranks or not one.ranks:
        return []
    if best.efficiency is None or best.efficiency.high >= 1:  # the interval includes the ideal efficiency
        return []
    added = excess_s(one, best)
    by_size = sorted(added.items(), key=lambda x: -x[1])
    return [(part, units.milliseconds(s)) for part, s in (*by_size, ("", sum(added.values())))]


# The table


def _rows(report: Report, one: MeasuredSetting | None) -> list[Row]:
    """Return the rows of the table, without rows that do not apply to this benchmark."""
    settings = report.settings
    to_end = any(s.training_time_s for s in settings)
    compressed = any(_most(s, "compression_error") is not None for s in settings)
    has = {"": True, "compressed": compressed, "accelerators": not report.on_cores}

    def compared(cell: Callable[[MeasuredSetting], Cell], setting: MeasuredSetting) -> Cell:
        if setting is one:
            return "reference"
        return "needs 1 device" if setting.speedup is None else cell(setting)

    def of_ranks(figure: RankFigure, setting: MeasuredSetting) -> Cell:
        return _or(_most(setting, figure.name), figure.absent, figure.shown)

    cells: dict[str, Callable[[MeasuredSetting], Cell]] = {
        "global_batch": lambda s: Shown(s.global_batch, f"{s.global_batch:,}", "samples"),
        "step_time": lambda s: units.seconds(s.step_time_s),
        "throughput": lambda s: units.rate(s.throughput),
        "tokens": _tokens,
        "mfu": lambda s: _or(s.mfu, "not available", units.percent),
        "training_time": lambda s: _or(s.training_time_s, "not trained to its end"),
        "time_to_target": lambda s: _or(s.time_to_target_s, "not reached"),
        "speedup": partial(compared, _speedup),
        "pairs": partial(compared, _pairs),
        "efficiency": partial(compared, _efficiency),
        "final_loss": lambda s: _or(s.final_loss, "not finite", units.number),
        **{figure.term: partial(of_ranks, figure) for figure in RANK_FIGURES if has[figure.only]},
        "energy": lambda s: _or(s.energy_joules, "not available", units.joules),
    }
    left_out = {
        "tokens": not any(s.tokens_per_sample for s in settings),
        "mfu": all(s.mfu is None for s in settings),
        "training_time": not to_end,
        "time_to_target": not (to_end and report.target),
        "final_loss": all(s.final_loss is None for s in settings),
    }
    return [Row(term, [cell(s) for s in settings]) for term, cell in cells.items() if not left_out.get(term)]


# The charts


def _plans(settings: Sequence[MeasuredSetting]) -> Chart | None:
    """Chart the plans on several devices. Return None if no two plans use equal device counts."""
    compared = [s for s in settings if s.scaling == "strong" and s.devices > 1]
    if len({s.devices for s in compared}) == len(compared):
        return None
    figure = compared_figure(
        [s.title for s in compared],
        [_most(s, "wire_bytes") for s in compared],
        [s.step_time_s.middle for s in compared],
        [s.time_to_target_s.middle if s.time_to_target_s else None for s in compared],
        [s.final_loss for s in compared],
    )
    return Chart("plans", figure, "Bytes on the wire, step time, time to target and final loss of each plan.")


_LEAST_POINTS = 3  # minimum number of points of a curve, including one device; fewer points are drawn as bars


def _scaling(
    settings: Sequence[MeasuredSetting], one: MeasuredSetting | None, chosen: MeasuredSetting | None
) -> Chart | None:
    """Chart all speedups and the ideal; None if no setting was compared with one device."""
    if all(s.speedup is None for s in settings):
        return None
    points = [f"{s.title}: {_speedup(s) if s.speedup else 'needs 1 device'}." for s in settings if s is not one]
    label = " ".join(["Speedup of each setting, against the ideal.", *points])
    if _is_bars(settings):
        return Chart("scaling", _speedup_bars([s for s in settings if s.speedup is not None], chosen), label)
    return Chart("scaling", _scaling_figure(settings), label)


def _is_bars(settings: Sequence[MeasuredSetting]) -> bool:
    """Return True if the settings have too few different device counts for a curve."""
    return len({1, *(s.devices for s in settings if s.speedup is not None)}) < _LEAST_POINTS


def _speedup_bars(compared: Sequence[MeasuredSetting], chosen: MeasuredSetting | None) -> Figure:
    """Draw a bar for each setting's speedup, and a tick at the ideal speedup.

    A pale bar means that the difference from one device is not significant.
    """
    gains = [s.speedup if s.speedup is not None and s.is_speedup else Interval(1.0, 1.0, 1.0) for s in compared]
    words = [
        f"{digits(gain.middle)} × · {units.percent(gain.middle / s.devices, 0)}" if s.is_speedup else "no difference"
        for s, gain in zip(compared, gains, strict=True)
    ]
    names = ["1 device", *(f"{s.title}{chr(10) + 'plan of auto' if s is chosen else ''}" for s in compared)]
    places = list(range(len(names)))
    bars = Bars(
        "speedup",
        [1.0, *(gain.middle for gain in gains)],
        places,
        [GREY, *(LEAF if s.scaling == "weak" else BLUE for s in compared)],
        opacity=[1.0, *(1.0 if s.is_speedup else 0.25 for s in compared)],
        thick=0.6,
        low=[1.0, *(gain.low for gain in gains)],
        high=[1.0, *(gain.high for gain in gains)],
        hints=["1 device", *(f"{s.label}\n{s.plan}\n{text}" for s, text in zip(compared, words, strict=True))],
    )
    ideal = [float(s.devices) for s in compared]
    hints = [f"ideal: {devices:g} ×" for devices in ideal]
    ticks = Points("ideal", ideal, places[1:], INK, width=0, marks=34, symbol="tick", hints=hints)
    ends = [1.0, *(max(gain.high, ideal[i]) for i, gain in enumerate(gains))]
    said = Points("words", ends, places, INK, width=0, words=["the reference", *words], hints=())
    most = max(*ideal, *(min(gain.high, 1.6 * s.devices) for s, gain in zip(compared, gains, strict=True)))
    return Figure(
        Axis("times the speed of one device", span=(0, 1.45 * most)),
        Axis(span=(len(names) - 0.5, -0.5), ticks=list(zip(places, names, strict=True)), grid=False),
        height=52 + 46 * len(names),
        traces=[bars, ticks, said],
        legend=False,
    )


def _breakdown(settings: Sequence[MeasuredSetting], one: MeasuredSetting | None) -> Chart | None:
    bars = []
    for s in settings:
        shared = s.devices if s.scaling == "strong" else 1
        ideal_s = None if one is None or s.devices == 1 else one.step_time_s.middle / shared
        bars += [figures.Bar(s.title, f"rank {rank}", use.parts_s, ideal_s) for rank, use in enumerate(s.ranks)]
    label = "Time of one step on each rank, part by part."
    return Chart("breakdown", figures.breakdown(bars), label) if bars else None


def _losses(settings: Sequence[MeasuredSetting]) -> list[Chart]:
    """Chart the training loss over time and over samples. Both charts use the same colours."""
    curves = [(s, s.curve) for s in settings if s.curve is not None and s.curve.steps]
    plans = list(dict.fromkeys(s.plan for s, _ in curves))
    charts = []
    for over, title in (("seconds", "Training loss over time"), ("samples", "Training loss over samples")):
        series = [
            Line(
                s.title,
                getattr(curve, over),
                curve.losses,
                SERIES[plans.index(s.plan) % len(SERIES)],
            )
            for s, curve in curves
        ]
        figure = lines(series, over, "training loss", log_if_wide=True)
        charts.append(Chart(f"loss-{over}", figure, f"{title} of each setting.", title))
    return charts if curves else []


def _any(settings: Sequence[MeasuredSetting]) -> MeasuredSetting:
    """Choose the setting of the headline when no setting on several devices uses strong scaling."""
    return max(settings, key=lambda s: (s.devices > 1, s.scaling == "strong", s.devices, s.throughput.middle))


def _tried(row: Trial) -> Row:
    """Return the table row of a plan or tunable setting that `auto` tried."""
    cells: list[Cell] = [
        "" if row.predicted_s is None else units.seconds(row.predicted_s),
        "" if row.step_s is None else units.seconds(row.step_s),
        "" if row.ratio is None else units.ratio(row.ratio),
        row.verdict,
    ]
    return Row(row.change, cells, loud=row.verdict in ("chosen", "kept"))


def _speedup(setting: MeasuredSetting) -> Cell:
    return units.ratio(setting.speedup) if setting.speedup is not None and setting.is_speedup else "no difference"


def _efficiency(setting: MeasuredSetting) -> Cell:
    return units.percent(setting.efficiency) if setting.efficiency is not None and setting.is_speedup else "not stated"


def _pairs(setting: MeasuredSetting) -> Cell:
    return " · ".join(units.digits(pair) for pair in setting.pairs) if setting.is_speedup else "not stated"


def _tokens(setting: MeasuredSetting) -> Cell:
    per_sample = setting.tokens_per_sample
    return "not available" if per_sample is None else units.rate(setting.throughput.times(per_sample), "tokens/s")


def _or(x: Any, absent: str, shown: Callable[[Any], Shown] = units.seconds) -> Cell:
    return absent if x is None else shown(x)


def _most(setting: MeasuredSetting, name: str) -> float | None:
    return max((rank.figures[name] for rank in setting.ranks if name in rank.figures), default=None)


def _scaling_figure(settings: Sequence[MeasuredSetting]) -> Figure:
    """Chart the strong and weak speedup over the number of devices, with the ideal.

    If a difference is not significant, the point is a ring at 1 with the label "no difference".
    """
    compared = sorted((s for s in settings if s.speedup is not None), key=lambda s: s.devices)
    most = max(s.devices for s in compared)
    tops = [s.speedup.high for s in compared if s.speedup is not None]
    room = 1.22 if all(s.is_speedup for s in compared) else 1.45  # room for the label to the right of the last point
    top = min(1.12 * max(most, *tops), 1.6 * most)  # very wide intervals are truncated
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
        ("weak scaling", [s for s in plain if s.scaling == "weak"], OCHRE, "above"),
        ("plan of auto" if only_auto else "other plans", others, GREEN, "right"),
    ):
        if points:
            figure.traces.append(_curve(name, points, colour, side, from_one=points[0] in plain))
    return figure


def _curve(name: str, points: Sequence[MeasuredSetting], colour: str, side: str, *, from_one: bool) -> Points:
    """Draw points with their intervals. With `from_one`, a line connects them and starts at one device."""
    gains = [p.speedup for p in points if p.speedup is not None]
    at = [gain.middle if p.is_speedup else 1.0 for p, gain in zip(points, gains, strict=True)]
    words = [
        f"{digits(gain.middle)} ×" if p.is_speedup else "no difference" for p, gain in zip(points, gains, strict=True)
    ]
    one = [1.0] if from_one else []  # the point of one device has no interval
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


def compared_figure(
    names: Sequence[str],
    wire_bytes: Sequence[float | None],
    step_time_s: Sequence[float],
    time_to_target_s: Sequence[float | None],
    final_loss: Sequence[float | None],
) -> Figure:
    """Draw the figures of several plans as bars. All values are in the order of the names."""
    panels = [
        Panel("bytes on the wire per step, KiB", wire_bytes, 1 / 1024),
        Panel("step time, ms", step_time_s, 1e3),
        Panel("time to target, s", time_to_target_s),
        Panel("final loss", final_loss),
    ]
    return panelled(names, panels)
