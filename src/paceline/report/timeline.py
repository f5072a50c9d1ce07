"""Timeline of a run's steps, in which all ranks share one clock."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from paceline.engine.meter import PARTS
from paceline.errors import RunError
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info
from paceline.report.run_record import RunRecord
from paceline.run.record.run import Run

# The order in which the parts of a step are drawn. A checkpoint that delays a step begins before the wait for data.
_ORDER = ("checkpoint", "data", "compute", "bubble", "imbalance", "comm", "optimizer")
# Replicas that take local steps exchange parameters after the update.
_LOCAL_ORDER = ("checkpoint", "data", "compute", "bubble", "imbalance", "optimizer", "comm")
assert set(_ORDER) == set(_LOCAL_ORDER) == set(PARTS)
# Shorter gaps between two steps count as zero.
LEAST_GAP_S = 2e-3
_AROUND = 50  # number of steps before and after the requested steps that help to align the clocks
_SCATTER = 3.0  # smallest corrected clock difference, in median deviations
_RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")


class StepRange(NamedTuple):
    """Range of steps: either the latest `newest` steps, or the steps from `first` to `last`."""

    newest: int | None = None
    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """Parse a range such as `3` (the latest three steps) or `40-42`.

        Raises:
            ValueError: the text is neither a number of steps nor a range of steps.
        """
        match = _RANGE.fullmatch(text.strip())
        if match is not None and match[2] is None and int(match[1]) > 0:
            return cls(int(match[1]))
        if match is not None and match[2] is not None and 0 < int(match[1]) <= int(match[2]):
            return cls(None, int(match[1]), int(match[2]))
        raise ValueError(f"{text!r} is neither a number of steps, such as 3, nor a range of steps, such as 40-42")


@dataclass(frozen=True)
class RankStep:
    """One step of one rank.

    Attributes:
        start_s: start of the step, in seconds since the timeline's origin.
        parts_s: seconds of each of `PARTS`, in drawing order. If all ranks share one clock, the part `imbalance` ends
            when the last rank arrives. Otherwise, its length is taken from the record.
        line: line of the step in the rank's steps file.
    """

    rank: int
    step: int
    start_s: float
    parts_s: Mapping[str, float]
    line: Mapping[str, Any]

    @property
    def end_s(self) -> float:
        """End of the step, in seconds since the timeline's origin."""
        return self.start_s + sum(self.parts_s.values())

    def place(self, part: str) -> tuple[float, float]:
        """Return the start and end of a part.

        If a part occurs several times in a step, its total time is drawn once.
        """
        start_s = self.start_s
        for name, seconds in self.parts_s.items():
            if name == part:
                return start_s, start_s + seconds
            start_s += seconds
        raise KeyError(part)

    @property
    def synced_s(self) -> float:
        """Time at which the rank received the results of the exchange.

        It is given in seconds since the timeline's origin.
        """
        return self.place("comm")[1]

    @property
    def after_sync_s(self) -> dict[str, float]:
        """Seconds of each part that follows the step's communication."""
        names = list(self.parts_s)
        return {name: self.parts_s[name] for name in names[names.index("comm") + 1 :]}

    def moved(self, seconds: float) -> RankStep:
        """Return the step, shifted by `seconds` to another clock."""
        return replace(self, start_s=self.start_s + seconds)


@dataclass(frozen=True)
class Timeline:
    """Steps of all ranks on the clock of the first host.

    Attributes:
        origin_s: Unix time at which the timeline is zero.
        ranks: for each rank, its requested steps in order.
        before: for each rank, the step before the first requested step, if it was recorded.
        exchanged: numbers of the steps in which all ranks exchange data, and thus wait for each other.
        events: events during the steps, each with its time in seconds since the origin.
        spread_s: typical difference, in seconds, between the times at which hosts leave an exchange, after their clocks
            have been aligned. None if all ranks share one clock.
        hosts: host of each rank; empty if there is only one host.
        gaps: sentences about the gaps in the record.
        noun: what a step is called: `step` or `round`.
    """

    plan: Plan
    origin_s: float
    ranks: Mapping[int, Sequence[RankStep]]
    before: Mapping[int, RankStep]
    exchanged: frozenset[int]
    events: Sequence[tuple[float, Mapping[str, Any]]]
    spread_s: float | None
    hosts: Mapping[int, str]
    gaps: Sequence[str]
    noun: str = "step"
    on_accelerators: bool = False

    @property
    def first(self) -> int:
        """Number of the first step in the timeline."""
        return min(steps[0].step for steps in self.ranks.values())

    @property
    def last(self) -> int:
        """Number of the last step in the timeline."""
        return max(steps[-1].step for steps in self.ranks.values())

    @property
    def steps(self) -> int:
        """Number of different steps in the timeline, over all ranks."""
        return len({step.step for steps in self.ranks.values() for step in steps})

    @property
    def what(self) -> str:
        """Name of the steps, such as `steps 40 to 42`."""
        return f"{self.noun} {self.first:,}" if self.steps == 1 else f"{self.noun}s {self.first:,} to {self.last:,}"

    def events_between(self, start_s: float, end_s: float) -> list[str]:
        """Return the distinct kinds of events in a time interval."""
        # an event is recorded when it ends, with a rounded time
        return list(dict.fromkeys(e["event"] for s, e in self.events if start_s - 1e-3 < s < end_s + 1e-3))


