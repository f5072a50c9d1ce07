"""Page of `paceline bench simulate`: scaling curves of other machines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import RunError
from paceline.files import write_whole
from paceline.planning.cost.layout import PART_NAMES, PARTS, Prediction
from paceline.planning.explain.explain import LEAST
from paceline.report.charts import AZURE, BLUE, GREEN, GREY, OCHRE, PURPLE, VERMILLION, Axis, Dash, Figure, Points
from paceline.report.page import Card, Cell, Chart, Row, write_page
from paceline.report.plan_page import TIME_COLOURS, stacked_figure
from paceline.stats import Interval
from paceline.units import Shown, digits, percent, seconds, size
from paceline_lab.report.figures import DEFINITIONS, template_named
from paceline_lab.simulated.curve import PAYS, Point, SimulatedCurve, limits, sentences
from paceline_lab.simulated.measured_here import Likeness
from paceline_lab.simulated.simulation import Simulation

PAGE, DATA = "simulated.html", "simulated.json"


def write_simulated_page(simulations: Sequence[Simulation], command: str, folder: Path) -> Path:
    """Write the page `simulated.html` and its data `simulated.json` into a folder.

    Raises:
        RunError: the files cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / DATA, json.dumps([simulation.to_json() for simulation in simulations], indent=1))
    except OSError as error:
        raise RunError(
            "bench.folder_unwritable",
            "{folder} cannot be written: {reason}. Name another directory with --out.",
            folder=folder / DATA,
            reason=error.strerror or error,
        ) from error
    facts = {
        "command": command,
        "paceline": version("paceline"),
        "seed": str(simulations[0].seed),
        "measured": "nothing on this page, but the curves that are said to be published",
    }
    return write_page(
        folder / PAGE,
        template_named("simulated.html.j2"),
        definitions=DEFINITIONS,
        facts=facts,
        on_cores=all(simulation.device.startswith("CPU") for simulation in simulations),
        job=simulations[0].job,
        created=time.strftime("%Y-%m-%d %H:%M"),
        views=[_simulation(simulation, number) for number, simulation in enumerate(simulations)],
    )


def _simulation(simulation: Simulation, number: int) -> dict[str, Any]:
    """Return the template's values for one simulation.

    Args:
        number: index of the simulation on the page.
    """
    job, last, told = simulation.job, simulation.strong.last, sentences(simulation.strong)
    assert last.candidate is not None
    parameters = f"{units.large(last.candidate.layout.trace.parameters)} parameters"
    verdicts = (sentence for sentence in told if "predicted to be" in sentence or "no faster" in sentence)
    return {
        "number": number,
        "simulation": simulation,
        "verdict": next(verdicts, told[0]),
        "badges": [parameters, f"global batch {job.global_batch:,}", job.precision, f"seed {simulation.seed}"],
        "cards": _cards(simulation.strong),
        "curves": [_curve(curve, simulation.published[curve.scaling], number) for curve in simulation.curves],
    }


def _cards(strong: SimulatedCurve) -> list[Card]:
    last, base = strong.last, strong.base
    assert last.candidate is not None
    mfu = last.candidate.prediction.mfu
    cards = [
        Card("predicted_step", _middle(seconds, last.step_time_s), _between(seconds, last.step_time_s)),
        Card("simulated_speedup", _middle(units.ratio, last.speedup), f"against {units.count(base.devices, 'device')}"),
        Card("simulated_efficiency", _middle(percent, last.efficiency), _between(percent, last.efficiency)),
    ]
    if last.goodput is not None:
        cards.append(Card("simulated_goodput", percent(last.goodput.middle, 1), _between(percent, last.goodput)))
    if mfu is not None:
        cards.append(Card("mfu", percent(mfu), "of the devices in use, as the planner predicts"))
    return cards


