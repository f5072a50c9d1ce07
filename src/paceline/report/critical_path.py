"""Critical path of a few steps: the parts that determined how long the steps took.

All ranks leave an exchange together, once the last rank has arrived and the data has been exchanged. Between two
exchanges, the path follows the rank that arrives last, because all other ranks wait for that rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean

from paceline.planning.plan import AXES
from paceline.planning.sync_info import sync_info
from paceline.report.figures import PARTS
from paceline.report.timeline import RankStep, Timeline
from paceline.text import listed
from paceline.units import count, percent, seconds

BETWEEN, LATE = "between", "late"
_SHARED = ("comm", BETWEEN)  # parts that are not caused by a single rank
_LEAST = 0.005  # minimum fraction of the time that a part takes before it is named
_WAIT = 0.03  # minimum fraction of the time that ranks wait before the wait counts as an imbalance
_MOST_RANKS, _WORTH_NAMING = 3, 0.1  # maximum number of slow ranks that are named, and minimum fraction of all waiting


@dataclass(frozen=True)
class Piece:
    """Section of the critical path.

    Attributes:
        part: one of `PARTS`, or `between` for time between steps.
        step: number of the step. For time between two steps, this is the later step.
        events: kinds of events that occurred between steps; empty for a part of a step.
    """

    part: str
    rank: int
    step: int
    start_s: float
    end_s: float
    events: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Duration of the section."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Arrival:
    """Arrival of the ranks at the exchange of a step.

    Attributes:
        last: the rank that arrived last.
        waited_s: seconds that each of the other ranks waited for the last rank.
        busy_s: for each rank, the seconds of each part since the previous exchange. The entry `late` is the rank's
            delay in leaving the previous exchange, relative to the first rank that left it.
    """

    step: int
    last: int
    waited_s: Mapping[int, float]
    busy_s: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class CriticalPath:
    """Critical path through the steps of a timeline.

    The path begins at the exchange before the first step, if there is one. If no rank waits for another, the path
    consists of the steps of the rank that finishes last.
    """

    timeline: Timeline
    pieces: Sequence[Piece]
    arrivals: Sequence[Arrival]

    @cached_property
    def total_s(self) -> float:
        """Duration of the path."""
        return sum(piece.seconds for piece in self.pieces)

    def seconds_of(self, part: str) -> dict[int, float]:
        """Return the total seconds of a part for each rank, largest first."""
        found: defaultdict[int, float] = defaultdict(float)
        for piece in self.pieces:
            if piece.part == part:
                found[piece.rank] += piece.seconds
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    @cached_property
    def shares(self) -> dict[str, float]:
        """Fraction of the path that each part takes, largest first."""
        parts = [*PARTS, BETWEEN]
        sums = {part: sum(self.seconds_of(part).values()) for part in parts}
        return {p: sums[p] / self.total_s for p in sorted(parts, key=lambda p: -sums[p]) if sums[p] > 0}

    @property
    def sentences(self) -> list[str]:
        """Sentences that describe the path and what the record does not show."""
        each = seconds(self.total_s / self.timeline.steps)
        head = f"{self.timeline.what.capitalize()} took {each}" + ("" if self.timeline.steps == 1 else " each")
        parts = listed([self._phrase(part) for part, share in self.shares.items() if share >= _LEAST])
        return [f"{head}. Critical path: {parts}.", *self._waits(), *self._stages(), *self._unknown()]

    # Sentences

    def _phrase(self, part: str) -> str:
        """Format a part of the path, such as `62 % compute on rank 1 (25.5 ms a step)`."""
        share, steps = self.shares[part], self.timeline.steps
        if part == BETWEEN:
            events = dict.fromkeys(e for piece in self.pieces if piece.part == BETWEEN for e in piece.events)
            known = [{"test": "evaluation", "checkpoint_saved": "checkpoints"}.get(e, e) for e in events]
            what = f" ({listed(known)})" if known else ""
            return f"{percent(share)} between {self.timeline.noun}s{what}"
        by_rank = self.seconds_of(part)
        each = f"{seconds(sum(by_rank.values()) / steps)} a {self.timeline.noun}"
        who = ""
        if part not in _SHARED and len(self.timeline.ranks) > 1:
            who = f" on {_ranks(list(by_rank))}"
        return f"{percent(share)} {PARTS[part].phrase}{who} ({each})"

    def _waits(self) -> Iterator[str]:
        if len(self.timeline.ranks) < 2 or not self.arrivals:
            return
        waited_s = fmean(fmean(arrival.waited_s.values()) for arrival in self.arrivals)
        if waited_s < _WAIT * self.total_s / len(self.arrivals):
            yield f"The ranks arrive at the exchange together: they wait {seconds(waited_s)} for the last one."
            return
        caused: defaultdict[int, float] = defaultdict(float)
        for arrival in self.arrivals:
            caused[arrival.last] += fmean(arrival.waited_s.values())
        worth = [rank for rank, s in caused.items() if s >= _WORTH_NAMING * sum(caused.values())]
        for rank in sorted(worth, key=lambda rank: -caused[rank])[:_MOST_RANKS]:
            yield self._wait_for(rank, [arrival for arrival in self.arrivals if arrival.last == rank])

    def _wait_for(self, rank: int, own: Sequence[Arrival]) -> str:
        of = len(self.arrivals)
        often = "" if of == 1 else f" at all {of} exchanges" if len(own) == of else f" at {len(own)} of {of} exchanges"
        one = len(own[0].waited_s) == 1
        who = f"Rank {next(iter(own[0].waited_s))} waits" if one else "The other ranks wait"
        waited_s = fmean(fmean(arrival.waited_s.values()) for arrival in own)
        text = f"Rank {rank} arrives last{often}. {who} {seconds(waited_s)} for it{_reason(own)}."
        next_s = fmean(min(arrival.waited_s.values()) for arrival in own)
        if not one and next_s > _LEAST * self.total_s / of:
            text += (
                f" The second-to-last rank arrives {seconds(next_s)} earlier, so a faster rank {rank} saves no more."
            )
        return text

    def _stages(self) -> Iterator[str]:
        if self.timeline.plan.pp < 2 or "bubble" not in self.shares:
            return
        compute_s = {r: fmean(s.parts_s["compute"] for s in steps) for r, steps in self.timeline.ranks.items()}
        longest = max(compute_s, key=lambda rank: compute_s[rank])
        yield (
            f"The stage of rank {longest} computes longest, {seconds(compute_s[longest])} a step. The shortest takes "
            f"{seconds(min(compute_s.values()))}. The record does not show which stage waits for which."
        )

    def _unknown(self) -> Iterator[str]:
        plan = self.timeline.plan
        inside = [
            f"{axis}={getattr(plan, axis)}" for axis in AXES if axis not in ("dp", "pp") and getattr(plan, axis) > 1
        ]
        if inside:
            yield f"Communication inside the layers ({' '.join(inside)}) is counted as compute."
        if sync_info(plan.sync).served:
            yield "Workers of parameter servers do not wait for each other. Only the first worker records its steps."
        elif len(self.timeline.ranks) > 1 and not self.arrivals:
            steps = f"this {self.timeline.noun}" if self.timeline.steps == 1 else f"any of these {self.timeline.noun}s"
            yield f"The replicas did not communicate in {steps}, so no rank waited. The path is that of the last rank."
        if self.timeline.on_accelerators and self.arrivals:
            yield "On accelerators, the rank that arrives last is inferred from the times of the previous step."
        spread_s = self.timeline.spread_s
        if spread_s is not None and spread_s > 0.02 * self.total_s / self.timeline.steps:
            yield f"The hosts' clocks are aligned only to within {seconds(spread_s)}."


def critical_path(timeline: Timeline) -> CriticalPath:
    """Find the critical path through a timeline."""
    pieces: list[Piece] = []
    arrivals: list[Arrival] = []
    begun = _begun_after(timeline)
    exchanged = sorted(step for step in timeline.exchanged if timeline.first <= step <= timeline.last)
    for step in exchanged:
        own = {rank: _until(timeline, rank, begun, step) for rank in timeline.ranks}
        there = {rank: steps for rank, steps in own.items() if steps and steps[-1].step == step}
        if not there:
            continue
        arrival = _arrival(step, there, {rank: _prior(timeline, rank, begun) for rank in there})
        arrivals.append(arrival)
        prior = _prior(timeline, arrival.last, begun)
        _join(pieces, prior)
        pieces += _pieces(timeline, prior, there[arrival.last], whole=False)
        begun = step
    rest = {rank: _until(timeline, rank, begun, timeline.last) for rank in timeline.ranks}
    rest = {rank: steps for rank, steps in rest.items() if steps}
    if rest and (not exchanged or begun != timeline.last):
        last = max(rest, key=lambda rank: rest[rank][-1].end_s)
        prior = _prior(timeline, last, begun) if exchanged else None
        _join(pieces, prior)
        pieces += _pieces(timeline, prior, rest[last], whole=True)
    return CriticalPath(timeline, pieces, arrivals)


def _begun_after(timeline: Timeline) -> int | None:
    """Return the step before the timeline, if the path can begin at its exchange."""
    step = timeline.first - 1
    return step if step in timeline.exchanged and timeline.before else None


def _until(timeline: Timeline, rank: int, after: int | None, until: int) -> list[RankStep]:
    return [s for s in timeline.ranks[rank] if (after is None or s.step > after) and s.step <= until]


def _prior(timeline: Timeline, rank: int, step: int | None) -> RankStep | None:
    """Return the rank's step at whose exchange the next section of the path begins."""
    if step is None:
        return None
    before = timeline.before.get(rank)
    steps = [*([before] if before else []), *timeline.ranks[rank]]
    return next((s for s in steps if s.step == step), None)


