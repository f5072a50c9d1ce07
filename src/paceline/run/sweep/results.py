"""Results of a sweep: the runs of each combination, and the best combination."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.run.sweep.space import titled
from paceline.stats import LEAST_REPEATS, differ, median_interval
from paceline.text import listed

State = Literal["waiting", "interrupted", "finished", "stopped early", "failed"]


@dataclass
class SweepRun:
    """One run of a sweep, as recorded in `sweep.json`.

    Attributes:
        number: number of the run's combination, 1-based.
        run: run directory, relative to the sweep's directory.
        state: state of the run. Ray's scheduler has ended a run that was `stopped early`. An `interrupted` run
            continues when the sweep continues.
        metric: final value of the compared metric; None if the metric was not measured or is not finite.
        loss: final validation loss; without a validation set, the mean training loss of the last 10 steps.
        time_s: seconds from the first step to the end.
        error: error message of a failed run.
    """

    number: int
    parameters: dict[str, Any]
    seed: int
    run: str
    state: State = "waiting"
    plan: str | None = None
    metric: float | None = None
    loss: float | None = None
    time_s: float | None = None
    steps: int | None = None
    reason: str | None = None
    error: str | None = None

    @property
    def is_over(self) -> bool:
        """True if the sweep need not start this run again; failed runs are repeated."""
        return self.state in ("finished", "stopped early")


@dataclass
class Combination:
    """Runs of one combination of values, one run per seed."""

    number: int
    parameters: dict[str, Any]
    runs: list[SweepRun] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """Metric values of the finished runs."""
        return [run.metric for run in self.runs if run.state == "finished" and run.metric is not None]

    @property
    def metric(self) -> float | None:
        """Median of the metric over the finished runs."""
        return statistics.median(self.values) if self.values else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest value of the metric; None with fewer than two values."""
        return (min(self.values), max(self.values)) if len(self.values) > 1 else None

    def median(self, name: Literal["loss", "time_s"]) -> float | None:
        """Median of an attribute over the finished runs."""
        known = [v for run in self.runs if run.state == "finished" and (v := getattr(run, name)) is not None]
        return statistics.median(known) if known else None

    @property
    def directory(self) -> str:
        """Run directory, or a pattern of all run directories, relative to the sweep's."""
        first = self.runs[0].run
        return first if len(self.runs) == 1 else f"{first.partition('-')[0]}*"

    @property
    def state(self) -> str:
        """States of all runs as text: `finished`, or `2 finished, 1 failed`."""
        counts: dict[str, int] = {}
        for run in self.runs:
            counts[run.state] = counts.get(run.state, 0) + 1
        if len(counts) == 1:
            return next(iter(counts))
        return ", ".join(f"{count} {state}" for state, count in counts.items())


@dataclass(frozen=True)
class Verdict:
    """Best combination, as far as the finished runs show.

    Attributes:
        best: numbers of the best combinations, which cannot be distinguished; the best median is first.
        is_clear: True if there is a single best combination whose interval overlaps no other interval.
        text: the verdict as one or two sentences.
    """

    best: tuple[int, ...]
    is_clear: bool
    text: str


def combinations_of(runs: Sequence[SweepRun]) -> list[Combination]:
    """Group the runs by their combinations, in order."""
    found: dict[int, Combination] = {}
    for run in runs:
        found.setdefault(run.number, Combination(run.number, run.parameters)).runs.append(run)
    return list(found.values())


def verdict(combinations: Sequence[Combination], metric: str, *, higher_is_better: bool) -> Verdict:
    """Find the best combination.

    If each combination has at least three seeds, combinations are compared by 95 % intervals. Two combinations differ
    if their intervals do not overlap. With fewer seeds, the verdict names the best value, and asks for more runs.
    """
    known = [c for c in combinations if c.metric is not None]
    if not known:
        return Verdict((), False, f"No finished run has a value of {metric}.")
    ordered = sorted(known, key=lambda c: c.metric or 0.0, reverse=higher_is_better)
    top, others = ordered[0], ordered[1:]
    word = "Highest" if higher_is_better else "Lowest"
    value = f"{word} {metric}: {top.metric:.4g} with {titled(top.parameters)}"
    if not others:
        return Verdict((top.number,), False, f"{value}; no other combination has a value.")
    ties = [c for c in others if c.metric == top.metric]
    if min(len(c.values) for c in known) < LEAST_REPEATS:
        if ties:
            named = "; ".join(titled(c.parameters) for c in ties)
            value += f"; the same with {named}"
        doubt = (
            f"With fewer than {LEAST_REPEATS} seeds each, the difference may be chance: continue with --repeat "
            f"{LEAST_REPEATS} in the same --out."
        )
        return Verdict((top.number, *(c.number for c in ties)), False, f"{value}. {doubt}")
    interval = median_interval(top.values)
    alike = [
        c
        for c in others
        if not differ(interval, median_interval(c.values), repeats=min(len(top.values), len(c.values)))
    ]
    if not alike:
        return Verdict((top.number,), True, f"Best: {titled(top.parameters)}, median {metric} {top.metric:.4g}.")
    others_named = f"combination{'s' if len(alike) > 1 else ''} {listed([str(c.number) for c in alike])}"
    text = f"{value}, but its 95 % interval overlaps that of {others_named}: no difference is shown."
    return Verdict((top.number, *(c.number for c in alike)), False, text)
