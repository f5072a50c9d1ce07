"""Reader of the files in a run's directory, which notes missing and damaged files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.files import read_text, whole_lines
from paceline.planning.sync_info import sync_info
from paceline.report.figures import PARTS
from paceline.run.record.goodput import Goodput, goodput_of
from paceline.run.record.run import Run, timed
from paceline.text import listed
from paceline.units import percent

FILE_LIMIT = 2**28  # largest number of bytes that are read from a file; enough for about half a million steps
_LARGEST = 1e300  # limit of a valid number; comparisons with it also exclude NaN and infinity
_NUMBERS = ("step", "time", "samples", "step_s", *(f"{part}_s" for part in PARTS))


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run's files.

    Attributes:
        ranks: steps of each rank, in order. A repeated step appears once, with its latest record.
        goodput: wall-clock time of the run, divided into parts.
        gaps: sentences about missing or unreadable files and lines.
    """

    ranks: dict[int, list[dict[str, Any]]]
    goodput: Goodput
    events: list[dict[str, Any]]
    environment: dict[str, Any]
    plan: str
    machine: str
    gaps: list[str]

    @property
    def noun(self) -> str:
        """What the run's steps are called: `round` in a federated run, otherwise `step`."""
        return "round" if any("chosen" in step for step in self.ranks.get(0, [])[:1]) else "step"

    @classmethod
    def read(cls, run: Run) -> RunRecord:
        """Read the files of a run. Invalid lines are counted and skipped."""
        gaps: list[str] = []
        lines, ranks = {}, {}
        there = sorted(ranks_of(run))
        # with parameter servers, only the first worker writes steps
        gaps += _missing(there, 1 if sync_info(run.plan.sync).served else run.plan.ranks)
        for rank in there:
            name = f"steps/rank-{rank}.jsonl"
            lines[rank] = _whole_lines(run.path, name, is_step, gaps)
            newest = {line["step"]: line for line in lines[rank]}
            ranks[rank] = [newest[step] for step in sorted(newest)]
        events = _whole_lines(run.path, "events.jsonl", is_event, gaps)
        if not events:
            gaps.append(
                "events.jsonl has no event, so it is unknown how the run began, what it measured and why it ended."
            )
        return cls(
            ranks,
            goodput_of(lines, events),
            events,
            _environment(run.path / "environment.json", gaps),
            str(run.plan),
            run.cluster.describe(),
            gaps,
        )

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The events that contain validation metrics."""
        return [e for e in self.events if e["event"] == "evaluation"]

    @cached_property
    def clock_s(self) -> list[float]:
        """Training time in seconds at the end of each step of rank 0.

        The time between attempts does not count.
        """
        steps = self.ranks[0]
        attempts = [e["time"] for e in self.events if e["event"] in ("start", "resume")]
        clock = [steps[0]["step_s"]]
        for before, after in pairwise(steps):
            paused = any(before["time"] < begun <= after["time"] for begun in attempts)
            clock.append(clock[-1] + (after["step_s"] if paused else max(after["time"] - before["time"], 0.0)))
        return clock

    @cached_property
    def clock_of(self) -> dict[int, float]:
        """Training time in seconds at the end of each step, by step number."""
        return {s["step"]: second for s, second in zip(self.ranks[0], self.clock_s, strict=True)}


def ranks_of(run: Run) -> Iterator[int]:
    """Yield the ranks that have written steps.

    There may be more ranks than in the plan, because an earlier attempt may have had more.
    """
    for file in (run.path / "steps").glob("rank-*.jsonl"):
        number = file.stem[5:]
        if number.isascii() and number.isdecimal() and len(number) < 10 and str(int(number)) == number:
            yield int(number)


def _missing(there: list[int], planned: int) -> Iterator[str]:
    """Yield a sentence for each range of ranks without a steps file."""
    end = max([planned, *(rank + 1 for rank in there[-1:])])
    for before, after in pairwise([-1, *there, end]):
        first, last = before + 1, after - 1
        if first == last:
            yield f"steps/rank-{first}.jsonl is missing: rank {first} is not shown."
        elif first < last:
            yield f"steps/rank-{first}.jsonl to rank-{last}.jsonl are missing: ranks {first} to {last} are not shown."


def _whole_lines(folder: Path, name: str, is_whole: Callable[[Any], bool], gaps: list[str]) -> list[dict[str, Any]]:
    """Return the valid lines of a file. `gaps` receives a sentence about the other lines."""
    whole, broken = [], 0
    try:
        for line in whole_lines(folder / name, FILE_LIMIT):
            value = _parsed(line)
            if is_whole(value):
                whole.append(value)
            else:
                broken += bool(line.strip())
        if (folder / name).stat().st_size > FILE_LIMIT:
            gaps.append(f"{name} is larger than {FILE_LIMIT:,} bytes: its end is left out.")
    except FileNotFoundError:
        return []
    except OSError as error:
        gaps.append(f"{name} cannot be read ({error.strerror or error}).")
    if broken:
        lines, verb = ("1 line", "is") if broken == 1 else (f"{broken:,} lines", "are")
        gaps.append(f"{lines} of {name} cannot be read and {verb} left out. A crash may cut a line short.")
    return whole


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_step(line: Any) -> bool:
    """Return True for a valid line of a steps file. Another program may have written the file."""
    if (
        not isinstance(line, dict)
        or not all(map(_is_number, map(line.get, _NUMBERS)))
        or not isinstance(line["step"], int)
    ):
        return False
    use = line.get("use", {})
    if not isinstance(use, dict) or not all(map(_is_number, use.values())):
        return False
    return line.get("loss", "") is None or _is_number(line.get("loss"))


def is_event(line: Any) -> bool:
    """Return True for a valid line of the events file."""
    if not isinstance(line, dict) or not isinstance(line.get("event"), str) or not _is_number(line.get("time")):
        return False
    metrics = line.get("metrics")
    return line["event"] not in ("evaluation", "test") or (
        "step" in line and isinstance(metrics, dict) and all(map(_is_number, metrics.values()))
    )


def _is_number(value: Any) -> bool:
    return (type(value) is float or type(value) is int) and -_LARGEST < value < _LARGEST


def _environment(file: Path, gaps: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(read_text(file, 2**24))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        gaps.append("environment.json is missing or cannot be read: the machine and the versions are not shown.")
        return {}
    return found


_LOST = {"compute": "slower compute"}
_WORTH_NAMING = 0.05  # smallest fraction of the lost time at which a part is named


def typical_parts(lines: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return the seconds of each part in a rank's median step.

    Warm-up steps do not count. The result is None if no other steps exist.
    """
    counted = timed(lines)
    if not counted:
        return None
    parts_s = [{part: s[f"{part}_s"] for part in PARTS} for s in counted]
    return typical(parts_s, [s["step_s"] for s in counted])


