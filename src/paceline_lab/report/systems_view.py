"""HTML page of a comparison of systems: strengths, step times, and all figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from paceline import units
from paceline.files import read_text
from paceline.report.charts import BLUE, GREY, SERIES, VERMILLION, Axis, Bars, Figure, Line, lines
from paceline.report.page import PAGE, Card, Cell, Chart, Row, not_by_paceline, write_page
from paceline.units import Shown, digits
from paceline_lab.report.figures import DEFINITIONS, template_named
from paceline_lab.scaling.summary import REPORT
from paceline_lab.systems.compared import OURS, ComparedWay, Comparison


def write_systems_page(found: Comparison, folder: Path) -> Path:
    """Write the page `report.html` of a comparison into the comparison's folder.

    Raises:
        RunError: the file cannot be written.
    """
    ways = sorted(found.ways, key=lambda way: way.step_s.middle)
    documented = {way.system: way for way in ways if way.documentation.startswith("https://")}
    cells = {name: [cell(way) for way in ways] for name, cell in _cells(found).items()}
    cells = {name: of_ways for name, of_ways in cells.items() if any(of_ways)}
    rows = zip(ways, zip(*cells.values(), strict=True), strict=True)
    view = {
        "verdict": found.remarks[0] if found.remarks else "No other system ran, so nothing can be compared.",
        "cards": _cards(found),
        "documented": list(documented.values()),
        "steps": _steps(ways),
        "losses": _losses(ways),
        "columns": list(cells),
        "rows": [Row(way.title, [cell or "–" for cell in own], way.label, loud=way.way == OURS) for way, own in rows],
    }
    return write_page(
        folder / PAGE,
        template_named("systems.html.j2"),
        definitions=DEFINITIONS,
        facts={"machine": found.cluster, "command": found.command, "plan": found.plan},
        environment=found.environment,
        found=found,
        view=view,
    )


def write_kept_systems_page(folder: Path) -> Path:
    """Write the page of a comparison again, from the data in its folder.

    Raises:
        RunError: the data cannot be read, or the page cannot be written.
    """
    with not_by_paceline(folder, "comparison"):
        return write_systems_page(msgspec.convert(json.loads(read_text(folder / REPORT)), Comparison), folder)


def _cards(found: Comparison) -> list[Card]:
    """Return cards with paceline's figures, each with the figure of the fastest other system."""
    ours = next(way for way in found.ways if way.way == OURS)
    best = next((way for way in found.ways if way.way == found.best_other), None)

    def beside(cell: Callable[[ComparedWay], Shown]) -> str:
        return f"{best.title}: {cell(best)}" if best else ""

    cards = [
        Card("step_time", units.seconds(ours.step_s), beside(lambda way: units.seconds(way.step_s.middle))),
        Card("throughput", units.rate(ours.samples_per_s), beside(lambda way: units.rate(way.samples_per_s.middle))),
    ]
    if ours.speedup is not None:
        alone = f"against one process on one core, batch {found.batch_alone}"
        cards.append(Card(f"{found.scaling}_speedup", units.ratio(ours.speedup), alone))
    memory = beside(lambda way: units.size(way.memory_bytes))
    return [*cards, Card("all_memory", units.size(ours.memory_bytes), memory)]


def _cells(found: Comparison) -> dict[str, Callable[[ComparedWay], Cell | None]]:
    """Return the table's columns as functions that compute the cell of a system variant."""
    return {
        "step_time": lambda way: units.seconds(way.step_s),
        "times_ours": lambda way: units.ratio(way.ratio) if way.ratio else None,
        "throughput": lambda way: units.rate(way.samples_per_s),
        f"{found.scaling}_speedup": lambda way: units.ratio(way.speedup) if way.speedup else None,
        f"{found.scaling}_efficiency": lambda way: units.percent(way.efficiency) if way.efficiency else None,
        "time_to_target": lambda way: units.seconds(way.to_target_s) if way.to_target_s else None,
        "first_step": lambda way: units.seconds(way.first_step_s),
        "all_memory": lambda way: units.size(way.memory_bytes),
        "wire": lambda way: units.size(way.wire_bytes) if way.wire_bytes else None,
        "recovery": lambda way: way.recovery,
        "changed_lines": lambda way: None if way.lines is None else str(way.lines),
        "same_losses": lambda way: way.verdict_on_losses,
    }


def _name(way: ComparedWay) -> str:
    return f"{way.title}, {way.label}"


_ROW_PX, _FRAME_PX = 26, 60


def _steps(ways: Sequence[ComparedWay]) -> Chart:
    """Chart the step time of each system variant as a bar with its interval.

    paceline's bars have their own colour. A bar is pale if the variant's losses differ from one process.
    """
    names, middle = [_name(way) for way in ways], [way.step_s.middle * 1e3 for way in ways]
    places = list(range(len(ways)))
    bars = Bars(
        "step",
        middle,
        places,
        [_colour(way) for way in ways],
        opacity=[1.0 if way.same else 0.4 for way in ways],
        low=[way.step_s.low * 1e3 for way in ways],
        high=[min(way.step_s.high * 1e3, 3 * x) for way, x in zip(ways, middle, strict=True)],
        hints=[f"{name}\n{digits(x)} ms" for name, x in zip(names, middle, strict=True)],
    )
    figure = Figure(
        Axis("ms a step", from_zero=True),
        Axis(span=(len(ways) - 0.4, -0.6), ticks=list(zip(places, names, strict=True)), grid=False),
        height=_FRAME_PX + _ROW_PX * len(ways),
        traces=[bars],
        legend=False,
    )
    label = "; ".join(f"{name}: {units.seconds(way.step_s)}" for name, way in zip(names, ways, strict=True))
    return Chart("steps", figure, f"Step time of each system. {label}.")


def _losses(ways: Sequence[ComparedWay]) -> Chart:
    """Chart the losses over time.

    The chart shows all plans of paceline and one variant of each other system.
    """
    shown: dict[str, ComparedWay] = {}
    for way in ways:
        if way.way == OURS or way.ratio is not None:  # other variants have a different batch size
            shown.setdefault(way.way if way.system == OURS else way.system, way)
    series = [
        Line(_name(way), way.seconds, way.losses, SERIES[i % len(SERIES)]) for i, way in enumerate(shown.values())
    ]
    figure = lines(series, "seconds", "training loss", log_if_wide=True)
    return Chart("losses", figure, "Training loss over the seconds since the first step.")


def _colour(way: ComparedWay) -> str:
    if way.system == "paceline":
        return VERMILLION
    return GREY if way.system == "plain" else BLUE
