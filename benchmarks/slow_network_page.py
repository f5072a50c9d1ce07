"""The page of `slow_network.py`, which compares sync rules at several network speeds.

For each speed there is a table, loss against time, and the figures as bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import units
from paceline.report import charts
from paceline.report.page import Cell, Chart, template, write_page
from paceline_lab.report.bench_view import compared_figure
from paceline_lab.report.figures import DEFINITIONS

_TEMPLATE = Path(__file__).with_suffix(".html.j2")
FIGURES = ("wire", "step_time", "time_to_target", "final_loss")  # the columns of the table, by their definitions' names


@dataclass(frozen=True)
class RuleFigures:
    """One rule at one speed of the network; None where a figure was not measured.

    Attributes:
        plan: its text; "" where it is not a plan of ours.
        wire_bytes: per step of a rank.
        seconds, losses: of a run's steps.
    """

    name: str
    plan: str
    wire_bytes: float | None
    step_time_s: float
    time_to_target_s: float | None
    final_loss: float | None
    seconds: Sequence[float] = field(default_factory=list)
    losses: Sequence[float] = field(default_factory=list)

    @property
    def cells(self) -> list[Cell]:
        """Its line of the table, in the order of `FIGURES`."""
        absent = "not reached" if self.losses else "not measured"
        return [
            "not measured" if self.wire_bytes is None else units.size(self.wire_bytes),
            units.seconds(self.step_time_s),
            absent if self.time_to_target_s is None else units.seconds(self.time_to_target_s),
            "not measured" if self.final_loss is None else units.number(self.final_loss),
        ]


@dataclass(frozen=True)
class Rates:
    """The compared rules at each speed of the network, by its name."""

    title: str
    about: str
    at: dict[str, list[RuleFigures]]
    facts: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def loss_chart(self, number: int, rate: str) -> Chart | None:
        """Loss against time; None without any losses."""
        series = [
            charts.Line(
                rule.name,
                rule.seconds,
                rule.losses,
                charts.SERIES[i % len(charts.SERIES)],
            )
            for i, rule in enumerate(self.at[rate])
            if rule.losses
        ]
        if not series:
            return None
        figure = charts.lines(series, "seconds", "training loss")
        lowest, highest = (pick(y for line in series for y in line.y if y is not None) for pick in (min, max))
        figure.y.span = (lowest - 0.03 * (highest - lowest), min(highest, 2.5 * lowest))
        figure.height = 400
        return Chart(f"loss-{number}", figure, f"Training loss over time of each rule at {rate}.")

    def bars(self, number: int, rate: str) -> Chart:
        """The figures beside each other."""
        rules = self.at[rate]
        figure = compared_figure(
            [rule.name for rule in rules],
            [rule.wire_bytes for rule in rules],
            [rule.step_time_s for rule in rules],
            [rule.time_to_target_s for rule in rules],
            [rule.final_loss for rule in rules],
        )
        return Chart(f"bars-{number}", figure, f"The figures of each rule at {rate}, as bars.")


def write_rules_page(found: Rates, file: Path) -> Path:
    """Write the page.

    Raises:
        RunError: the file cannot be written.
    """
    look = template(_TEMPLATE.read_text())
    return write_page(
        file,
        look,
        facts=found.facts,
        environment=found.environment,
        definitions=DEFINITIONS,
        found=found,
        figures=FIGURES,
    )