def _arrival(step: int, there: Mapping[int, Sequence[RankStep]], priors: Mapping[int, RankStep | None]) -> Arrival:
    """Determine which rank arrived last at a step's exchange, and how long the others waited.

    The last rank is the rank that waited least. Among ranks that waited equally long, the busiest rank counts as the
    last.
    """
    left_s = min([prior.synced_s for prior in priors.values() if prior], default=0.0)
    busy_s = {rank: _busy(steps, priors[rank], left_s) for rank, steps in there.items()}
    waits_s = {rank: steps[-1].parts_s["imbalance"] for rank, steps in there.items()}
    last = min(waits_s, key=lambda rank: (waits_s[rank], -sum(busy_s[rank].values())))
    return Arrival(step, last, {rank: waited for rank, waited in waits_s.items() if rank != last}, busy_s)


def _busy(steps: Sequence[RankStep], prior: RankStep | None, left_s: float) -> dict[str, float]:
    """Sum the seconds of each part since the previous exchange, except `imbalance` and `comm`."""
    sums = Counter(prior.after_sync_s if prior else {})
    for step in steps:
        sums.update(step.parts_s)
    sums.subtract(steps[-1].after_sync_s)
    own = {part: s for part, s in sums.items() if part not in ("imbalance", "comm")}
    return own | {LATE: prior.synced_s - left_s if prior else 0.0}


