"""Charts of a run's page: losses, validation metrics, throughput, parts over steps, memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import RunError
from paceline.extensions import ExtensionPoint
from paceline.job.spec import load_object
from paceline.report import charts
from paceline.report.definitions import PARTS
from paceline.report.page import Chart
from paceline.report.run_record import RunRecord
from paceline.run.record.run import timed
from paceline.units import digits, size

_MARKED = {  # events that a curve shows; after a restart there is a resume
    "nonfinite": "not finite",
    "spike": "spike",
    "corruption": "corruption",
    "checkpoint_damaged": "checkpoint damaged",
    "rewind": "rewind",
    "lost": "rank lost",
    "host_lost": "host lost",
    "healed": "healed",
    "recut": "re-cut",
    "resume": "resume",
}
_MEMORY = {
    "memory_bytes": ("Memory of each rank", "memory_now"),
    "gpu_memory_bytes": ("GPU memory of each rank", "gpu_memory"),
}


@dataclass(frozen=True)
class PanelInfo:
    """Description of a panel of a run's page.

    Attributes:
        panel: import path of a function that takes a `RunRecord` and returns the charts that it has values for.
    """

    panel: str


_BUILT_IN = ("losses", "metrics", "speeds", "shares", "staleness", "memory")
PANELS = ExtensionPoint(
    "panel",
    "paceline.panels",
    PanelInfo,
    {name: PanelInfo(f"paceline.report.run_charts:{name}") for name in _BUILT_IN},
    RunError,
)


def run_charts(record: RunRecord) -> list[Chart]:
    """All charts that the record has values for, in the order of the page.

    Those of installed packages come last.

    Raises:
        RunError: a panel of a package cannot be loaded, or fails; names it.
    """
    found: list[Chart] = []
    for name, info in PANELS.all().items():
        try:
            found += load_object(info.panel)(record)
        except Exception as error:
            if name in PANELS.built_in:
                raise
            raise RunError(
                f'the panel "{name}" of an installed package ({info.panel}) failed: {type(error).__name__}: {error}'
            ) from error
    return found


def losses(record: RunRecord) -> Iterator[Chart]:
    """Training and validation loss, over steps and over time."""
    steps = record.ranks[0]
    values = [s["loss"] for s in steps]
    clock_of = record.clock_of
    evaluated = [e for e in record.evaluations if "loss" in e["metrics"] and e["step"] in clock_of]
    each = charts.steps_per_point(len(values))
    note = f"Each point is the mean of {each:,} {record.noun}s." if each > 1 else ""
    places: dict[str, dict[int, float]] = {f"{record.noun}s": {s["step"]: s["step"] for s in steps}, "time": clock_of}
    for over, place in places.items():
        training = charts.Line("training", list(place.values()), values)
        held_out = charts.Line(
            "validation",
            [place[e["step"]] for e in evaluated],
            [e["metrics"]["loss"] for e in evaluated],
            charts.VERMILLION,
            marked=True,
        )
        figure = charts.lines(
            [training, held_out] if evaluated else [training],
            "seconds" if over == "time" else over,
            "loss",
            marks=[charts.Mark(place[step], text) for step, text in _marks(record).items()],
            log_if_wide=True,
        )
        terms = ["loss", "held_out"] if evaluated else ["loss"]
        title = f"Loss over {over}"
        yield Chart(f"loss-{over}", figure, f"{title}.", title, terms, note)


def _marks(record: RunRecord) -> dict[int, str]:
    """Notable events on the curve, by the first step after each."""
    steps, marks = record.ranks[0], dict[int, str]()
    for event in record.events:
        if event["event"] in _MARKED:
            after = next((s["step"] for s in steps if s["time"] >= event["time"]), steps[-1]["step"])
            text = _MARKED[event["event"]]
            marks[after] = f"{marks[after]}, {text}" if after in marks else text
    return marks


def metrics(record: RunRecord) -> Iterator[Chart]:
    """Every validation metric but the loss."""
    names = dict.fromkeys(name for e in record.evaluations for name in e["metrics"] if name != "loss")
    for number, name in enumerate(names):
        measured = [(e["step"], e["metrics"][name]) for e in record.evaluations if name in e["metrics"]]
        steps, values = zip(*measured, strict=True)
        line = charts.Line(name, steps, values, charts.GREEN, marked=True)
        label = f"{name} on validation samples; newest {digits(values[-1])}."
        figure = charts.lines([line], f"{record.noun}s", name)
        yield Chart(f"metric-{number}", figure, label, f"Validation: {name}", ["held_out"])


def speeds(record: RunRecord) -> list[Chart]:
    """Throughput, and the parts of rank 0's steps."""
    return [_throughput(record), _parts(record)] if timed(record.ranks[0]) else []


