"""View of a benchmark's page: headline, cards, table and charts, from a `Report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from paceline import units
from paceline.benchmark.limits import excess_s
from paceline.benchmark.result import MeasuredSetting, Report
from paceline.errors import RunError
from paceline.report import charts
from paceline.report.chart import Chart
from paceline.report.definitions import PARTS, Card
from paceline.report.panels import Panel, panelled
from paceline.stats import LEAST_REPEATS, Interval
from paceline.units import Shown

Cell = Shown | str
_TIMES = {"time_to_target": "time_to_target_s", "training_time": "training_time_s", "step_time": "step_time_s"}
_VISIBLE = 0.02  # by what part a speedup may miss the ratio of the figures beside it without a word


@dataclass(frozen=True)
class BenchRow:
    """A line of the table: a definition's name, and a figure or words per setting."""

    term: str
    cells: list[Cell]


class BenchView:
    """A report as the template shows it. `folder`: the benchmark's directory.

    Raises:
        RunError: nothing was measured.
    """

    def __init__(self, report: Report, folder: Path) -> None:
        if not report.settings:
            raise RunError(
                f"{folder}: the benchmark has measured nothing yet, and its page needs at least one run of "
                "one setting. "
                "Run its command again to go on."
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
            " (This is the median of rounds, in each of which both took turns; the medians over all rounds, "
            "which stand beside it, are "
            f"{units.digits(ratio)} times apart.)"
        )

    @property
    def cards(self) -> list[Card]:
        """The figures of the headline, all of one setting."""
        best, cards = self.best, []
        if best.speedup is not None and best.is_speedup:
            cards = [
                Card("speedup", _speedup(best)),
                Card("efficiency", _efficiency(best), f"of the ideal {best.devices} ×"),
            ]
        elif best.speedup is not None:
            cards = [
                Card("speedup", "no difference"),
                Card("step_time", units.seconds(best.step_time_s), self._of_one("step_time_s")),
            ]
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
    def rows(self) -> list[BenchRow]:
        """Every figure of every setting, without rows that this job or machine cannot have."""
        has_tokens = any(s.tokens_per_sample for s in self.settings)
        has_gpu = any(rank.gpu_memory_bytes for s in self.settings for rank in s.ranks)
        to_end = any(s.training_time_s for s in self.settings)
        to_target = to_end and self.report.target
        has_loss = any(s.final_loss is not None for s in self.settings)
        return [
            BenchRow("global_batch", [Shown(s.global_batch, f"{s.global_batch:,}", "samples") for s in self.settings]),
            BenchRow("step_time", [units.seconds(s.step_time_s) for s in self.settings]),
            BenchRow("throughput", [units.rate(s.throughput) for s in self.settings]),
            *([BenchRow("tokens", [_tokens(s) for s in self.settings])] if has_tokens else []),
            *(
                [BenchRow("training_time", [_time(s.training_time_s, "not trained to its end") for s in self.settings])]
                if to_end
                else []
            ),
            *(
                [BenchRow("time_to_target", [_time(s.time_to_target_s, "not reached") for s in self.settings])]
                if to_target
                else []
            ),
            BenchRow("speedup", [self._or_reference(s, _speedup) for s in self.settings]),
            BenchRow("pairs", [self._or_reference(s, _pairs) for s in self.settings]),
            BenchRow("efficiency", [self._or_reference(s, _efficiency) for s in self.settings]),
            *(
                [BenchRow("final_loss", [_or_words(s.final_loss, units.number, "not finite") for s in self.settings])]
                if has_loss
                else []
            ),
            BenchRow("wire", [_largest(s, "wire_bytes") for s in self.settings]),
            *self._compressed_rows,
            BenchRow("memory", [_largest(s, "memory_bytes") for s in self.settings]),
            *([BenchRow("gpu_memory", [_largest(s, "gpu_memory_bytes") for s in self.settings])] if has_gpu else []),
            BenchRow(
                "energy",
                ["not available" if s.energy_joules is None else units.joules(s.energy_joules) for s in self.settings],
            ),
        ]

    @property
    def _compressed_rows(self) -> list[BenchRow]:
        """Rows on what compression saves and loses; none if no plan compresses."""
        errors = [
            max((r.compression_error for r in s.ranks if r.compression_error is not None), default=None)
            for s in self.settings
        ]
        if errors == [None] * len(errors):
            return []
        return [
            BenchRow("saved", [_largest(s, "saved_bytes") for s in self.settings]),
            BenchRow("compression_error", [_or_words(error, units.number, "not compressed") for error in errors]),
        ]

    def _or_reference(self, setting: MeasuredSetting, cell: Callable[[MeasuredSetting], Cell]) -> Cell:
        if setting is self.reference:
            return "reference"
        return "needs 1 device" if setting.speedup is None else cell(setting)

    # The charts

    @property
    def plans(self) -> Chart | None:
        """A chart of the plans for several devices; None if no two use equally many."""
        compared = [s for s in self.settings if s.scaling == "strong" and s.devices > 1]
        if len({s.devices for s in compared}) == len(compared):
            return None
        wire = [[r.wire_bytes for r in s.ranks if r.wire_bytes is not None] for s in compared]
        panels = [
            Panel("bytes on the wire per step, KiB", [max(sent, default=None) for sent in wire], 1 / 1024),
            Panel("step time, ms", [s.step_time_s.middle for s in compared], 1e3),
            Panel("time to target, s", [s.time_to_target_s.middle if s.time_to_target_s else None for s in compared]),
            Panel("final loss", [s.final_loss for s in compared]),
        ]
        label = "Bytes on the wire, step time, time to target and final loss of each plan."
        return Chart("plans", panelled([self.name(s) for s in compared], panels), label)

    @property
    def scaling(self) -> Chart | None:
        """The curve against the ideal; none where nothing was compared with one device."""
        if all(s.speedup is None for s in self.settings):
            return None
        points = [
            f"{self.name(s)}: {self._or_reference(s, _speedup)}." for s in self.settings if s is not self.reference
        ]
        return Chart(
            "scaling",
            charts.scaling(self.settings),
            " ".join(["Speedup over the number of devices, against the ideal.", *points]),
        )

    @property
    def breakdown(self) -> Chart | None:
        """The step of every rank of every setting, part by part."""
        bars = [
            charts.Bar(self.name(s), f"rank {rank}", use.parts_s, self._ideal_s(s))
            for s in self.settings
            for rank, use in enumerate(s.ranks)
        ]
        return (
            Chart("breakdown", charts.breakdown(bars), "Time of one step on each rank, part by part.") if bars else None
        )

    def _ideal_s(self, setting: MeasuredSetting) -> float | None:
        if self.reference is None or setting.devices == 1:
            return None
        return self.reference.step_time_s.middle / (setting.devices if setting.scaling == "strong" else 1)

    @property
    def losses(self) -> list[tuple[str, Chart]]:
        """The training loss over time and over samples."""
        curves = [(s, self.name(s), s.curve) for s in self.settings if s.curve is not None and s.curve.steps]
        if not curves:
            return []
        return [
            (title, Chart(f"loss-{over}", charts.losses(curves, over), f"{title} of each setting."))
            for over, title in (("seconds", "Training loss over time"), ("samples", "Training loss over samples"))
        ]