def timeline_of(run: Run, wanted: StepRange) -> Timeline:
    """Build the timeline of the requested steps.

    Raises:
        RunError: the run recorded no times for the requested steps.
    """
    record = RunRecord.read(run)
    timed = {rank: [line for line in lines if line["step_s"] > 0] for rank, lines in record.ranks.items()}
    timed = {rank: lines for rank, lines in timed.items() if lines}
    first, last = _bounds(run, timed, wanted)
    near = {
        rank: [line for line in lines if first - _AROUND <= line["step"] <= last + _AROUND]
        for rank, lines in timed.items()
    }
    near = {rank: lines for rank, lines in near.items() if any(first <= line["step"] <= last for line in lines)}
    info = sync_info(run.plan.sync)
    local = info.local_steps and not info.served
    origin_s = float(int(min(line["time"] - line["step_s"] for lines in near.values() for line in lines)))
    placed = {rank: _placed(rank, near[rank], origin_s, _LOCAL_ORDER if local else _ORDER) for rank in sorted(near)}
    exchanged = frozenset() if info.served or len(placed) < 2 else _exchanged(placed, every_step=not local)
    hosts = _hosts(run, placed)
    shifts, spread_s = _shifts(placed, {} if run.cluster.emulate else hosts, exchanged)
    placed = {rank: [step.moved(shifts[rank]) for step in steps] for rank, steps in placed.items()}
    if spread_s is None and not local and not run.cluster.has_accelerators:
        placed = _waits_by_clock(placed, exchanged)
    ranks = {rank: [step for step in steps if first <= step.step <= last] for rank, steps in placed.items()}
    before = {rank: step for rank, steps in placed.items() for step in steps if step.step == first - 1}
    begin_s, end_s = min(s[0].start_s for s in ranks.values()), max(s[-1].end_s for s in ranks.values())
    begin_s = min([begin_s, *(step.end_s for step in before.values())])
    events = [(event["time"] - origin_s, event) for event in record.events]
    return Timeline(
        run.plan,
        origin_s,
        ranks,
        before,
        exchanged,
        [(seconds, event) for seconds, event in events if begin_s <= seconds <= end_s],
        spread_s,
        hosts,
        record.gaps,
        record.noun,
        run.cluster.has_accelerators,
    )


def _bounds(run: Run, timed: Mapping[int, Sequence[Mapping[str, Any]]], wanted: StepRange) -> tuple[int, int]:
    """Return the numbers of the first and last step to show."""
    counts = Counter(line["step"] for lines in timed.values() for line in lines)
    if not counts:
        raise RunError(
            "report.no_timeline",
            "{run} has recorded no step times yet, so it has no timeline. On accelerators, the times of a step are "
            "recorded one step later.",
            run=run.path,
        )
    if wanted.newest is not None:
        # the latest step that all ranks have finished, or else the latest step that most ranks have finished
        most = max(counts.values())
        last = max(step for step, count in counts.items() if count == most)
        shown = sorted(step for step in counts if step <= last)[-wanted.newest :]
        return shown[0], last
    there = [step for step in counts if wanted.first <= step <= wanted.last]
    if not there:
        raise RunError(
            "report.steps_not_recorded",
            "{run} has no times for steps {first:,} to {last:,}. Its recorded times begin at step {earliest:,} and "
            "end at step {latest:,}.",
            run=run.path,
            first=wanted.first,
            last=wanted.last,
            earliest=min(counts),
            latest=max(counts),
        )
    return min(there), max(there)


def _placed(rank: int, lines: Sequence[Mapping[str, Any]], origin_s: float, order: Sequence[str]) -> list[RankStep]:
    """Compute where a rank's steps lie on the rank's own clock."""
    parts = [{part: max(float(line[f"{part}_s"]), 0.0) for part in order} for line in lines]
    lengths_s = [sum(found.values()) for found in parts]
    ends_s = _ends([float(line["time"]) - origin_s for line in lines], lengths_s)
    placed: list[RankStep] = []
    for line, found, length_s, end_s in zip(lines, parts, lengths_s, ends_s, strict=True):
        start_s = max([end_s - length_s, *(step.end_s for step in placed[-1:])])
        placed.append(RankStep(rank, line["step"], start_s, found, line))
    return placed