def _curve(curve: SimulatedCurve, published: list[Likeness], number: int) -> dict[str, Any]:
    key, fitting = f"{curve.scaling}-{number}", curve.fitting
    speedups = [f"{p.devices:,} devices: {digits(p.speedup.middle)} times." for p in fitting if p.speedup]
    shares = [f"{p.devices:,} devices: {percent(p.efficiency.middle)}." for p in fitting if p.efficiency]
    parts = [part for part in PARTS if any(_shares(point).get(part, 0.0) >= LEAST for point in fitting)]
    cells: dict[str, Callable[[Point, Prediction], Cell]] = {
        "predicted_step": lambda point, _: seconds(point.step_time_s) if point.step_time_s else "",
        "predicted_throughput": lambda point, _: units.rate(point.throughput) if point.throughput else "",
        "simulated_speedup": lambda point, _: units.ratio(point.speedup) if point.speedup else "",
        "simulated_efficiency": lambda point, _: percent(point.efficiency) if point.efficiency else "",
        "simulated_goodput": lambda point, _: percent(point.goodput) if point.goodput else "",
        "mfu": lambda _, prediction: "" if prediction.mfu is None else percent(prediction.mfu),
        "device_memory": lambda _, prediction: size(prediction.memory_bytes),
    }
    if curve.last.goodput is None:
        del cells["simulated_goodput"]

    def row(point: Point) -> Row:
        if point.candidate is None:
            return Row(f"{point.devices:,}", ["no plan fits", *[""] * (len(cells) - 1)], point.why)
        prediction = point.candidate.prediction
        shown = [cell(point, prediction) for cell in cells.values()]
        return Row(f"{point.devices:,}", shown, str(point.candidate.plan))

    return {
        "key": key,
        "scaling": curve.scaling,
        "term": "strong" if curve.scaling == "strong" else "simulated_weak",
        "sentences": sentences(curve),
        "published": list(zip(PUBLISHED, published, strict=False)),
        "speedup": Chart(f"speedup-{key}", _speedup_figure(curve), " ".join(["Predicted speedup.", *speedups])),
        "efficiency": Chart(
            f"efficiency-{key}", _efficiency_figure(curve, published), " ".join(["Predicted efficiency.", *shares])
        ),
        "parts": parts,
        "breakdown": Chart(
            f"parts-{key}", _parts_figure(fitting, parts), "Where a step goes on each number of devices."
        ),
        "heads": list(cells),
        "rows": [row(point) for point in curve.points],
        "limits": limits(curve),
    }


def _parts_figure(points: Sequence[Point], parts: Sequence[str]) -> Figure:
    shares = {part: [100 * _shares(point).get(part, 0.0) for point in points] for part in parts}
    names = [f"{point.devices:,}: {point.candidate.plan}" for point in points if point.candidate]
    figure = stacked_figure(names, shares, TIME_COLOURS, PART_NAMES, "% of a step")
    # the notes show the device count and the plan instead of a rank
    for note, point in zip(figure.notes, points, strict=True):
        note.text = f"{point.devices:,}  {point.candidate and point.candidate.plan}"
    return figure


def _shares(point: Point) -> dict[str, float]:
    assert point.candidate is not None
    prediction = point.candidate.prediction
    return {part: s / prediction.step_time_s for part, s in prediction.breakdown.items()}


def _middle(shown: Callable[[float], Shown], interval: Interval | None) -> Shown:
    assert interval is not None
    return shown(interval.middle)


def _between(shown: Callable[[float], Shown], interval: Interval | None) -> str:
    assert interval is not None
    return f"80 %: {shown(interval.low)} to {shown(interval.high)}"


PUBLISHED = (OCHRE, GREEN, PURPLE, AZURE)  # colours of published curves
_TOP = 1.6  # largest efficiency that the chart shows


