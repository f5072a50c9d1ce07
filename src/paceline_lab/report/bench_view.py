"""The page of a benchmark: headline, cards, table and charts, from a `Report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import RunError
from paceline.report import figures
from paceline.report.charts import BLUE, GREEN, GREY, ORANGE, SERIES, Axis, Figure, Line, Panel, Points, lines, panelled
from paceline.report.figures import PARTS, RANK_FIGURES, SYNTHETIC, RankFigure
from paceline.report.page import PAGE, Card, Cell, Chart, Row, not_by_paceline, write_page
from paceline.stats import LEAST_REPEATS, Interval
from paceline.units import Shown, digits
from paceline_lab.report.figures import DEFINITIONS, template_named
from paceline_lab.scaling.result import AUTO, Curve, MeasuredSetting, Report
from paceline_lab.scaling.table import excess_s

_TIMES = {"time_to_target": "time_to_target_s", "training_time": "training_time_s", "step_time": "step_time_s"}
_VISIBLE = 0.02  # by what part a speedup may miss the ratio of the figures beside it without a word


def write_bench_page(report: Report, folder: Path) -> Path:
    """Write `report.html` about a benchmark into its folder.

    The report's run directories are relative to that folder.

    Raises:
        RunError: nothing was measured, or the file cannot be written.
    """
    with not_by_paceline(folder, "benchmark"):
        plans = " · ".join(dict.fromkeys(s.plan for s in report.settings))
        return write_page(
            folder / PAGE,
            template_named("bench.html.j2"),
            definitions=DEFINITIONS,
            facts={"machine": report.cluster, "command": report.command, "plans": plans},
            environment=report.environment,
            on_cores=report.on_cores,
            report=report,
            view=BenchView(report, folder),
        )


class BenchView:
    """A report as the template shows it. `folder`: the benchmark's directory.

    Raises:
        RunError: nothing was measured.
    """

    def __init__(self, report: Report, folder: Path) -> None:
        if not report.settings:
            raise RunError(
                f"{folder}: the benchmark has measured nothing yet, and its page needs at least one run of one "
                "setting. Run its command again to go on."
            )
        self.report, self.settings = report, report.settings
        self.reference = next((s for s in self.settings if s.devices == 1), None)
        self.best = _best(self.settings)
        self.parts = list(PARTS)
        self.scalings = [
            name for name in ("strong", "weak") if any(s.scaling == name and s.devices > 1 for s in self.settings)
        ]
        self.any_alike = any(s.speedup is not None and not s.is_speedup for s in self.settings)
        there = {self.name(s): [run for run in s.runs if (folder / run).is_dir()] for s in self.settings}
        self.runs = {name: runs for name, runs in there.items() if runs}

    @property
    def created(self) -> str:
        """The benchmark's date and time, formatted for people."""
        try:
            return datetime.fromisoformat(self.report.created).strftime("%Y-%m-%d %H:%M %Z").strip()
        except ValueError:
            return self.report.created

    def name(self, setting: MeasuredSetting) -> str:
        """The setting's label, and that its scaling is weak where it is."""
        return f"{setting.label}, weak" if setting.scaling == "weak" and setting.devices > 1 else setting.label

    # The headline

    @property
    def verdict(self) -> str:
        """The result in one sentence; never a speedup if there is no difference."""
        best = self.best
        if best is self.reference:
            return "Measured on one device; with more of them (--devices 1,2) this page shows how the job scales."
        devices = f"{best.devices} devices" if best.devices > 1 else best.plan
        if best.speedup is None:
            return (
                f"{devices} were measured; to know what they gain, measure one device, too (--devices "
                f"1,{best.devices})."
            )
        if not best.is_speedup:
            few = len(best.pairs) < LEAST_REPEATS
            return (
                f"No difference between 1 device and {devices}: "
                f"{'too few repeats to tell' if few else 'the intervals overlap'}."
            )
        gain = units.digits(best.speedup.middle)
        if best.speedup.middle < 1:
            return f"Slower with {devices}: {gain} of the speed of one device.{self._medians_say(best)}"
        same = ", at the same batch per device" if best.scaling == "weak" else ""
        return f"{gain} times as fast with {devices}{same}.{self._medians_say(best)}"

    def _medians_say(self, best: MeasuredSetting) -> str:
        """The reason why the speedup differs visibly from the ratio of the shown figures."""
        if self.reference is None or best.speedup is None:
            return ""
        ratio = best.throughput.middle / self.reference.throughput.middle
        if abs(ratio / best.speedup.middle - 1) < _VISIBLE:
            return ""
        if best.training_time_s is not None and best.scaling == "strong":
            return f" (This compares whole trainings; the steps alone are {units.digits(ratio)} times as fast.)"
        return (
            " (This is the median of rounds, in each of which both took turns; the medians over all rounds, which "
            f"stand beside it, are {units.digits(ratio)} times apart.)"
        )

    @property
    def warnings(self) -> list[str]:
        """Reasons not to rely on the figures."""
        interrupted = (
            "The benchmark was interrupted: not every run of every setting was made. The same command with --out and "
            "this directory goes on where it stopped."
        )
        known = {interrupted: not self.report.complete, SYNTHETIC: self.report.synthetic}
        return [*(note for note, holds in known.items() if holds), *self.report.warnings]

    @property
    def cards(self) -> list[Card]:
        """The figures of the headline, all of one setting."""
        best, cards = self.best, []
        if best.speedup is not None and best.is_speedup:
            efficiency = Card("efficiency", _efficiency(best), f"of the ideal {best.devices} ×")
            cards = [Card("speedup", _speedup(best)), efficiency]
        elif best.speedup is not None:
            step_time = Card("step_time", units.seconds(best.step_time_s), self._of_one("step_time_s"))
            cards = [Card("speedup", "no difference"), step_time]
        cards.append(Card("throughput", units.rate(best.throughput), self._of_one("throughput", units.rate)))
        used = {card.term for card in cards}
        term = next((t for t, name in _TIMES.items() if t not in used and getattr(best, name) is not None), None)
        if term is not None:
            cards.append(Card(term, units.seconds(getattr(best, _TIMES[term])), self._of_one(_TIMES[term])))
        return cards

    def _of_one(self, name: str, shown: Callable[[Interval], Shown] = units.seconds) -> str:
        """The text with one device's value of the same figure."""
        if self.reference is None or self.reference is self.best or getattr(self.reference, name) is None:
            return ""
        of_one = shown(getattr(self.reference, name))
        return f"1 device: {of_one} ({of_one.interval})"

    @property
    def lost(self) -> list[tuple[str, Shown]]:
        """Time that each part adds to the headline's step beyond the ideal, largest first.

        The sum stands last, without a name.
        """
        best, one = self.best, self.reference
        if one is None or best.devices == 1 or best.scaling != "strong" or not best.ranks or not one.ranks:
            return []
        if best.efficiency is None or best.efficiency.high >= 1:  # within the interval nothing is lost
            return []
        added = excess_s(one, best)
        by_size = sorted(added.items(), key=lambda x: -x[1])
        return [(part, units.milliseconds(s)) for part, s in (*by_size, ("", sum(added.values())))]

    # The table

    @property
    def rows(self) -> list[Row]:
        """Every figure of every setting, without rows that this job or machine cannot have."""
        to_end = any(s.training_time_s for s in self.settings)
        compressed = any(_most(s, "compression_error") is not None for s in self.settings)
        has = {"": True, "compressed": compressed, "accelerators": not self.report.on_cores}
        rows = [
            self._row("global_batch", lambda s: Shown(s.global_batch, f"{s.global_batch:,}", "samples")),
            self._row("step_time", lambda s: units.seconds(s.step_time_s)),
            self._row("throughput", lambda s: units.rate(s.throughput)),
            self._row("tokens", _tokens, shown=any(s.tokens_per_sample for s in self.settings)),
            self._row("training_time", lambda s: _or(s.training_time_s, "not trained to its end"), shown=to_end),
            self._row(
                "time_to_target",
                lambda s: _or(s.time_to_target_s, "not reached"),
                shown=to_end and bool(self.report.target),
            ),
            self._row("speedup", self._unless_reference(_speedup)),
            self._row("pairs", self._unless_reference(_pairs)),
            self._row("efficiency", self._unless_reference(_efficiency)),
            self._row(
                "final_loss",
                lambda s: _or(s.final_loss, "not finite", units.number),
                shown=any(s.final_loss is not None for s in self.settings),
            ),
            *(self._of_ranks(figure) for figure in RANK_FIGURES if has[figure.only]),
            self._row("energy", lambda s: _or(s.energy_joules, "not available", units.joules)),
        ]
        return [row for row in rows if row is not None]

    def _row(self, term: str, cell: Callable[[MeasuredSetting], Cell], *, shown: bool = True) -> Row | None:
        return Row(term, [cell(s) for s in self.settings]) if shown else None

    def _of_ranks(self, figure: RankFigure) -> Row:
        """A row with the largest value over the ranks of each setting."""
        values = [_most(setting, figure.name) for setting in self.settings]
        return Row(figure.term, [_or(value, figure.absent, figure.shown) for value in values])

    def _unless_reference(self, cell: Callable[[MeasuredSetting], Cell]) -> Callable[[MeasuredSetting], Cell]:
        def compared(setting: MeasuredSetting) -> Cell:
            if setting is self.reference:
                return "reference"
            return "needs 1 device" if setting.speedup is None else cell(setting)

        return compared

    # The charts

    @property
    def plans(self) -> Chart | None:
        """A chart of the plans for several devices; None if no two use equally many."""
        compared = [s for s in self.settings if s.scaling == "strong" and s.devices > 1]
        if len({s.devices for s in compared}) == len(compared):
            return None
        figure = compared_figure(
            [self.name(s) for s in compared],
            [_most(s, "wire_bytes") for s in compared],
            [s.step_time_s.middle for s in compared],
            [s.time_to_target_s.middle if s.time_to_target_s else None for s in compared],
            [s.final_loss for s in compared],
        )
        return Chart("plans", figure, "Bytes on the wire, step time, time to target and final loss of each plan.")

    @property
    def scaling(self) -> Chart | None:
        """The curve against the ideal; none where nothing was compared with one device."""
        if all(s.speedup is None for s in self.settings):
            return None
        speedup = self._unless_reference(_speedup)
        points = [f"{self.name(s)}: {speedup(s)}." for s in self.settings if s is not self.reference]
        label = " ".join(["Speedup over the number of devices, against the ideal.", *points])
        return Chart("scaling", scaling_figure(self.settings), label)

    @property
    def breakdown(self) -> Chart | None:
        """The step of every rank of every setting, part by part."""
        bars = [
            figures.Bar(self.name(s), f"rank {rank}", use.parts_s, self._ideal_s(s))
            for s in self.settings
            for rank, use in enumerate(s.ranks)
        ]
        label = "Time of one step on each rank, part by part."
        return Chart("breakdown", figures.breakdown(bars), label) if bars else None

    def _ideal_s(self, setting: MeasuredSetting) -> float | None:
        if self.reference is None or setting.devices == 1:
            return None
        return self.reference.step_time_s.middle / (setting.devices if setting.scaling == "strong" else 1)

    @property
    def losses(self) -> list[Chart]:
        """The training loss over time and over samples."""
        curves = [(s, self.name(s), s.curve) for s in self.settings if s.curve is not None and s.curve.steps]
        if not curves:
            return []
        return [
            Chart(f"loss-{over}", losses_figure(curves, over), f"{title} of each setting.", title)
            for over, title in (("seconds", "Training loss over time"), ("samples", "Training loss over samples"))
        ]


def _best(settings: Sequence[MeasuredSetting]) -> MeasuredSetting:
    """The headline's setting: the fixed layout on most devices, else the fastest plan."""
    return max(settings, key=lambda s: (s.devices > 1, s.scaling == "strong", s.fixed, s.devices, s.throughput.middle))


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
    """The largest value of a figure over the ranks; None if no rank has it."""
    return max((rank.figures[name] for rank in setting.ranks if name in rank.figures), default=None)


def scaling_figure(settings: Sequence[MeasuredSetting]) -> Figure:
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


def compared_figure(
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


def losses_figure(curves: Sequence[tuple[MeasuredSetting, str, Curve]], over: str) -> Figure:
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
