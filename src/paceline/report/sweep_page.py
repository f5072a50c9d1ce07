"""Page of `paceline sweep`: a table of all combinations, and a chart of the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import units
from paceline.cluster.discover import environment
from paceline.report.charts import BLUE, GREY, VERMILLION, Axis, Figure, Points
from paceline.report.figures import Definition
from paceline.report.page import Cell, Chart, write_page
from paceline.run.sweep.results import Combination
from paceline.run.sweep.space import short_names, shown, titled
from paceline.run.sweep.sweep import FINAL_STEPS, Sweep
from paceline.units import Shown

PAGE = "sweep.html"
_WIDE = 30.0  # smallest ratio of the largest to the smallest value for which an axis is logarithmic
DEFINITIONS: Mapping[str, Definition] = {
    "sweep_metric": Definition(
        "metric", "The compared figure at the end of each run: median, lowest and highest value over the seeds."
    ),
    "sweep_loss": Definition(
        "loss",
        "Validation loss at the end, median over the seeds; without a validation set, the mean training loss of the "
        f"last {FINAL_STEPS} steps.",
    ),
    "sweep_time": Definition("time", "From the first step to the end of the run, median over the seeds."),
    "sweep_best": Definition(
        "best",
        "The combination with the best median. It is marked as best only if its 95 % interval, from "
        "three seeds or more, overlaps no other interval. Otherwise, all combinations that could be "
        "the best have the mark ≈.",
    ),
}


def write_sweep_page(sweep: Sweep) -> Path:
    """Write `sweep.html` into the directory of a sweep.

    Raises:
        RunError: the file cannot be written.
    """
    combinations, verdict = sweep.combinations, sweep.verdict
    keys = list(sweep.parameters[0])
    over = sum(run.is_over for run in sweep.runs)
    view = {
        "job": sweep.job.name,
        "verdict": verdict.text,
        "metric": sweep.metric,
        "has_loss": sweep.metric != "loss",
        "keys": short_names(keys),
        "rows": [
            {
                "number": c.number,
                "mark": ("best" if verdict.is_clear else "≈ best") if c.number in verdict.best else "",
                "parameters": [shown(c.parameters[key]) for key in keys],
                "metric": _figure_of(c.metric, c.spread),
                "loss": _figure_of(c.median("loss")),
                "time": "" if (time_s := c.median("time_s")) is None else units.seconds(time_s),
                "state": c.state,
                "runs": c.directory,
            }
            for c in combinations
        ],
        "failed": [(run.run, str(run.error).partition("\n")[0]) for run in sweep.runs if run.state == "failed"],
        "runs": f"{over} of {units.count(len(sweep.runs), 'run')} finished",
        "chart": _chart(combinations, keys, sweep.metric, verdict.best),
    }
    facts = {"machine": sweep.cluster.describe(), "command": sweep.request.command, "plan": sweep.request.plan}
    return write_page(
        sweep.path / PAGE,
        "sweep.html.j2",
        facts=facts,
        environment=environment(),
        definitions=DEFINITIONS,
        view=view,
    )


def _figure_of(value: float | None, spread: tuple[float, float] | None = None) -> Cell:
    if value is None:
        return ""
    return Shown(value, f"{value:.4g}", "", f"{spread[0]:.4g} to {spread[1]:.4g}" if spread else None)


def _chart(combinations: Sequence[Combination], keys: Sequence[str], metric: str, best: Sequence[int]) -> Chart | None:
    known = [c for c in combinations if c.metric is not None]
    if len(known) < 2:
        return None
    varied = [key for key in keys if len({shown(c.parameters[key]) for c in combinations}) > 1]
    figure = _against(known, varied[0], metric, best) if len(varied) == 1 else _parallel(known, varied, metric, best)
    what = [f"{titled(c.parameters)}: {metric} {c.metric:.4g}" for c in known]
    return Chart("sweep", figure, f"{metric} by {', '.join(varied)}. {'; '.join(what)}.")


class _Scale:
    """Positions of a parameter's values on an axis. Values that are not numbers are evenly spaced."""

    def __init__(self, values: Sequence[Any]) -> None:
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        self.log = numbers and min(values) > 0 and max(values) >= _WIDE * min(values)
        self.names = None if numbers else list(dict.fromkeys(map(shown, values)))
        self.values = values

    def at(self, value: Any) -> float:
        """Return the position of a value on the axis, before a logarithm is taken."""
        return float(value) if self.names is None else float(self.names.index(shown(value)))

    def share(self, value: Any) -> float:
        """Return the relative position of a value: 0 for the lowest, 1 for the highest."""
        scaled = [self._scaled(v) for v in self.values]
        low, high = min(scaled), max(scaled)
        return (self._scaled(value) - low) / (high - low) if high > low else 0.5

    def _scaled(self, value: Any) -> float:
        return math.log(value) if self.log else self.at(value)

    @property
    def ticks(self) -> list[tuple[float, str]] | None:
        """Ticks with labels if the values are not numbers; None for numbers."""
        return None if self.names is None else [(float(i), name) for i, name in enumerate(self.names)]


