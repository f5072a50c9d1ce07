"""The page of `paceline plan --catalogue`: time against cost of the machines that one could rent."""

from __future__ import annotations

import time
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from paceline import units
from paceline.planning.explain.which_cluster import ClusterChoice, Option
from paceline.report import plan_charts as charts
from paceline.report.page import Cell, Chart, Row, write_page
from paceline.units import percent, span

_HOUR_S = 3600.0


def write_choice_page(choice: ClusterChoice, command: str, file: Path) -> Path:
    """Write the page about a choice of machines.

    Raises:
        RunError: the file cannot be written.
    """
    facts = {
        "command": command,
        "paceline": version("paceline"),
        "prices": ", ".join(filter(None, (choice.offers.currency, choice.offers.as_of))) or "as listed",
    }
    return write_page(file, "choice.html.j2", facts=facts, on_cores=False, view=ChoiceView(choice), colours={})


class ChoiceView:
    """A choice of machines as the template shows it."""

    def __init__(self, choice: ClusterChoice) -> None:
        self.choice = choice
        self.created = time.strftime("%Y-%m-%d %H:%M")

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        fastest, cheapest = self.choice.fastest, self.choice.cheapest
        if fastest is None or cheapest is None:
            return f"{self.choice.nothing[0].upper()}{self.choice.nothing[1:]}."
        if fastest == cheapest:
            return f"The fastest and the cheapest: {_said(fastest)}."
        return f"The fastest: {_said(fastest)}. The cheapest: {_said(cheapest)}."

    @property
    def limits(self) -> list[str]:
        """Badges of the amount of training, the budget and the deadline."""
        choice = self.choice
        budget = [f"within {units.money(choice.budget)}"] if choice.budget is not None else []
        deadline = [f"in {span(choice.deadline_s)}"] if choice.deadline_s is not None else []
        return [choice.amount.words, *budget, *deadline, f"± {percent(choice.error, 0)}"]

    @property
    def chart(self) -> Chart:
        """Time against cost of all options."""
        points = [
            charts.Point(str(i), f"{one.words}: {one.candidate.plan}", one.cost, one.bought.wall_s / _HOUR_S)
            for i, one in enumerate(self._options, 1)
        ]
        figure = charts.pareto(points, "cost of the whole training", log=True, hours=True)
        return Chart("choice", figure, f"Time over cost of {units.count(len(points), 'choice')} of machines.")

    @property
    def rows(self) -> list[tuple[int, Row]]:
        """Options that no other beats in both, with their numbers in the chart."""
        return [(self._options.index(one) + 1, self._row(one)) for one in self.choice.front]

    @cached_property
    def _options(self) -> list[Option]:
        """All options, the one that the picture stars first."""
        first = self.choice.fastest or self.choice.front[0]
        return [first, *(one for one in self.choice.options if one is not first)]

    def _row(self, option: Option) -> Row:
        mfu = option.candidate.prediction.mfu
        cells: list[Cell] = [
            span(option.bought.wall_s),
            units.money(option.cost),
            "" if mfu is None else percent(mfu),
            percent(option.bought.goodput, 1),
        ]
        return Row(option.words, cells, str(option.candidate.plan), loud=option in self.choice.within)


def _said(option: Option) -> str:
    return f"{option.words}, {span(option.bought.wall_s)} for {units.money(option.cost)}"