def _ends(written_s: Sequence[float], lengths_s: Sequence[float]) -> list[float]:
    """Compute the ends of steps from their durations and the times of their lines.

    Each line is written shortly after its step has ended. Each step begins when the previous step ends, unless other
    work, such as an evaluation, comes between them. Such work only adds time, so the smallest delay among the later
    lines gives the offset between the summed durations and the clock.
    """
    ends_s, late_s, sum_s = [], [], 0.0
    for written, length in zip(written_s, lengths_s, strict=True):
        sum_s += length
        ends_s.append(sum_s)
        late_s.append(written - sum_s)
    for i in range(len(late_s) - 2, -1, -1):
        late_s[i] = min(late_s[i], late_s[i + 1])
    found, offset_s = [], float("-inf")
    for end_s, least_s in zip(ends_s, late_s, strict=True):
        if least_s - offset_s > LEAST_GAP_S:
            offset_s = least_s
        found.append(end_s + offset_s)
    return found


def _exchanged(placed: Mapping[int, Sequence[RankStep]], *, every_step: bool) -> frozenset[int]:
    """Find the steps in which all ranks exchange data.

    Unless every step has an exchange, these are the steps in which all ranks record the same loss.
    """
    losses: dict[int, list[Any]] = {}
    for steps in placed.values():
        for step in steps:
            losses.setdefault(step.step, []).append(step.line.get("loss"))
    whole = {step: of for step, of in losses.items() if len(of) > 1}
    if every_step:
        return frozenset(whole)
    return frozenset(step for step, of in whole.items() if of[0] is not None and len(set(of)) == 1)


def _shifts(
    placed: Mapping[int, Sequence[RankStep]], hosts: Mapping[int, str], exchanged: Iterable[int]
) -> tuple[dict[int, float], float | None]:
    """Return the correction of each rank's clock, and the difference that remains between hosts.

    Ranks on one host share a clock. The clocks of hosts are aligned by exchanges, because all ranks leave an exchange
    at about the same time. For each host, only the first rank that leaves is considered, because other ranks may wake
    up late. A clock is corrected only if its difference exceeds the scatter of these times.

    Args:
        hosts: host of each rank; empty if all ranks share one clock.
    """
    common = set(exchanged)
    left_s: dict[str, dict[int, float]] = {}
    for rank, steps in placed.items():
        own = left_s.setdefault(hosts.get(rank, ""), {})
        for step in steps:
            if step.step in common:
                own[step.step] = min(own.get(step.step, step.synced_s), step.synced_s)
    reference, *others = left_s
    shifts, spreads = dict.fromkeys(left_s, 0.0), []
    for host in others:
        apart = [at - left_s[host][step] for step, at in left_s[reference].items() if step in left_s[host]]
        if apart:
            shift = median(apart)
            spreads.append(median(abs(seconds - shift) for seconds in apart))
            shifts[host] = shift if abs(shift) > _SCATTER * spreads[-1] else 0.0
    return {rank: shifts[hosts.get(rank, "")] for rank in placed}, max(spreads, default=None)


def _waits_by_clock(placed: Mapping[int, Sequence[RankStep]], exchanged: Iterable[int]) -> dict[int, list[RankStep]]:
    """Correct the waits, so that each rank waits until the last rank arrives.

    The record assumes that all ranks left the previous exchange together. On busy cores, some ranks wake up late.
    """
    arrived = dict.fromkeys(exchanged, float("-inf"))
    for steps in placed.values():
        for step in steps:
            if step.step in arrived:
                arrived[step.step] = max(arrived[step.step], step.place("imbalance")[0])
    return {rank: [_waiting(step, arrived.get(step.step)) for step in steps] for rank, steps in placed.items()}


def _waiting(step: RankStep, until_s: float | None) -> RankStep:
    """Set the time at which the wait in a step ends. The rest of the exchange is communication."""
    if until_s is None:
        return step
    whole_s = step.parts_s["imbalance"] + step.parts_s["comm"]
    waited_s = min(max(until_s - step.place("imbalance")[0], 0.0), whole_s)
    return replace(step, parts_s={**step.parts_s, "imbalance": waited_s, "comm": whole_s - waited_s})


def _hosts(run: Run, ranks: Iterable[int]) -> dict[int, str]:
    """Return the host of each rank, as placed at the start of the run."""
    hosts = run.cluster.hosts
    if len(hosts) < 2:
        return {}
    placed = run.cluster.ranks_per_host(run.plan.ranks)
    names = [host.name for host, count in zip(hosts, placed, strict=True) for _ in range(count)]
    return {rank: names[rank] for rank in ranks if rank < len(names)}
