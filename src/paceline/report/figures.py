"""Declarations of a run's figures: how each figure is read, combined, formatted and explained.

Results, tables, charts and definitions use these declarations. To add a per-rank figure, write its value to `use` in
the line of a step (`run/record/recorder.py`) and declare it in `RANK_FIGURES`. If only one page shows a figure, declare
it in that page's module.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from paceline import units
from paceline.report.charts import (
    AMBER,
    BLUE,
    GREY,
    ICE,
    INK,
    LEAF,
    OCHRE,
    PALE,
    PINK,
    VERMILLION,
    Axis,
    Bars,
    Figure,
    Line,
    Note,
    Points,
    thinned,
)
from paceline.run.record.goodput import PARTS as WALL_NAMES
from paceline.run.record.memory import resident_peak
from paceline.run.record.run import WARM_UP_STEPS
from paceline.units import Shown, digits

SYNTHETIC = "The data is synthetic: speeds are real, but losses and other metrics say nothing about a real task."


@dataclass(frozen=True)
class Definition:
    """Name of a figure in tables and captions, with its explanation."""

    name: str
    text: str


@dataclass(frozen=True)
class Part(Definition):
    """Part of a step or of the wall-clock time. `phrase` names the part within a sentence."""

    colour: str
    phrase: str = ""


PARTS = {  # parts of a step, ordered as in `paceline.engine.meter.PARTS`
    "data": Part(
        "data wait", "The part of a step in which a rank waits for its next batch.", AMBER, "waiting for data"
    ),
    "compute": Part(
        "compute",
        "The part of a step spent in the forward and backward pass. It ends before the collective, so a slow rank "
        "has a longer one.",
        BLUE,
        "compute",
    ),
    "bubble": Part(
        "pipeline bubble",
        "The part of a step in which a stage of a pipeline waits for its neighbours.",
        ICE,
        "waiting in the pipeline",
    ),
    "comm": Part(
        "exposed communication",
        "The part of a step spent in communication that no computation hides, without the wait for slower ranks.",
        VERMILLION,
        "exposed communication",
    ),
    "imbalance": Part(
        "imbalance wait",
        "The part of a step in which a rank waits for the slowest rank, before they communicate.",
        PINK,
        "waiting for slower ranks",
    ),
    "optimizer": Part(
        "optimizer", "The part of a step in which the parameters are updated.", LEAF, "optimizer updates"
    ),
    "checkpoint": Part(
        "checkpoint stall", "The part of a step in which training waits for a checkpoint.", PALE, "checkpoints"
    ),
}
WALL = {  # parts of a run's wall-clock time, as in `paceline.run.record.goodput.PARTS`
    "useful": Part(
        WALL_NAMES["useful"], "Steps that were done for the first time, without waiting for checkpoints.", LEAF
    ),
    "start": Part(
        WALL_NAMES["start"],
        "Time from the start of the ranks to the first step, and the extra time of the first step.",
        ICE,
    ),
    "restart": Part(
        WALL_NAMES["restart"],
        "Time from the last step before a failure that stopped all ranks to the first step after it.",
        VERMILLION,
    ),
    "recovery": Part(
        WALL_NAMES["recovery"],
        "Time of rewinds, and of failures that the other ranks survived.",
        AMBER,
    ),
    "recut": Part(
        WALL_NAMES["recut"],
        "Time from the checkpoint at which a pipeline was re-cut to the first step with the new cut.",
        BLUE,
    ),
    "replay": Part(WALL_NAMES["replay"], "Steps that were repeated, because the state after them was lost.", PINK),
    "checkpoint": Part(
        WALL_NAMES["checkpoint"], "Time in which training waited for checkpoints, including the last one.", GREY
    ),
    "evaluation": Part(WALL_NAMES["evaluation"], "Time of evaluations on the validation set.", OCHRE),
    "between": Part(WALL_NAMES["between"], "Other time between steps, for example writing the record.", PALE),
}

Lines = list[dict[str, Any]]  # parsed lines of a rank's steps file


@dataclass(frozen=True)
class Curve:
    """Curve of a rank's memory or another size in MiB.

    `key` is the name of the value in the entry `use` of a step's line.
    """

    key: str
    title: str
    term: str


@dataclass(frozen=True)
class RankFigure:
    """Declaration of a figure that is measured for each rank.

    Attributes:
        name: key of the figure in results, such as `wire_bytes`.
        term: key of the figure in `DEFINITIONS`.
        title, text: heading and text of the figure's definition.
        read: function that reads the value from a rank's lines. It returns None if the lines have no value.
        over_runs: function that combines the values of several runs into one.
        shown: function that formats the value for a table.
        absent: text that a table shows if there is no value.
        only: kind of runs that have the figure: `compressed`, `accelerators`, or "" for all runs.
        curve: curve of the figure on the run's page; None draws no curve.
    """

    name: str
    term: str
    title: str
    text: str
    read: Callable[[Lines], float | None]
    over_runs: Callable[[Sequence[float]], float]
    shown: Callable[[float], Shown] = units.size
    absent: str = "not available"
    only: Literal["", "compressed", "accelerators"] = ""
    curve: Curve | None = None


def growth(lines: Lines, counter: str) -> list[tuple[int, int, float]]:
    """Return the growth of a counter between readings.

    Each entry has the step of a reading, the number of steps since the previous reading, and the growth since then.
    """
    found, before = [], 0
    for line in lines:
        if counter in line.get("use", {}) and line["step"] > before:
            found.append((line["step"], line["step"] - before, line["use"][counter]))
            before = line["step"]
    return found


def per_step(lines: Lines, counter: str) -> float | None:
    """Return a counter's mean growth per step, or None with fewer than two readings."""
    return mean_growth(growth(lines, counter)[1:])