def _speedup_figure(curve: SimulatedCurve) -> Figure:
    points, base = curve.fitting, curve.base
    at = [point.devices for point in points]
    ideal = [point.devices / base.devices for point in points]
    figure = Figure(Axis("devices"), Axis(f"times the speed of {base.devices:,}"))
    _line(figure, at, ideal, "ideal", GREY, dash="dash")
    gains = [point.speedup for point in points if point.speedup is not None]
    _band(figure, at, gains)
    text = [
        f"{digits(gain.middle)} ×" if point is curve.last else "" for point, gain in zip(points, gains, strict=True)
    ]
    _predicted(figure, points, [gain.middle for gain in gains], text)
    least, most = min(gain.low for gain in gains), max(*ideal, *(gain.high for gain in gains))
    first, last = math.floor(math.log2(min(least, 1.0))), math.ceil(math.log2(most))
    marks = [2.0**power for power in range(first, last + 1)][:: max(1, (last - first) // 8)]
    figure.y.log, figure.y.ticks = True, [(mark, f"{mark:g} ×") for mark in marks]
    _doubling(figure, at)
    return figure


def _efficiency_figure(curve: SimulatedCurve, published: Sequence[Likeness]) -> Figure:
    points = curve.fitting
    at = [point.devices for point in points]
    figure = Figure(Axis("devices"), Axis("efficiency, %"))
    every = sorted({*at, *(n for one in published for n in one.held.curve.devices)})
    _line(figure, [every[0], every[-1]], [100.0, 100.0], "ideal", GREY, dash="dash")
    _line(figure, [every[0], every[-1]], [100 * PAYS] * 2, "50 %", VERMILLION, dash="dot")
    shares = [point.efficiency for point in points if point.efficiency is not None]
    _band(figure, at, [share.times(100) for share in shares])
    _predicted(figure, points, [100 * share.middle for share in shares], [""] * len(points))
    for one, colour in zip(published, PUBLISHED, strict=False):
        held = one.held
        shares_of = [100 * share for share in held.efficiency]
        figure.traces.append(
            Points(
                held.curve.title,
                list(held.curve.devices),
                shares_of,
                colour,
                dash="dashdot",
                marks=8,
                symbol="diamond",
                in_legend=False,  # the table below the chart explains the colours
                hints=[
                    f"measured by others\n{held.curve.title}\n{n:,} devices: {digits(share)} %"
                    for n, share in zip(held.curve.devices, shares_of, strict=True)
                ],
            )
        )
    top = 100 * max(1.1, min(_TOP, 1.05 * max(share.high for share in shares)))
    figure.y.span = (0, top)
    _doubling(figure, every)
    return figure


def _line(figure: Figure, x: Sequence[float], y: Sequence[float], name: str, colour: str, *, dash: Dash) -> None:
    figure.traces.append(Points(name, list(x), list(y), colour, dash=dash, hints=()))


def _band(figure: Figure, at: Sequence[int], intervals: Sequence[Interval]) -> None:
    middles, low, high = zip(*((one.middle, one.low, one.high) for one in intervals), strict=True)
    band = Points("80 % interval", at, middles, BLUE, width=0, low=low, high=high, fill="band", hints=())
    figure.traces.append(band)


def _predicted(figure: Figure, points: Sequence[Point], y: Sequence[float], text: Sequence[str]) -> None:
    x, hints = [point.devices for point in points], [_hover(point) for point in points]
    figure.traces.append(
        Points("predicted", x, list(y), BLUE, width=2.5, marks=8, words=list(text), side="above", hints=hints)
    )


def _hover(point: Point) -> str:
    assert point.candidate is not None
    assert point.step_time_s is not None
    assert point.efficiency is not None
    share = point.efficiency
    return (
        f"predicted, {point.devices:,} devices\n{point.candidate.plan}\n"
        f"{seconds(point.step_time_s.middle)} a step\n"
        f"efficiency {percent(share.middle)} ({percent(share.low)} to {percent(share.high)})"
    )


def _doubling(figure: Figure, at: Sequence[int]) -> None:
    first, last = math.floor(math.log2(at[0])), math.ceil(math.log2(at[-1]))
    marks = [2**power for power in range(first, last + 1)][:: max(1, -(-(last - first) // 6))]
    figure.x.log, figure.x.grid = True, False
    figure.x.ticks = [(mark, f"{mark:,}") for mark in marks]
    figure.x.span = (at[0] / 1.2, at[-1] * 1.32)