def _pieces(timeline: Timeline, prior: RankStep | None, steps: Sequence[RankStep], *, whole: bool) -> Iterator[Piece]:
    """Yield the parts of a rank from one exchange to the next.

    If `whole` is True, the parts continue to the end of the last step.
    """
    if prior is not None:
        yield from _parts(prior, prior.after_sync_s)
    for before, step in pairwise([prior, *steps]):
        assert step is not None
        if before is not None and step.start_s > before.end_s:
            events = tuple(timeline.events_between(before.end_s, step.start_s))
            yield Piece(BETWEEN, step.rank, step.step, before.end_s, step.start_s, events)
        behind = {} if whole or step is not steps[-1] else step.after_sync_s
        yield from _parts(step, [part for part in step.parts_s if part not in behind])


def _join(pieces: list[Piece], prior: RankStep | None) -> None:
    """Join the path to the rank that continues it.

    The end of the path moves to the time at which this rank leaves the exchange.
    """
    if not pieces or prior is None:
        return
    while len(pieces) > 1 and pieces[-1].start_s >= prior.synced_s:
        pieces.pop()
    last = pieces[-1]
    if last.part == "comm":
        pieces[-1] = replace(last, end_s=max(prior.synced_s, last.start_s))
    elif prior.synced_s > last.end_s:
        pieces.append(Piece("comm", prior.rank, prior.step, last.end_s, prior.synced_s))
    else:
        pieces[-1] = replace(last, end_s=max(prior.synced_s, last.start_s))


def _parts(step: RankStep, names: Mapping[str, float] | Sequence[str]) -> Iterator[Piece]:
    for name in names:
        start_s, end_s = step.place(name)
        if end_s > start_s:
            yield Piece(name, step.rank, step.step, start_s, end_s)


def _reason(arrivals: Sequence[Arrival]) -> str:
    """Explain a late arrival by the part that takes longest compared with other ranks."""
    more: defaultdict[str, float] = defaultdict(float)
    for arrival in arrivals:
        others = [parts for rank, parts in arrival.busy_s.items() if rank != arrival.last]
        for part, own_s in arrival.busy_s[arrival.last].items():
            more[part] += own_s - fmean(parts.get(part, 0.0) for parts in others)
    part, seconds_more = max(more.items(), key=lambda one: one[1])
    if seconds_more <= 0:
        return ""
    more_s = seconds(seconds_more / len(arrivals))
    if part == LATE:
        return f", mainly because it left the previous exchange {more_s} later"
    return f", mainly because it spends {more_s} more on {PARTS[part].phrase}"


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks: `rank 1`, `ranks 0 and 1`, `17 ranks`."""
    if len(ranks) > 3:
        return count(len(ranks), "rank")
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed([str(rank) for rank in sorted(ranks)])}"
