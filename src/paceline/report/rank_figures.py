"""Figures of one rank in a run, each declared once.

A declaration says how a figure is read, combined, shown and defined; results, tables and definitions follow from
`RANK_FIGURES`. To add a figure, write its value into the `use` of a step's line (`run/record/recorder.py`) and declare
the figure here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from paceline import units
from paceline.units import Shown

Lines = list[dict[str, Any]]  # of a rank's steps


@dataclass(frozen=True)
class RankFigure:
    """A figure of one rank.

    Attributes:
        name: key of results, with the unit.
        term: name of the figure's definition, and of its row in tables.
        title, text: the definition.
        read: reads the value from a run's lines; None if the run has none.
        over_runs: combines the values of several runs.
        shown: formats the value.
        absent: text of a cell without a value.
        only: runs that have the figure: those that compress, or those on accelerators; "": all.
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


def per_step(lines: Lines, counter: str) -> float | None:
    """A counter's growth per step between first and last reading; None without two."""
    readings = [(line["step"], line["use"][counter]) for line in lines if counter in line.get("use", {})]
    if len(readings) < 2:
        return None
    return float(sum(grown for _, grown in readings[1:]) / (readings[-1][0] - readings[0][0]))


def _readings(lines: Lines, key: str) -> list[float]:
    return [line["use"][key] for line in lines if key in line.get("use", {})]


def _compression_error(lines: Lines) -> float | None:
    return statistics.median(found) if (found := _readings(lines, "compression_error")) else None


def _memory_bytes(lines: Lines) -> float | None:
    """Peak resident memory in bytes, corrected for shared pages by the newest reading.

    The correction is the difference between resident and proportional set size.
    """
    uses = [line["use"] for line in lines if "use" in line]
    peaks = [use.get("peak_memory_bytes", use.get("memory_bytes", 0)) for use in uses]
    shared = next((use["memory_bytes"] - use["pss_bytes"] for use in reversed(uses) if "pss_bytes" in use), 0)
    return max(peaks) - shared if peaks else None


def _gpu_memory_bytes(lines: Lines) -> float | None:
    return max(_readings(lines, "gpu_peak_memory_bytes"), default=None)


RANK_FIGURES = (
    RankFigure(
        "wire_bytes",
        "wire",
        "bytes on the wire",
        "What one rank sends to the other replicas in a step, as the sync rule counts it, after compression; in a "
        "table that of the rank with most.",
        partial(per_step, counter="wire_bytes"),
        statistics.median,
    ),
    RankFigure(
        "saved_bytes",
        "saved",
        "saved by compression",
        "Bytes that the same exchange would send more if it were not compressed, in a step of a rank.",
        partial(per_step, counter="saved_bytes"),
        statistics.median,
        only="compressed",
    ),
    RankFigure(
        "compression_error",
        "compression_error",
        "compression error",
        "L2 norm of what compression leaves out, over that of what is to be sent. Error feedback adds what was left "
        "out to the next exchange, so it comes later and is not lost.",
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
        "Largest resident memory seen, shared pages counted by their share where the system tells; that of the "
        "rank with most.",
        _memory_bytes,
        max,
    ),
    RankFigure(
        "gpu_memory_bytes",
        "gpu_memory",
        "GPU memory per rank",
        "Memory that the rank has allocated on its accelerator; in a table that of the rank with most.",
        _gpu_memory_bytes,
        max,
        only="accelerators",
    ),
)


def figures_of(lines: Lines) -> dict[str, float]:
    """All figures that a run's lines have, by name."""
    return {figure.name: value for figure in RANK_FIGURES if (value := figure.read(lines)) is not None}


def combined(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each figure over several runs, by name."""
    found = {figure: [run[figure.name] for run in runs if figure.name in run] for figure in RANK_FIGURES}
    return {figure.name: figure.over_runs(values) for figure, values in found.items() if values}
