"""Notebook views of benchmarks and comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import units
from paceline.report.charts import Panel, panelled
from paceline.report.notebook import shown

if TYPE_CHECKING:
    from paceline.stats import Interval
    from paceline_lab.scaling.result import Report
    from paceline_lab.systems.compared import Comparison


def report_html(report: Report) -> str:
    """Return HTML with the throughput, speedup and efficiency of all settings of a benchmark."""
    settings = report.settings
    figure = panelled([s.title for s in settings], [Panel("samples/s", [s.throughput.middle for s in settings])])
    rows = [
        (s.title, s.plan, _shown(units.rate(s.throughput)), _speedup(s.speedup, s.is_speedup), _share(s.efficiency))
        for s in settings
    ]
    head = ("setting", "plan", "throughput", "speedup", "efficiency")
    return shown(figure if settings else None, f"Benchmark of {report.job} on {report.cluster}", head, rows)


def comparison_html(found: Comparison) -> str:
    """Return HTML with the throughput and speedup of all compared systems."""
    names = [f"{way.title}, {way.label}" for way in found.ways]
    figure = panelled(names, [Panel("samples/s", [way.samples_per_s.middle for way in found.ways])])
    rows = [
        (name, _shown(units.rate(way.samples_per_s)), _speedup(way.speedup, True), way.verdict_on_losses)
        for name, way in zip(names, found.ways, strict=True)
    ]
    rows += [(title, reason, "", "") for title, reason in found.left_out.items()]
    head = ("system", "throughput", "speedup", "losses")
    return shown(figure if found.ways else None, f"Comparison of {found.job} on {found.places}", head, rows)


def _shown(figure: units.Shown) -> str:
    return f"{figure} ({figure.interval})" if figure.interval else str(figure)


def _speedup(speedup: Interval | None, differs: bool) -> str:
    if speedup is None:
        return ""
    return _shown(units.ratio(speedup)) if differs else "no difference"


def _share(efficiency: Interval | None) -> str:
    return "" if efficiency is None else _shown(units.percent(efficiency))