def where_it_goes(one: Mapping[str, float], many: Mapping[str, float], devices: int) -> str | None:
    """Describe which parts make a step longer than the ideal. Return None if no time is lost.

    Args:
        one, many: seconds of each part of a step, on one device and on several devices.
    """
    lost_s = excess_of(one, many, devices)
    total_s = sum(lost_s.values())
    gross_s = {part: lost for part, lost in lost_s.items() if lost > 0}
    if total_s <= 0 or not gross_s:
        return None
    whole_s = sum(gross_s.values())
    largest = sorted(gross_s, key=lambda part: -gross_s[part])
    shares = {part: gross_s[part] / whole_s for part in largest}
    named = [
        f"{percent(share, 0)} {_LOST.get(part) or PARTS[part].phrase}"
        for part, share in shares.items()
        if share > _WORTH_NAMING
    ]
    step_ms, ideal_ms = sum(many.values()) * 1e3, sum(one.values()) * 1e3 / devices
    where = f"A step takes {step_ms:.3g} ms instead of {ideal_ms:.3g} ms, which is 1/{devices} of one device's step."
    return f"{where} Causes of the difference: {listed(named)}."


def excess_of(one: Mapping[str, float], many: Mapping[str, float], devices: int) -> dict[str, float]:
    """Return by how many seconds each part exceeds the ideal.

    The ideal time is the time on one device divided by `devices`.
    """
    return {part: many[part] - one[part] / devices for part in many}


def typical(parts_s: Sequence[dict[str, float]], whole_s: Sequence[float]) -> dict[str, float]:
    """Compute the seconds of each part in a typical step.

    The parts are means over the middle half of the steps, scaled so that they sum to the median step time. The medians
    of the parts would not sum to the median step time.
    """
    order = sorted(range(len(whole_s)), key=lambda i: whole_s[i])
    quarter = len(order) // 4
    middle = order[quarter : len(order) - quarter]
    means = {part: fmean(parts_s[i][part] for i in middle) for part in parts_s[0]}
    scale = statistics.median(whole_s) / (sum(means.values()) or 1.0)
    return {part: mean * scale for part, mean in means.items()}