def mean_growth(readings: Sequence[tuple[int, int, float]]) -> float | None:
    """Return the mean growth per step over a counter's readings, or None without readings."""
    return sum(grown for _, _, grown in readings) / sum(passed for _, passed, _ in readings) if readings else None


def _readings(lines: Lines, key: str) -> list[float]:
    return [line["use"][key] for line in lines if key in line.get("use", {})]


def _compression_error(lines: Lines) -> float | None:
    return statistics.median(found) if (found := _readings(lines, "compression_error")) else None


def _memory_bytes(lines: Lines) -> float | None:
    return resident_peak([line["use"] for line in lines if "use" in line])


def _gpu_memory_bytes(lines: Lines) -> float | None:
    return max(_readings(lines, "gpu_peak_memory_bytes"), default=None)


RANK_FIGURES = (
    RankFigure(
        "wire_bytes",
        "wire",
        "bytes on the wire",
        "Bytes that one rank sends to other replicas in a step, after compression. Tables show the largest value of "
        "all ranks.",
        partial(per_step, counter="wire_bytes"),
        statistics.median,
    ),
    RankFigure(
        "saved_bytes",
        "saved",
        "saved by compression",
        "Bytes that compression saves one rank in a step.",
        partial(per_step, counter="saved_bytes"),
        statistics.median,
        only="compressed",
    ),
    RankFigure(
        "compression_error",
        "compression_error",
        "compression error",
        "L2 norm of the part that compression leaves out / L2 norm of the whole. Error feedback adds that part to "
        "the next exchange, so it arrives later and is not lost.",
        _compression_error,
        statistics.median,
        shown=units.number,
        absent="not compressed",
        only="compressed",
    ),
    RankFigure(
        "memory_bytes",
        "memory",
        "memory per rank",
        "Largest resident memory of a rank. Shared pages count proportionally, if the system reports them. Tables show "
        "the largest value of all ranks.",
        _memory_bytes,
        max,
        curve=Curve("memory_bytes", "Memory of each rank", "memory_now"),
    ),
    RankFigure(
        "gpu_memory_bytes",
        "gpu_memory",
        "GPU memory per rank",
        "Memory that a rank allocates on its accelerator. Tables show the largest value of all ranks.",
        _gpu_memory_bytes,
        max,
        curve=Curve("gpu_memory_bytes", "GPU memory of each rank", "gpu_memory"),
        only="accelerators",
    ),
)


