"""A page of predicted against measured times, for benchmarks of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.report.charts import GREY, SERIES, Axis, Figure, Points
from paceline.report.page import Chart, template, write_page

_PAGE = """{% extends "page.html.j2" %}
{% from "macros.html.j2" import figure with context %}
{% block title %}{{ heading }}{% endblock %}
{% block header %}<h1>{{ heading }}</h1>{% endblock %}
{% block content %}
{% call figure(drawn, "Predicted against measured") %}
<p class="about">One point for each run. Dashed: predicted as measured; dotted: 20 % more and less.</p>
{% endcall %}
{% endblock %}"""


class Compared(NamedTuple):
    """One run: seconds measured and predicted, and a text about it."""

    measured_s: float
    predicted_s: float
    about: str


def write_predicted_page(file: Path, heading: str, groups: Mapping[str, Sequence[Compared]]) -> None:
    """Write the page; each group of runs has a colour and a name in the legend."""
    every = [run for runs in groups.values() for run in runs]
    times = [time for run in every for time in (run.measured_s, run.predicted_s)]
    ends = [0.8 * min(times), 1.25 * max(times)]
    traces = [Points("as measured", ends, ends, GREY, dash="dash", hints=())]
    traces += [
        Points(f"{factor:g} times", ends, [factor * end for end in ends], GREY, 1, "dot", hints=(), in_legend=False)
        for factor in (0.8, 1.2)
    ]
    for number, (name, runs) in enumerate(groups.items()):
        x, y = [run.measured_s for run in runs], [run.predicted_s for run in runs]
        hints = [f"{name}\n{run.about}" for run in runs]
        traces.append(Points(name, x, y, SERIES[number % len(SERIES)], width=0, marks=6, hints=hints))
    axes = Axis("measured, seconds a step", log=True), Axis("predicted, seconds a step", log=True)
    drawn = Chart("predicted", Figure(*axes, height=800 + 18 * (len(groups) // 5), traces=[*traces]), heading)
    write_page(file, template(_PAGE), facts={"runs": str(len(every))}, heading=heading, drawn=drawn)
