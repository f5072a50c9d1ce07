"""Pages stay small, fit a telephone and need no JavaScript, however long or odd a run is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from browser import Browser
from handmade_reports import report
from handmade_steps import record
from paceline.report.charts import POINTS, Line, lines, thinned
from paceline.report.run_page import losses, write_run_page
from paceline.report.run_record import RunRecord
from paceline.report.svg import chart, number_text
from paceline_lab.report.bench_view import write_bench_page

MOST_BYTES = 400_000
PARTS_MS = {"data": 0.3, "compute": 8.0, "comm": 1.5, "optimizer": 1.0}
SPIKE = 9.0


@dataclass(frozen=True)
class Case:
    """A run that a page has to show."""

    name: str
    steps: int = 40
    ranks: int = 1
    lost: int = 0  # steps at the end without a finite loss

    def losses(self) -> list[float | None]:
        """Losses that fall, with a spike after a third of the steps."""
        last = self.steps - self.lost
        spike = self.steps // 3 if self.steps > 3 else None
        return [SPIKE if i == spike else None if i >= last else 2 / (1 + i / self.steps) for i in range(self.steps)]


CASES = (
    Case("one step", steps=1),
    Case("one rank"),
    Case("eight ranks", steps=2000, ranks=8),
    Case("many ranks", ranks=64),
    Case("not finite", lost=30),
    Case("never finite", lost=40),
    Case("long", steps=100_000),
)


@pytest.mark.needs_chromium
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_page_is_small_fits_a_telephone_and_needs_no_script(case: Case, browser: Browser, tmp_path: Path) -> None:
    parts = {rank: PARTS_MS | {"compute": 8.0 + 0.1 * rank} for rank in range(case.ranks)}
    use = {"memory_bytes": 2**28, "wire_bytes": 2**20}
    every = dict.fromkeys(range(case.ranks), case.losses())
    run = record(tmp_path, parts, plan=f"dp={case.ranks}", steps=case.steps, losses=every, use=use)
    page = write_run_page(run)
    assert page.stat().st_size <= MOST_BYTES
    assert "<script" not in page.read_text()
    for width, dark in ((390, True), (1280, False)):
        browser.open(page, width=width, dark=dark, scripts=False)
        assert browser.run("return document.documentElement.scrollWidth") == width
        drawn = browser.all(".plot")
        assert {"plot-loss-steps", "plot-loss-time"} <= {plot.get_attribute("id") for plot in drawn}
        assert all(plot.find_elements("css selector", "svg") and plot.size["height"] > 40 for plot in drawn)
        assert all(plot.get_attribute("aria-label") for plot in drawn)
    if case.steps > 3 and case.lost < case.steps:
        ticks = [float(tick.text.replace(",", "")) for tick in browser.all("#plot-loss-steps .ytick")]
        assert max(ticks) <= SPIKE * 1.3
        told = " ".join(browser.hints("#plot-loss-steps"))
        assert number_text(SPIKE) in told or case.steps > POINTS
        [figure] = [found.figure for found in losses(RunRecord.read(run)) if found.name == "loss-steps"]
        points = figure.traces[0]
        shown = [*points.y, *(points.high or ())]
        assert max(value for value in shown if value is not None) == SPIKE
    assert browser.console() == []
    browser.open("about:blank")


@pytest.mark.needs_chromium
def test_the_figures_of_a_benchmark_are_there_without_a_script(browser: Browser, tmp_path: Path) -> None:
    values = report()
    page = write_bench_page(values, tmp_path)
    assert page.stat().st_size <= MOST_BYTES
    browser.open(page, width=390, scripts=False)
    assert browser.run("return document.documentElement.scrollWidth") == 390
    words = [word.text for word in browser.all("#plot-scaling .word")]
    speedups = [s.speedup.middle for s in values.settings if s.speedup]
    assert sorted(float(word.split()[0]) for word in words if word) == pytest.approx(sorted(speedups), rel=5e-3)
    assert len(browser.all("#figures td[data-value]")) > 20
    headings = browser.run("return [...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    browser.open("about:blank")


def test_a_long_curve_keeps_its_spikes_and_its_gaps() -> None:
    steps = 100_000
    values: list[float | None] = [1.0] * steps
    values[123] = SPIKE
    values[50_000:51_000] = [None] * 1000
    line = Line("loss", range(steps), values)
    short = thinned(line, lambda known: sum(known) / len(known))
    assert len(short.x) <= POINTS
    assert max(value for value in short.high if value is not None) == SPIKE
    assert None in short.y
    drawn = chart(lines([line], "steps", "loss"))
    assert len(drawn) < 40_000
    assert re.search(r"\b9\b", drawn)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12345.6, "12,346"),
        (0.5, "0.5"),
        (0.00012345, "0.0001234"),
        (1e-7, "1e-7"),
        (-2.5, "-2.5"),
        (1e20, "1e20"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_four_digits_at_most(value: float, text: str) -> None:
    assert number_text(value) == text
