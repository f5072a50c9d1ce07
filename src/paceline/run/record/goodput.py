"""Goodput of a run: useful step time divided by wall-clock time, and lost time.

Goodput is a pure function of the record, so it can be computed during a run and after a crash. The wall-clock time is
divided into spans without gaps, so the parts sum exactly to the wall-clock time.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from paceline.run.record.run import WARM_UP_STEPS, Run, read_lines
from paceline.units import percent, seconds

USEFUL = "useful"
# Parts of the wall-clock time, with display names. All parts except useful steps are losses.
PARTS: Mapping[str, str] = {
    USEFUL: "useful steps",
    "start": "start-up",
    "restart": "restarts",
    "recovery": "recovery",
    "recut": "re-cut pipelines",
    "replay": "replayed steps",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "between": "between steps",
}
_FAILURE = ("restart", "recovery", "replay")  # parts that only occur after failures
_LEAST_STALL = 0.01  # minimum checkpoint stall to report, as a fraction of the wall-clock time
_LEAST_TOLD = 0.005  # minimum loss to report, as a fraction of the wall-clock time
_ROUNDING_S = 2e-3  # rounding error of the times in the record
_HELD_S = 0.5  # minimum time for which new records of a followed run wait
_TYPICAL_STEPS = 500  # number of newest steps whose median is the typical step time of a followed run


class Span(NamedTuple):
    """An interval of the wall-clock time, assigned to one of `PARTS`."""

    start_s: float
    end_s: float
    part: str


class Failure(NamedTuple):
    """A failure event and its position in the wall-clock time."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Goodput:
    """Wall-clock time of a run, divided into parts.

    Time in which no command of the run is active (from an end to `--resume`) is excluded.

    Attributes:
        spans: consecutive spans without gaps; the first span starts at 0.
        failures: restarts, lost ranks, healed ranks and rewinds, in order.
    """

    spans: Sequence[Span]
    failures: Sequence[Failure] = ()

    @property
    def wall_s(self) -> float:
        """Total wall-clock time of all commands of the run, in seconds."""
        return self.spans[-1].end_s if self.spans else 0.0

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Seconds of each of `PARTS`; they sum to `wall_s`."""
        found = dict.fromkeys(PARTS, 0.0)
        for span in self.spans:
            found[span.part] += span.end_s - span.start_s
        return found

    @property
    def share(self) -> float:
        """Useful step time divided by wall-clock time; 0 before the first step."""
        return self.parts_s[USEFUL] / self.wall_s if self.wall_s else 0.0

    @property
    def disturbed(self) -> bool:
        """True if failures or checkpoints cost enough time to report."""
        return any(self.parts_s[part] for part in _FAILURE) or (self.parts_s["checkpoint"] > _LEAST_STALL * self.wall_s)

    def sentence(self) -> str:
        """Return a summary: `91 % of 63.1 s; lost: restarts 4.2 s, replayed steps 1.5 s`."""
        lost = sorted(((s, PARTS[part]) for part, s in self.parts_s.items() if part != USEFUL), reverse=True)
        told = ", ".join(f"{name} {seconds(s)}" for s, name in lost if s > _LEAST_TOLD * self.wall_s)
        return f"{percent(self.share)} of {seconds(self.wall_s)}" + (f"; lost: {told}" if told else "")

    def over_time(self, stretches: int) -> list[tuple[float, float]]:
        """Divide the wall-clock time into equal intervals; return each interval's end and goodput."""
        width_s = self.wall_s / stretches
        useful = [0.0] * stretches
        for start_s, end_s, part in self.spans:
            if part != USEFUL:
                continue
            first = min(int(start_s / width_s), stretches - 1)
            for number in range(first, min(int(end_s / width_s), stretches - 1) + 1):
                useful[number] += max(0.0, min(end_s, (number + 1) * width_s) - max(start_s, number * width_s))
        return [((number + 1) * width_s, s / width_s) for number, s in enumerate(useful)]


def goodput(run: Run) -> Goodput:
    """Compute the goodput of a run so far, from the files of its directory."""
    steps = run.path / "steps"
    ranks = {0: _timed_lines(steps / "rank-0.jsonl")}
    numbers = {line["step"] for line in ranks[0]}
    if numbers and len(numbers) < max(numbers):  # rank 0 has not recorded all steps, so read the other ranks' files
        files = {path.stem[5:]: path for path in steps.glob("rank-*.jsonl")}
        ranks |= {int(name): _timed_lines(path) for name, path in files.items() if name.isdecimal() and name != "0"}
    return goodput_of(ranks, [event for event in run.events() if "time" in event])


def goodput_of(ranks: Mapping[int, Sequence[Mapping[str, Any]]], events: Sequence[Mapping[str, Any]]) -> Goodput:
    """Compute the goodput from the events and each rank's step lines."""
    lines = _steps_of_the_run(ranks)
    timed = [_own_s(line) - line.get("checkpoint_s", 0.0) for line in lines if line.get("step_s", 0.0) > 0]
    clock = _Clock(statistics.median(timed) if timed else 0.0)
    for record in sorted([*lines, *events], key=_time_of):
        clock.take(record)
    return Goodput(clock.spans, clock.failures)


