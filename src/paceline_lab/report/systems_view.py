"""Page of a comparison of systems: strengths, times, and all figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline import units
from paceline.files import read_text
from paceline.report.charts import BLUE, GREY, SERIES, VERMILLION, Axis, Bars, Figure, Line, lines
from paceline.report.page import PAGE, Card, Cell, Chart, Row, not_by_paceline, write_page
from paceline.units import digits
from paceline_lab.report.figures import DEFINITIONS, template_named
from paceline_lab.scaling.summary import REPORT
from paceline_lab.systems.compared import ComparedWay, Comparison

OURS = "paceline"


def write_systems_page(found: Comparison, folder: Path) -> Path:
    """Write `report.html` about a comparison into its folder.

    Raises:
        RunError: the file cannot be written.
    """
    return write_page(
        folder / PAGE,
        template_named("systems.html.j2"),
        definitions=DEFINITIONS,
        facts={"machine": found.cluster, "command": found.command, "plan": found.plan},
        environment=found.environment,
        found=found,
        view=SystemsView(found),
    )


def write_kept_systems_page(folder: Path) -> Path:
    """Write the page of a comparison anew, from its directory.

    Raises:
        RunError: its report cannot be read, or the page cannot be written.
    """
    with not_by_paceline(folder, "comparison"):
        return write_systems_page(Comparison.load(json.loads(read_text(folder / REPORT))), folder)


class SystemsView:
    """A comparison as the template shows it."""

    def __init__(self, found: Comparison) -> None:
        self.found = found
        self.ways = sorted(found.ways, key=lambda way: way.step_s.middle)
        self.ours = next(way for way in found.ways if way.way == OURS)
        self.best = next((way for way in found.ways if way.way == found.best_other), None)

    def name(self, way: ComparedWay) -> str:
        """System and set-up."""
        return f"{way.title}, {way.label}"

    @property
    def verdict(self) -> str:
        """The result in one sentence: the first remark, or that nothing can be compared."""
        return self.found.remarks[0] if self.found.remarks else "No other system ran, so nothing can be compared."

    @property
    def cards(self) -> list[Card]:
        """Our figures beside those of the fastest other system."""
        ours = self.ours
        cards = [
            Card("step_time", units.seconds(ours.step_s), self._best(lambda way: units.seconds(way.step_s.middle))),
            Card(
                "throughput", units.rate(ours.samples_per_s), self._best(lambda w: units.rate(w.samples_per_s.middle))
            ),
        ]
        if ours.speedup is not None:
            alone = f"against one process on one core, batch {self.found.batch_alone}"
            cards.append(Card(f"{self.found.scaling}_speedup", units.ratio(ours.speedup), alone))
        memory = self._best(lambda way: units.size(way.memory_bytes))
        return [*cards, Card("all_memory", units.size(ours.memory_bytes), memory)]

    def _best(self, cell: Callable[[ComparedWay], units.Shown]) -> str:
        """A figure of the fastest other system, for the place under ours."""
        return f"{self.best.title}: {cell(self.best)}" if self.best else ""

    @property
    def documented(self) -> list[ComparedWay]:
        """A way of each system whose documentation is on the web."""
        each = {way.system: way for way in self.ways}
        return [way for way in each.values() if way.documentation.startswith("https://")]

    @property
    def steps(self) -> Chart:
        """Step times beside each other."""
        names = [self.name(way) for way in self.ways]
        label = "; ".join(f"{name}: {units.seconds(way.step_s)}" for name, way in zip(names, self.ways, strict=True))
        return Chart("steps", step_times(self.ways, names), f"Step time of each system. {label}.")

    @property
    def losses(self) -> Chart:
        """Losses over time of paceline's plans, and of the faster set-up of each other system."""
        shown: dict[str, ComparedWay] = {}
        for way in self.ways:
            if way.way != OURS and way.ratio is None:
                continue  # its batch is another
            shown.setdefault(way.way if way.system == OURS else way.system, way)
        courses = [(self.name(way), way.seconds, way.losses) for way in shown.values()]
        return Chart("losses", loss_courses(courses), "Training loss over the seconds since the first step.")

    @property
    def rows(self) -> list[Row]:
        """Every figure of every way, a row each."""
        return [self._row(way) for way in self.ways]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that this comparison has."""
        return [name for name, cell in self._cells().items() if any(cell(way) for way in self.ways)]

    def _row(self, way: ComparedWay) -> Row:
        cells = self._cells()
        shown: list[Cell] = [cells[name](way) or "–" for name in self.columns]
        return Row(way.title, shown, way.label, loud=way.way == OURS)

    def _cells(self) -> dict[str, Callable[[ComparedWay], Any]]:
        return {
            "step_time": lambda way: units.seconds(way.step_s),
            "times_ours": lambda way: way.ratio and units.ratio(way.ratio),
            "throughput": lambda way: units.rate(way.samples_per_s),
            f"{self.found.scaling}_speedup": lambda way: way.speedup and units.ratio(way.speedup),
            f"{self.found.scaling}_efficiency": lambda way: way.efficiency and units.percent(way.efficiency),
            "time_to_target": lambda way: way.to_target_s and units.seconds(way.to_target_s),
            "first_step": lambda way: units.seconds(way.first_step_s),
            "all_memory": lambda way: units.size(way.memory_bytes),
            "wire": lambda way: units.size(way.wire_bytes) if way.wire_bytes else None,
            "recovery": lambda way: way.recovery,
            "changed_lines": lambda way: None if way.lines is None else str(way.lines),
            "same_losses": self._losses,
        }

    def _losses(self, way: ComparedWay) -> str:
        if way.same:
            return "the same"
        return f"differ by {way.difference:.1%}" if way.exact else "converges alike, by its rule"


_ROW_PX, _FRAME_PX = 26, 90


def step_times(ways: Sequence[ComparedWay], names: Sequence[str]) -> Figure:
    """Step times as bars with intervals, the shortest on top.

    paceline's have a colour of their own; systems that compute something else are pale.
    """
    order = sorted(range(len(ways)), key=lambda i: ways[i].step_s.middle)
    middle, places = [ways[i].step_s.middle * 1e3 for i in order], list(range(len(order)))
    bars = Bars(
        "step",
        middle,
        places,
        [_colour(ways[i]) for i in order],
        opacity=[1.0 if ways[i].same else 0.4 for i in order],
        low=[ways[i].step_s.low * 1e3 for i in order],
        high=[min(ways[i].step_s.high * 1e3, 3 * x) for i, x in zip(order, middle, strict=True)],
        hints=[f"{names[i]}\n{digits(x)} ms" for i, x in zip(order, middle, strict=True)],
    )
    return Figure(
        Axis("ms a step", from_zero=True),
        Axis(
            span=(len(order) - 0.4, -0.6), ticks=[(p, names[i]) for p, i in zip(places, order, strict=True)], grid=False
        ),
        height=_FRAME_PX + _ROW_PX * len(ways),
        traces=[bars],
        legend=False,
    )


def loss_courses(courses: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> Figure:
    """Loss over seconds since the first step, a line for each way: name, seconds, losses."""
    series = [
        Line(name, x, y, SERIES[i % len(SERIES)], dashed=i >= len(SERIES)) for i, (name, x, y) in enumerate(courses)
    ]
    figure = lines(series, "seconds", "training loss", log_if_wide=True)
    figure.height += 18 * max(0, len(series) - 3)
    return figure


def _colour(way: ComparedWay) -> str:
    if way.system == "paceline":
        return VERMILLION
    return GREY if way.system == "plain" else BLUE
