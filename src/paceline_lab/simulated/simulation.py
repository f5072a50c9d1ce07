"""Simulation of a job on another cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.stats import Interval
from paceline.text import on_cores
from paceline.units import count, digits, percent, seconds, size
from paceline_lab.scaling.result import Scaling
from paceline_lab.simulated.curve import (
    PAYS,
    PUBLISHED_FAILURES,
    Chances,
    Point,
    SimulatedCurve,
    limit_of,
    limits,
    per_device,
    sentences,
    simulated_curve,
)
from paceline_lab.simulated.measured_here import Likeness, MeasuredHere, ReadingSpeed, alike, kind_of

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


_CORRECTED = "corrected by"  # first words of the note that predictions corrected by measured runs contain


@dataclass(frozen=True)
class Simulation:
    """Simulated scaling of a job on one cluster, with published curves for comparison.

    Attributes:
        name: name of the cluster as the user gave it.
        about: description of the cluster.
        device: name of the cluster's devices in the catalogue.
        curves: curve of strong scaling, and then of weak scaling if requested.
        published: similar published curves for each kind of scaling.
        rests_on: sentences on the assumptions and data behind the figures.
        unknown: sentences on effects that the figures do not include.
    """

    job: Job
    name: str
    about: str
    device: str
    curves: tuple[SimulatedCurve, ...]
    published: dict[Scaling, list[Likeness]]
    rests_on: tuple[str, ...]
    unknown: tuple[str, ...]
    seed: int

    @property
    def strong(self) -> SimulatedCurve:
        """Curve of strong scaling."""
        return self.curves[0]

    @property
    def tokens(self) -> int:
        """Number of tokens per sample; 1 if a sample is not a sequence."""
        assert self.strong.base.candidate is not None
        return self.strong.base.candidate.layout.trace.tokens

    def to_json(self) -> dict[str, Any]:
        """Return the simulation as JSON values."""
        return {
            "job": self.job.name,
            "cluster": self.name,
            "device": self.device,
            "simulated": True,
            "interval": 0.8,
            "seed": self.seed,
            "curves": [_curve(curve) for curve in self.curves],
            "published": {scaling: [_published(one) for one in found] for scaling, found in self.published.items()},
            "rests_on": list(self.rests_on),
            "unknown": list(self.unknown),
        }


def simulate(
    job: Job,
    cluster: Cluster,
    name: str,
    chances: Chances,
    *,
    weak: bool = True,
    calibration: Basis | None = None,
    here: MeasuredHere | None = None,
    reading: ReadingSpeed | None = None,
) -> Simulation:
    """Simulate a job on a whole cluster and on smaller parts of the cluster.

    Args:
        name: name of the cluster as the user gave it.
        weak: whether to simulate weak scaling as well.
        calibration: calibration factors from measured runs; None takes them from `here` if the device is the same.
        here: benchmark of the job on this machine.
        reading: measured speed at which this machine reads the job's samples.

    Raises:
        JobError: the model cannot be built.
        ClusterError: a device is not in the catalogue.
        PlanError: no plan fits the job on any number of these devices.
    """
    from paceline.planning.machines import machines

    device = machines(cluster).device
    if calibration is None and here is not None:
        calibration = here.factors_for(device.name)
    strong = simulated_curve(job, cluster, chances, calibration)
    curves: tuple[SimulatedCurve, ...] = (strong,)
    if weak:
        each = per_device(strong)
        curves = (strong, simulated_curve(job, cluster, chances, calibration, per_device=each))
    first = curves[0].base.candidate
    assert first is not None
    trace = first.layout.trace
    published = {curve.scaling: alike(trace, device, curve.scaling) for curve in curves}
    told = [
        f"step times: {first.interval.rests_on}; the planner's prediction of the best plan for each number of devices",
        *_scaling_rests_on(chances),
        *_failures_rest_on(job, chances),
        *(
            [here.line(device.name)]
            if here
            else ["nothing was measured here: --out names the directory of a benchmark"]
        ),
    ]
    told += [note for note in first.prediction.notes if note.startswith(_CORRECTED)]
    if kind_of(trace) is None:
        told.append("no published curve is of this kind of model")
    return Simulation(
        job,
        name,
        cluster.describe(),
        device.name,
        curves,
        published,
        tuple(told),
        _unknown(curves, reading),
        chances.seed,
    )


def _scaling_rests_on(chances: Chances) -> list[str]:
    lost = 1 - math.exp(chances.scale.quantile(0.5) * math.sqrt(3))
    spread = [1 - math.exp(chances.scale.quantile(level) * math.sqrt(3)) for level in (0.9, 0.1)]
    curves = count(len(chances.scale.values), "published curve")
    usual = (
        f"{curves} lose {percent(lost)} more on 8 times the devices than the planner says (80 % of them "
        f"{percent(spread[0])} to {percent(spread[1])})"
    )
    if chances.jitter is None:
        return [f"speedups: {usual}; that is taken off, and its spread is their interval"]
    drawn = f"slowest ranks: every step waits for the slowest of all, drawn; step times {chances.jitter.words}"
    return [f"speedups: {usual}; its spread is their interval, and the loss itself comes from the next line", drawn]


def _failures_rest_on(job: Job, chances: Chances) -> list[str]:
    rate = chances.failures_per_host_day
    if not rate:
        return ["failures: none, as asked for"]
    source = "as Llama 3's pre-training had them (arXiv:2407.21783)" if rate == PUBLISHED_FAILURES else "as given"
    every = job.checkpoint.every_steps
    saved = count(every, "step") if every is not None else f"{job.checkpoint.every_seconds:g} s"
    return [
        f"failures: {rate:.3g} a day on each host, {source}, drawn {chances.draws:,} times; a checkpoint every {saved} "
        "as in the job"
    ]


def _unknown(curves: Sequence[SimulatedCurve], reading: ReadingSpeed | None) -> tuple[str, ...]:
    told = []
    last = curves[0].last
    if reading is not None and last.throughput is not None:
        told.append(f"loading data: {reading.line(last.throughput.middle, last.devices, last.hosts)}")
    assert last.candidate is not None
    told += [note for note in last.candidate.prediction.notes if not note.startswith(_CORRECTED)]
    told.append("other jobs on the same network, slow or broken links and switches, and how well a larger batch learns")
    return tuple(dict.fromkeys(told))


# JSON


def _curve(curve: SimulatedCurve) -> dict[str, Any]:
    return {
        "scaling": curve.scaling,
        "base_devices": curve.base.devices,
        "points": [_point(point, curve.base) for point in curve.points],
        "findings": sentences(curve),
    }


def _point(point: Point, base: Point) -> dict[str, Any]:
    plain = {"devices": point.devices, "hosts": point.hosts, "global_batch": point.global_batch}
    if point.candidate is None:
        return plain | {"plan": None, "why": point.why}
    prediction = point.candidate.prediction
    figures = ("step_time_s", "throughput", "speedup", "efficiency", "goodput")
    return plain | {
        "plan": str(point.candidate.plan),
        "devices_used": point.used,
        **{name: _interval(getattr(point, name)) for name in figures},
        "best_goodput": point.best_goodput,
        "best_every_steps": point.best_every_steps,
        "mfu": prediction.mfu,
        "memory_bytes": prediction.memory_bytes,
        "breakdown_s": prediction.breakdown,
        "limit": limit_of(point, base),
    }


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else dataclasses.asdict(interval)


def _published(one: Likeness) -> dict[str, Any]:
    curve = one.held.curve
    return {
        "title": curve.title,
        "source": curve.source,
        "url": curve.url,
        "differences": list(one.differences),
        "devices": curve.devices,
        "efficiency": list(one.held.efficiency),
        "predicted_efficiency": list(one.held.predicted),
    }


WIDTH = 130
TITLES = {
    "strong": "Strong scaling: the same global batch",
    "weak": "Weak scaling: a batch that grows with the devices",
}


def show(simulation: Simulation, console: Console) -> None:
    """Print a simulation: curves, findings, published curves, and the assumptions behind all figures."""
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
    console.print(Text("\nBasis of the prediction", style="bold"))
    for line in simulation.rests_on:
        _print(console, line)
    console.print(Text("\nLimits of the prediction", style="bold"))
    for line in simulation.unknown:
        _print(console, line)


def _points(curve: SimulatedCurve) -> Table:
    """Return a table with one row per device count, and 80 % intervals in brackets."""
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