class GoodputSoFar:
    """Goodput of an active run, updated as records arrive.

    Memory use does not grow with the run. The newest records are only used at the next read, because events and steps
    are read from different files at slightly different times.
    """

    def __init__(self) -> None:
        self._clock = _Clock(0.0)
        self._times: deque[float] = deque(maxlen=_TYPICAL_STEPS)
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._pending: list[Mapping[str, Any]] = []
        self._newest = -math.inf  # Unix time of the newest record

    def add(
        self, steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], *, took_s: float, ended: bool
    ) -> None:
        """Add the new records from a read of the files that took `took_s` seconds.

        If the run has `ended`, all records are used at once.
        """
        timed = (line for line in steps if line.get("step_s", 0.0) > 0)
        self._times.extend(_own_s(line) - line.get("checkpoint_s", 0.0) for line in timed)
        self._pending += [*steps, *events]
        if len(self._times) <= WARM_UP_STEPS and not ended:
            return  # the typical step time is still unknown
        self._pending.sort(key=_time_of)
        self._newest = max([self._newest, *map(_time_of, self._pending[-1:])])
        until = math.inf if ended else self._newest - took_s - _HELD_S
        self._clock.typical_s = statistics.median(self._times) if self._times else 0.0
        ready = bisect_right(self._pending, until, key=_time_of)
        for record in self._pending[:ready]:
            self._clock.take(record)
        self._pending = self._pending[ready:]
        *past, last = self._clock.spans or [Span(0.0, 0.0, USEFUL)]
        for start_s, end_s, part in past:
            self._parts[part] += end_s - start_s
        self._clock.spans = [last]

    def goodput(self) -> Goodput:
        """Return the goodput so far, with one span per part."""
        spans, end_s = [], 0.0
        for part, seconds_of in self._parts.items():
            last = sum(span.end_s - span.start_s for span in self._clock.spans if span.part == part)
            spans.append(Span(end_s, end_s + seconds_of + last, part))
            end_s = spans[-1].end_s
        return Goodput(spans, self._clock.failures)


def _timed_lines(file: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(file) if "time" in line]


def _steps_of_the_run(ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Return the lines of rank 0, and other ranks' lines for missing steps."""
    found: list[Mapping[str, Any]] = []
    known: set[int] = set()
    for rank in sorted(ranks):
        found += [line for line in ranks[rank] if line["step"] not in known]
        known |= {line["step"] for line in ranks[rank]}
    return found


def _time_of(record: Mapping[str, Any]) -> float:
    return float(record["time"])


def _own_s(line: Mapping[str, Any]) -> float:
    return max(float(line.get("step_s", 0.0)), 0.0)


class _Clock:
    """Division of the wall-clock time into spans, from records in order of time.

    Args:
        typical_s: typical step time in seconds. If the first step after a start or failure takes longer, the excess
            (allocation, compilation, new connections) counts for the start or failure.
    """

    def __init__(self, typical_s: float) -> None:
        self.typical_s = typical_s
        self.spans: list[Span] = []
        self.failures: list[Failure] = []
        self._at: float | None = None  # Unix time of the end of the last span; None if no command is active
        self._until = "start"  # part of the time until the next step
        self._furthest = 0  # newest step; an earlier step is a replay
        self._owed_s = 0.0  # useful time that did not fit into the last span because of rounding

    def take(self, record: Mapping[str, Any]) -> None:
        if "event" in record:
            self._event(_time_of(record), record)
        else:
            self._step(_time_of(record), record)

    def _step(self, time: float, line: Mapping[str, Any]) -> None:
        own_s = _own_s(line)
        if self._at is None:
            self._at = time - own_s
        length_s = max(time - self._at, 0.0)
        stall_s = min(max(line.get("checkpoint_s", 0.0), 0.0), own_s, length_s)
        work_s = own_s - stall_s if own_s else self.typical_s
        if self._until in ("start", "restart", "recovery", "recut"):
            work_s = min(work_s, self.typical_s)
        work_s += self._owed_s
        fits_s = min(work_s, length_s - stall_s)
        self._owed_s = min(work_s - fits_s, _ROUNDING_S)
        self._add(time - fits_s - stall_s, self._until)
        self._add(time - fits_s, "checkpoint")
        self._add(time, USEFUL if line["step"] > self._furthest else "replay")
        self._furthest, self._until = max(self._furthest, line["step"]), "between"

    def _event(self, time: float, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "launch":
                self._at, self._until = time, "start"
            case "start" | "resume" if self._at is None:
                self._at, self._until = time, "start"
            case "start" | "resume" if self._until == "between":  # another process started the run again
                self._failed(time, "restart", "restart")
            case "restart":
                self._failed(time, "restart", "restart")
            case "lost" if not event.get("alone"):
                self._failed(time, "recovery", f"rank {event.get('rank')} lost")
            case "host_lost":
                self._failed(time, "recovery", f"host {event.get('host')} lost")
            case "recut":  # the run has just waited for a checkpoint
                self._add(time, "checkpoint")
                self._until = "recut"
            case "generation":  # a new generation without a failure event before, or with a healed rank
                self._add(time, "recovery")
                self._until = "recovery"
            case "healed":
                self.failures.append(Failure(self._place(time), f"rank {event.get('rank')} healed"))
            case "rewind":
                self._failed(time, "recovery", "rewind")
            case "evaluation" | "test" if self._until == "between":
                self._add(time, "evaluation")
            case "end" if self._at is not None:
                # at its end, a run waits for its last checkpoint
                self._add(time, "checkpoint" if self._until == "between" else self._until)
                self._at = None

    def _failed(self, time: float, part: str, text: str) -> None:
        self._add(time, part)
        self._until = part
        self.failures.append(Failure(self._place(time), text))

    def _add(self, time: float, part: str) -> None:
        if self._at is None or time <= self._at:
            return
        start_s = self._place(self._at)
        self.spans.append(Span(start_s, start_s + time - self._at, part))
        self._at = time

    def _place(self, time: float) -> float:
        told_s = self.spans[-1].end_s if self.spans else 0.0
        return told_s + (max(time - self._at, 0.0) if self._at is not None else 0.0)