def figures_of(lines: Lines) -> dict[str, float]:
    """Return all figures in a rank's lines, by name."""
    return {figure.name: value for figure in RANK_FIGURES if (value := figure.read(lines)) is not None}


def combined(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each figure, combined over several runs, by name."""
    found = {figure: [run[figure.name] for run in runs if figure.name in run] for figure in RANK_FIGURES}
    return {figure.name: figure.over_runs(values) for figure, values in found.items() if values}


DEFINITIONS: Mapping[str, Definition] = {
    **PARTS,
    **{f"wall_{part}": definition for part, definition in WALL.items()},
    **{figure.term: Definition(figure.title, figure.text) for figure in RANK_FIGURES},
    "throughput": Definition(
        "throughput",
        "Samples per second = global batch / median step time, without warm-up. The overall speed, with "
        "evaluations, checkpoints and pauses, is shown if it differs.",
    ),
    "tokens": Definition(
        "token throughput",
        "Tokens per second whose label counts = throughput × mean number of such tokens in a sample of rank 0. "
        "The padding is the share of the computed positions that hold no token or, without packing, follow the last "
        "label.",
    ),
    "mfu": Definition(
        "MFU",
        "Model FLOPs utilization (Chowdhery et al., 2022, arXiv:2204.02311) = FLOPs of the forward and backward pass "
        "/ peak FLOPs of all devices in the median step time. Recomputation, padding and gradients of frozen weights "
        "do not count.",
    ),
    "round_time": Definition("round time", "Median wall-clock time of one round of clients, without warm-up."),
    "step_time": Definition("step time", "Median wall-clock time of one optimizer step, without warm-up."),
    "global_batch": Definition("global batch", "Samples per optimizer step, over all devices."),
    "training_time": Definition(
        "training time", "Wall-clock time from the first step to the stop rule, with evaluations and checkpoints."
    ),
    "time_to_target": Definition(
        "time to target",
        "Wall-clock time from the first step until training reached the loss or metric of the stop rule.",
    ),
    "goodput": Definition(
        "goodput",
        "Useful step time / wall-clock time. Restarts, repeated steps and stalls lower it. The time between "
        "two commands does not count.",
    ),
    "links": Definition(
        "bytes over a link", "All bytes that an emulated host’s link carried, including headers and other traffic."
    ),
    "memory_now": Definition(
        "resident memory", "Memory of the rank’s process at that moment, as the system counts it."
    ),
    "memory_parts": Definition(
        "the rank with the largest peak",
        "Weights, gradients and optimizer state are the bytes of tensors. Communication is the buffers that exist "
        "between steps. Activations are the rest of the peak. The cache is memory that torch reserves beyond the peak.",
    ),
    "staleness": Definition(
        "staleness",
        "Number of updates between the moment a worker reads the parameters and the update by its gradient.",
    ),
    "share": Definition(
        "share of the batch",
        "Part of a global batch that a rank computes. It follows the measured speeds of the replicas (balance=auto).",
    ),
    "warm_up": Definition(
        "warm-up",
        f"The first {WARM_UP_STEPS} steps, which allocate memory and fill caches. Speeds and breakdowns exclude them.",
    ),
    "loss": Definition("training loss", "Mean loss over the global batch of a step, before its update."),
    "held_out": Definition(
        "validation metric", "Loss or metric on validation samples, which are not used for training."
    ),
    "test": Definition("test metric", "Metric of the trained model on the test set, measured once, at the end."),
    "interval": Definition(
        "95 % interval",
        "Interval of the median over the repeats: at least 95 of 100 such intervals contain the true median. With 6 "
        "repeats or more it follows from their order, with fewer from Student's t of logarithms. With 3 it is wide.",
    ),
    "load": Definition(
        "load average",
        "Mean number of processes that ran or waited for a core, in the 1, 5 and 15 minutes before the start.",
    ),
}
"""Definitions for all pages, by the keys that templates, tables and panels use."""


# stop rules that end a run at a target rather than after a budget
TARGETS = ("loss_below", "metric_above", "metric_below")


def reason_words(reason: str) -> str:
    """Rephrase the reason why a run ended: `steps: 20 done` becomes `20 steps done`."""
    key, colon, rest = reason.partition(": ")
    if not colon or not key.isidentifier():
        return reason
    if key in TARGETS:
        return f"target reached, {rest}"
    return rest.replace(" done", f" {key} done") if key in ("steps", "epochs") else rest


@dataclass(frozen=True)
class Bar:
    """One rank's step in a breakdown: the seconds of each part, and the ideal."""

    group: str
    rank: str
    parts_s: dict[str, float]
    ideal_s: float | None = None


def breakdown(bars: Sequence[Bar], noun: str = "step") -> Figure:
    """Draw the typical step of each rank as a stacked bar of its parts.

    The bars are grouped under headings. A tick marks the ideal step time.
    """
    longest = max(sum(bar.parts_s.values()) for bar in bars)
    factor, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    places, headings, rows = _rows(bars)
    figure = Figure(
        Axis(f"{unit} per {noun}", from_zero=True),
        Axis(span=(rows - 0.4, -0.6), ticks=[(p, bar.rank) for p, bar in zip(places, bars, strict=True)], grid=False),
        height=round(50 + 29 * rows),
        legend=False,
        stacked=True,
    )
    for part, definition in PARTS.items():
        times = [bar.parts_s.get(part, 0.0) * factor for bar in bars]
        hints = [
            f"{bar.group}, {bar.rank}\n{definition.name} {digits(time)} {unit}"
            for bar, time in zip(bars, times, strict=True)
        ]
        figure.traces.append(Bars(definition.name, times, places, definition.colour, hints=hints))
    marked = [(place, bar.ideal_s * factor) for place, bar in zip(places, bars, strict=True) if bar.ideal_s is not None]
    if marked:
        x, y = [ideal for _, ideal in marked], [place for place, _ in marked]
        hints = [f"ideal {digits(ideal)} {unit}" for ideal in x]
        figure.traces.append(Points("ideal", x, y, INK, width=0, marks=27, symbol="tick", hints=hints))
    figure.notes = [Note(heading, place, bold=True) for place, heading in headings]
    return figure


def _rows(bars: Sequence[Bar]) -> tuple[list[float], list[tuple[float, str]], float]:
    """Return the positions of bars and headings, and the total height in rows."""
    places, headings, place = [], [], 0.0
    for number, bar in enumerate(bars):
        if number == 0 or bar.group != bars[number - 1].group:
            place += 0.25 if number else 0.0
            if bar.group:
                headings.append((place, bar.group))
                place += 0.9
        places.append(place)
        place += 1.0
    return places, headings, place


def parts_over_steps(steps: Sequence[int], parts_s: dict[str, Sequence[float]], noun: str = "step") -> Figure:
    """Draw the parts of the step time over the course of training, as stacked areas."""
    figure = Figure(Axis(f"{noun}s"), Axis(f"ms per {noun}", from_zero=True), legend=False)
    for part, definition in PARTS.items():
        short = thinned(Line(part, steps, [1e3 * s for s in parts_s[part]]), statistics.fmean)
        figure.traces.append(Points(definition.name, short.x, short.y, definition.colour, width=0, fill="stack"))
    whole = [1e3 * sum(parts) for parts in zip(*parts_s.values(), strict=True)]
    longest = thinned(Line("longest", steps, whole), max)
    if longest.high:  # an interval's means hide single long steps
        figure.traces.append(Points(f"longest {noun} of a stretch", longest.x, longest.y, INK, width=1, dash="dot"))
    return figure
