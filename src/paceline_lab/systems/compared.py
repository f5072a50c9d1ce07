"""Result of a comparison: each system's figures with intervals, and ours against the best other."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.planning.plan import Plan
from paceline.stats import Interval, median_interval
from paceline.units import count, ratio, seconds, size
from paceline_lab.scaling.result import Scaling

WARM_UP, BLOCKS = 10, 5  # steps that are not timed; parts of the others, whose median is a run's
AGREE = 1e-3  # relative difference of losses up to which two systems compute the same
_RECENT = 10  # steps whose mean loss reaches a target


@dataclass(frozen=True)
class TakenRun:
    """One run of a way to train: a line of `measured.jsonl`.

    Attributes:
        step_s: median over parts of the timed steps.
        first_step_s: from the command to the end of the first step.
        wire_bytes: that the busiest link of an emulated host carried for a step; None without such hosts.
        to_target_s: from the first step's end until the mean loss of 10 steps was below the target; None if never.
        ended_s: when each step had ended, from the first one's end on.
    """

    way: str
    round: int
    step_s: float
    first_step_s: float
    memory_bytes: int
    wire_bytes: float | None
    to_target_s: float | None
    losses: list[float]
    ended_s: list[float]


@dataclass(frozen=True)
class ComparedWay:
    """A way to train: a system, as documented or tuned.

    Attributes:
        lines: of a plain script that it changes; None where there is no script.
        difference: largest relative difference of its losses from those of one process.
        same: True if it computes what one process computes.
        exact: False for a rule of paceline's that is to converge alike, not to be equal.
        speedup: samples a second / those of a plain script on one core; efficiency: speedup / ranks.
        ratio: its step time / paceline's, of neighbouring runs; None where its batch is another.
        recovery: what became of a run of which a rank was killed, in words; "" where none was.
        seconds, losses: of the first run, a point for each of the newest few steps.
    """

    way: str
    system: str
    title: str
    label: str
    lines: int | None
    documentation: str
    difference: float
    same: bool
    exact: bool
    step_s: Interval
    speedup: Interval | None
    efficiency: Interval | None
    samples_per_s: Interval
    first_step_s: Interval
    memory_bytes: float
    wire_bytes: float | None
    to_target_s: Interval | None
    ratio: Interval | None
    recovery: str
    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Comparison:
    """All that a page and a table say of a comparison.

    Attributes:
        global_batch: of all but, where the scaling is weak, the plain script on one core, which has that of one rank.
        best_other: way of the fastest other system that computes the same; None where there is none.
        left_out: titles of systems that did not run, with the reason.
        remarks: sentences on what each is best at.
    """

    job: str
    command: str
    cluster: str
    created: str
    ranks: int
    hosts: int
    steps: int
    repeats: int
    global_batch: int
    target: float | None
    plan: str
    ways: list[ComparedWay]
    best_other: str | None
    left_out: dict[str, str]
    remarks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    scaling: Scaling = "strong"

    @property
    def places(self) -> str:
        """Numbers of ranks and hosts in words; paceline's own plan may use other ranks."""
        own = Plan.parse(self.plan).ranks
        text = f"{count(self.ranks, 'rank')} on {count(self.hosts, 'host')}"
        return text if own == self.ranks else f"{text} (paceline: {count(own, 'rank')}, as its plan says)"

    @property
    def batch_alone(self) -> int:
        """Samples of a step of the run that every speedup is against."""
        return self.global_batch // self.ranks if self.scaling == "weak" else self.global_batch

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, values: dict[str, Any]) -> Comparison:
        """A comparison from plain values."""
        return cls(**(values | {"ways": [_way(way) for way in values["ways"]]}))


def _way(values: dict[str, Any]) -> ComparedWay:
    found: dict[str, Any] = {
        key: Interval(**value) if isinstance(value, dict) else value for key, value in values.items()
    }
    return ComparedWay(**found)