def _best(settings: Sequence[MeasuredSetting]) -> MeasuredSetting:
    """The headline's setting: strong scaling, most devices, then the fastest plan."""
    return max(settings, key=lambda s: (s.devices > 1, s.scaling == "strong", s.devices, s.throughput.middle))


def _speedup(setting: MeasuredSetting) -> Cell:
    return units.ratio(setting.speedup) if setting.speedup is not None and setting.is_speedup else "no difference"


def _efficiency(setting: MeasuredSetting) -> Cell:
    return units.percent(setting.efficiency) if setting.efficiency is not None and setting.is_speedup else "not stated"


def _pairs(setting: MeasuredSetting) -> Cell:
    return " · ".join(units.digits(pair) for pair in setting.pairs) if setting.is_speedup else "not stated"


def _tokens(setting: MeasuredSetting) -> Cell:
    per_sample = setting.tokens_per_sample
    return "not available" if per_sample is None else units.rate(setting.throughput.times(per_sample), "tokens/s")


def _time(time_s: Interval | None, absent: str) -> Cell:
    return absent if time_s is None else units.seconds(time_s)


def _or_words(x: float | None, shown: Callable[[float], Shown], absent: str) -> Cell:
    return absent if x is None else shown(x)


def _largest(setting: MeasuredSetting, what: str) -> Cell:
    values = [value for rank in setting.ranks if (value := getattr(rank, what)) is not None]
    return units.size(max(values)) if values else "not available"