def _throughput(record: RunRecord) -> Chart:
    steps = timed(record.ranks[0])
    line = charts.Line(
        "throughput", [record.clock_of[s["step"]] for s in steps], [s["samples"] / s["step_s"] for s in steps]
    )
    figure = charts.lines([line], "seconds", "samples per second", middle=statistics.median)
    title = "Throughput over time"
    return Chart("throughput", figure, f"{title}, in samples per second.", title, ["throughput"])


def _parts(record: RunRecord) -> Chart:
    steps = timed(record.ranks[0])
    figure = charts.parts_over_steps(
        [s["step"] for s in steps], {part: [s[f"{part}_s"] for s in steps] for part in PARTS}, record.noun
    )
    label = f"Time of rank 0’s {record.noun}s over the run, part by part."
    return Chart("parts", figure, label, "Where rank 0’s time went", list(PARTS))


def shares(record: RunRecord) -> Iterator[Chart]:
    """Each rank's share of the full batches, where shares followed the replicas' speeds."""
    if not any(event["event"] == "balance" for event in record.events):
        return
    series = []
    for rank, steps in record.ranks.items():
        batch = max(s["samples"] for s in steps)
        full = [s for s in steps if s["samples"] == batch > 0 and isinstance(s.get("local_samples"), int)]
        percent = [100 * s["local_samples"] / s["samples"] for s in full]
        colour = charts.SERIES[rank % len(charts.SERIES)]
        series.append(charts.Line(f"rank {rank}", [s["step"] for s in full], percent, colour))
    title = "Share of the batch of each rank"
    yield Chart("shares", charts.lines(series, "steps", "percent"), f"{title}, in percent.", title, ["share"])


def staleness(record: RunRecord) -> Iterator[Chart]:
    """Gradients of each worker by their staleness, where servers owned the parameters."""
    told = [event for event in record.events if event["event"] == "served"]
    series, sentences = [], []
    for number, (name, counts) in enumerate(_workers(told[-1]) if told else ()):
        by_steps = sorted((int(steps), int(times)) for steps, times in counts["staleness"].items())
        pushes = max(1, int(counts["pushes"]))
        percent = [100 * times / pushes for _, times in by_steps]
        colour = charts.SERIES[number % len(charts.SERIES)]
        series.append(charts.Line(name, [steps for steps, _ in by_steps], percent, colour, marked=True))
        sentences.append(f"{name}: {pushes:,} pieces, {size(int(counts['bytes']))} pushed, {counts['late']} too late")
    if series:
        title = "Staleness of the gradients of each worker"
        figure = charts.lines(series, "updates since the parameters were read", "percent of its gradients")
        yield Chart("staleness", figure, f"{title}, in percent.", title, ["staleness"], f"{'; '.join(sentences)}.")


def _workers(event: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Counts of each worker by name; of a damaged record those that are whole."""
    workers = event.get("workers")
    found = workers.items() if isinstance(workers, dict) else ()
    return sorted((name, counts) for name, counts in found if _is_whole(counts))


def _is_whole(counts: Any) -> bool:
    if not isinstance(counts, dict) or not isinstance(counts.get("staleness"), dict):
        return False
    steps = counts["staleness"]
    numbers = [counts.get(key) for key in ("pushes", "bytes", "late")]
    return all(isinstance(n, int) for n in (*numbers, *steps.values())) and all(map(str.isdecimal, steps))


def memory(record: RunRecord) -> Iterator[Chart]:
    """Memory of each rank, on the host and on its accelerator."""
    for key, (title, term) in _MEMORY.items():
        series = []
        for rank, steps in record.ranks.items():
            read = [(s["step"], s["use"][key] / 2**20) for s in steps if key in s.get("use", {})]
            if read:
                colour = charts.SERIES[rank % len(charts.SERIES)]
                series.append(
                    charts.Line(f"rank {rank}", [step for step, _ in read], [used for _, used in read], colour)
                )
        if series:
            yield Chart(term, charts.lines(series, "steps", "MiB"), f"{title}, in MiB.", title, [term])