def step_time_s(ended_s: Sequence[float]) -> float:
    """Seconds of a step after the warm-up: the median over equal parts of the run."""
    ends = ended_s[min(WARM_UP, len(ended_s) // 3) :]
    each = max(1, (len(ends) - 1) // BLOCKS)
    blocks = [(ends[i + each] - ends[i]) / each for i in range(0, len(ends) - each, each)]
    return statistics.median(blocks)


def time_to(target: float | None, losses: Sequence[float], ended_s: Sequence[float]) -> float | None:
    """Seconds from the first step's end until newest losses were below the target."""
    if target is None:
        return None
    for step in range(_RECENT, len(losses) + 1):
        if statistics.fmean(losses[step - _RECENT : step]) < target:
            return ended_s[step - 1] - ended_s[0]
    return None


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two courses of losses; infinite where one is not finite."""
    worst = 0.0
    for loss, other in zip(losses, reference, strict=False):
        apart = abs(loss - other) / max(abs(other), 1e-12)
        worst = max(worst, apart) if apart == apart else float("inf")
    return worst


def ratio_of(others: Sequence[TakenRun], ours: Sequence[TakenRun]) -> Interval | None:
    """The interval of other / ours over the rounds that both have."""
    by_round = {run.round: run.step_s for run in ours}
    pairs = [run.step_s / by_round[run.round] for run in others if run.round in by_round]
    return median_interval(pairs) if pairs else None


OURS = "paceline"
WIDTH = 140


def show(found: Comparison, console: Console) -> None:
    """Print what each system is best at, all figures, and what was left out."""
    console.width = console.width if console.is_terminal else WIDTH
    console.print()
    for number, remark in enumerate(found.remarks):
        console.print(Text(remark, style="" if number else "bold"), soft_wrap=True)
    console.print()
    console.print(_table(found))
    for title, reason in found.left_out.items():
        console.print(Text(f"left out  {title}: {reason}", style="yellow"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note      {note}", style="yellow"), soft_wrap=True)
    console.print(
        Text(
            f"\nEach system ran {count(found.repeats, 'time')} for {found.steps} steps with "
            f"{found.places}, in interleaved rounds; medians with 95 % intervals. Times are "
            "other / paceline of neighbouring runs. Lines: changed in a plain script.\n"
            f"{_scaling(found)}\n"
            f"machine   {found.cluster}\nplan      {found.plan}",
            style="dim",
        ),
        soft_wrap=True,
    )


def _scaling(found: Comparison) -> str:
    """The batches behind the speedups."""
    if found.scaling == "strong":
        return (
            f"strong    a global batch of {found.global_batch}; speedup: against one process on one core with the same"
        )
    return (
        f"weak      a global batch of {found.global_batch}, {found.batch_alone} a rank; speedup: of samples a second, "
        f"against one process on one core with a batch of {found.batch_alone}"
    )


def _table(found: Comparison) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    headings = ["system", "", "step", "times ours", f"{found.scaling} speedup", "first step", "memory", "lines"]
    headings += ["a rank killed"] if any(way.recovery for way in found.ways) else []
    headings += ["on wire"] if any(way.wire_bytes for way in found.ways) else []
    headings += ["to target"] if found.target is not None else []
    for number, heading in enumerate(headings):
        label = number == 1
        table.add_column(heading, justify="left" if number < 2 else "right", overflow="fold", no_wrap=not label)
    for way in sorted(found.ways, key=lambda way: way.step_s.middle):
        cells = _cells(way)
        cells += [way.recovery] if "a rank killed" in headings else []
        cells += [str(size(way.wire_bytes)) if way.wire_bytes else "?"] if "on wire" in headings else []
        cells += [str(seconds(way.to_target_s)) if way.to_target_s else "-"] if "to target" in headings else []
        table.add_row(*cells, style="bold" if way.way == OURS else "" if way.same else "dim")
    return table


def _cells(way: ComparedWay) -> list[str]:
    other = "" if way.same else " (other losses)" if way.exact else " (inexact)"
    return [
        way.title,
        way.label + other,
        str(seconds(way.step_s.middle)),
        "" if way.ratio is None else f"{way.ratio.middle:.2f} ({way.ratio.low:.2f}–{way.ratio.high:.2f})",
        "" if way.speedup is None else str(ratio(way.speedup)),
        str(seconds(way.first_step_s.middle)),
        str(size(way.memory_bytes)),
        "" if way.lines is None else str(way.lines),
    ]


def figures(found: Comparison) -> dict[str, float]:
    """Numbers by name: `step_s_ddp`, `ratio_ddp`, `strong_speedup_ddp`, …; `ratio_to_best` has its interval."""
    named: dict[str, float] = {"systems_run": float(len({way.system for way in found.ways} - {"plain"}))}
    for way in found.ways:
        name = way.way.replace("-", "_")
        named[f"step_s_{name}"] = way.step_s.middle
        if way.ratio is not None:
            named[f"ratio_{name}"] = way.ratio.middle
        for what, value in (("speedup", way.speedup), ("efficiency", way.efficiency)):
            if value is not None:
                named[f"{found.scaling}_{what}_{name}"] = value.middle
        if way.to_target_s is not None:
            named[f"to_target_s_{name}"] = way.to_target_s.middle
    best = next((way for way in found.ways if way.way == found.best_other), None)
    if best is not None and best.ratio is not None:
        named |= {
            "ratio_to_best": best.ratio.middle,
            "ratio_to_best_low": best.ratio.low,
            "ratio_to_best_high": best.ratio.high,
        }
    return named
