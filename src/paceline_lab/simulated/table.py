"""A simulation as tables on the screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.report.words import on_cores
from paceline.stats import Interval
from paceline.units import digits, percent, seconds, size
from paceline_lab.simulated.curve import Point, SimulatedCurve
from paceline_lab.simulated.findings import PAYS, limits, sentences
from paceline_lab.simulated.published import Likeness
from paceline_lab.simulated.simulation import Simulation

WIDTH = 130
TITLES = {
    "strong": "Strong scaling: the same global batch",
    "weak": "Weak scaling: a batch that grows with the devices",
}


def show(simulation: Simulation, console: Console) -> None:
    """Print a simulation: curves, findings, published curves, and what all of it rests on."""
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    cores = simulation.device.startswith("CPU")
    console.print(Text.assemble((f"\n{simulation.job.name} on {simulation.name}", "bold"), "  simulated, not measured"))
    console.print(Text(simulation.about, style="dim"))
    for curve in simulation.curves:
        console.print(Text(f"\n{TITLES[curve.scaling]}", style="bold"))
        for sentence in sentences(curve):
            _print(console, on_cores(sentence) if cores else sentence)
        console.print()
        console.print(Padding(_points(curve), (0, 0, 0, 2), expand=False))
        console.print(Padding(_limits(curve, cores=cores), (1, 0, 0, 2), expand=False))
        _show_published(simulation.published[curve.scaling], console)
    console.print(Text("\nWhat it rests on", style="bold"))
    for line in simulation.rests_on:
        _print(console, line)
    console.print(Text("\nWhat is not known", style="bold"))
    for line in simulation.unknown:
        _print(console, line)


def _points(curve: SimulatedCurve) -> Table:
    """A row for each number of devices; intervals, of 80 %, in brackets."""
    goodput = any(point.goodput for point in curve.fitting)
    columns = ["devices", "step", "samples/s", "speedup", "efficiency", *(["goodput"] if goodput else []), "MFU"]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in (*columns, "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold", ratio=1)
    for point in curve.points:
        if point.candidate is None:
            table.add_row(f"{point.devices:,}", *[""] * len(columns), Text("no plan fits", style="dim"))
        else:
            table.add_row(*_cells(point, curve.base, goodput=goodput), style=_style(point))
    return table


def _cells(point: Point, base: Point, *, goodput: bool) -> Iterator[str | Text]:
    assert point.candidate is not None
    prediction = point.candidate.prediction
    yield f"{point.devices:,}"
    if point.step_time_s and point.throughput and point.speedup and point.efficiency:
        yield f"{seconds(point.step_time_s)} ({_range(seconds(point.step_time_s).interval)})"
        yield digits(point.throughput.middle)
        own = point is base
        yield (
            "1"
            if own
            else f"{digits(point.speedup.middle)}× ({digits(point.speedup.low)}–{digits(point.speedup.high)})"
        )
        yield "" if own else _share(point.efficiency)
    if goodput:
        yield str(percent(point.goodput.middle, 1)) if point.goodput else ""
    yield "" if prediction.mfu is None else str(percent(prediction.mfu))
    yield str(size(prediction.memory_bytes))
    yield Text(str(point.candidate.plan), style="dim")


def _limits(curve: SimulatedCurve, *, cores: bool) -> Table:
    """Limits of each number of devices."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("more than ideal, of a step", overflow="fold", ratio=1)
    for devices, words in limits(curve):
        table.add_row(devices, on_cores(words) if cores else words)
    return table


def _share(share: Interval) -> str:
    places = 0 if share.middle >= 0.1 else 1
    return f"{percent(share.middle, places)} ({100 * share.low:.{places}f}–{100 * share.high:.{places}f})"


def _range(interval: str | None) -> str:
    return (interval or "").replace(" to ", "–")


def _style(point: Point) -> str:
    return "" if point.efficiency is None or point.efficiency.middle >= PAYS else "yellow"


def _show_published(found: list[Likeness], console: Console) -> None:
    if not found:
        return
    console.print(Text("\n  Published curves of the same kind: measured efficiency, relative to the fewest devices"))
    for one in found:
        curve, held = one.held.curve, one.held
        shown = " · ".join(
            f"{n:,}: {percent(share, 0)}" for n, share in zip(curve.devices, held.efficiency, strict=True)
        )
        _print(console, f"  {curve.title}: {shown}")
        _print(console, f"    differs: {'; '.join(one.differences)}. {curve.source} ({curve.url})", style="dim")


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Padding(Text(text, style=style), (0, 0, 0, 2), expand=False), highlight=False)