def _against(known: Sequence[Combination], key: str, metric: str, best: Sequence[int]) -> Figure:
    """Plot the metric over one parameter, with the range of values over the seeds."""
    scale = _Scale([c.parameters[key] for c in known])
    ordered = sorted(known, key=lambda c: scale.at(c.parameters[key]))
    values = [c.metric or 0.0 for c in ordered]
    spreads = [c.spread or (value, value) for c, value in zip(ordered, values, strict=True)]
    several = any(c.spread for c in ordered)
    figure = Figure(Axis(short_names([key])[0], log=scale.log, ticks=scale.ticks), Axis(metric), legend=False)
    figure.traces.append(
        Points(
            metric,
            [scale.at(c.parameters[key]) for c in ordered],
            values,
            BLUE,
            width=1.5 if scale.names is None else 0,
            marks=9,
            mark_colours=[VERMILLION if c.number in best else BLUE for c in ordered],
            low=[low for low, _ in spreads] if several else None,
            high=[high for _, high in spreads] if several else None,
            hints=[f"{titled(c.parameters)}\n{metric} {c.metric:.4g}" for c in ordered],
        )
    )
    return figure


def _parallel(known: Sequence[Combination], keys: Sequence[str], metric: str, best: Sequence[int]) -> Figure:
    """Plot parallel coordinates: each combination is a line through its parameters to its metric."""
    scales = {key: _Scale([c.parameters[key] for c in known]) for key in keys}
    of_metric = _Scale([c.metric for c in known])
    columns = [*short_names(keys), metric]
    figure = Figure(
        Axis(ticks=[(float(i), name) for i, name in enumerate(columns)], span=(-0.3, len(columns) - 0.5)),
        Axis(span=(-0.08, 1.08), ticks=(), grid=False),
        height=360,
        legend=False,
    )
    # the best combinations are drawn last, so that their lines are on top
    for c in sorted(known, key=lambda c: c.number in best):
        places = [*(scales[key].share(c.parameters[key]) for key in keys), of_metric.share(c.metric)]
        is_best = c.number in best
        hint = f"{titled(c.parameters)}\n{metric} {c.metric:.4g}"
        figure.traces.append(
            Points(
                titled(c.parameters),
                [float(i) for i in range(len(columns))],
                places,
                VERMILLION if is_best else GREY,
                width=2.5 if is_best else 1,
                marks=5,
                hints=[hint] * len(columns),
            )
        )
    for i, (name, scale) in enumerate([*scales.items(), (metric, of_metric)]):
        values = list(dict.fromkeys(scale.values)) if _hashable(scale.values) else list(scale.values)
        labelled = values if scale.names is not None or len(values) <= 4 else [min(values), max(values)]
        figure.traces.append(
            Points(
                name,
                [float(i)] * len(labelled),
                [scale.share(value) for value in labelled],
                GREY,
                width=0,
                marks=3,
                words=[shown(value) for value in labelled],
                side="right" if scale is of_metric else "left",
                hints=(),
            )
        )
    return figure


def _hashable(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str | int | float | None) for value in values)
