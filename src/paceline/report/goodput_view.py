"""Goodput on a run's page: a sentence, a table of the lost time, a curve."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from paceline.report import charts
from paceline.report.page import Chart, Row
from paceline.run.record.goodput import USEFUL, Failure, Goodput
from paceline.units import percent, seconds

_STRETCHES = 60  # of the wall-clock, at most, in the curve
_STEPS = 4  # that a stretch holds at least, in the mean
_MARKED = 30  # failures that the curve names; more would hide it


class GoodputView:
    """Division of a run's wall-clock as the template shows it.

    Args:
        steps: number of steps that the run made.
    """

    def __init__(self, goodput: Goodput, steps: int) -> None:
        self.goodput, self._steps = goodput, steps

    @property
    def sentence(self) -> str:
        """Goodput, and the largest losses."""
        return f"Goodput is {self.goodput.sentence()}."

    @property
    def rows(self) -> list[Row]:
        """Seconds and share of each part that took any time."""
        wall_s = self.goodput.wall_s
        return [
            Row(f"wall_{part}", [seconds(s), percent(s / wall_s)], loud=part != USEFUL)
            for part, s in self.goodput.parts_s.items()
            if s > 0
        ]

    @cached_property
    def chart(self) -> Chart | None:
        """Goodput over the run, with the failures; None where no time passed."""
        if not self.goodput.wall_s:
            return None
        points = self.goodput.over_time(max(1, min(_STRETCHES, self._steps // _STEPS)))
        moments = [0.0, *(second for second, _ in points)]
        middles = [(before + after) / 2 for before, after in pairwise(moments)]
        line = charts.Line("goodput", middles, [100 * share for _, share in points], charts.GREEN)
        marks = [charts.Mark(failure.at_s, failure.text) for failure in self._marked]
        figure = charts.lines([line], "seconds of wall-clock", "goodput, %", marks=marks)
        figure.y.span = (0, 105)
        told = [f"{failure.text} after {seconds(failure.at_s)}." for failure in self._marked]
        return Chart("goodput", figure, " ".join([self.sentence, *told]))

    @property
    def _marked(self) -> Sequence[Failure]:
        return self.goodput.failures[:_MARKED]
