"""Live state of a run: the latest steps of each rank, losses, members and events."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from paceline.engine.meter import PARTS
from paceline.errors import PacelineError
from paceline.files import opened_to_read
from paceline.report.run_record import is_event, is_step, ranks_of
from paceline.run.record.goodput import GoodputSoFar
from paceline.run.record.progress import TROUBLE, UNKNOWN_EVENT, NewLines, RecentSteps, event_sentence, parsed
from paceline.run.record.run import Run

RECENT = 50  # number of latest steps that are kept for each rank
EVENTS = 100
CURVE = 256  # largest number of losses in a curve
_PARSED = 256  # approximate number of lines per poll, over all ranks except the leading rank
_FEWEST_PARSED = 4
# largest line of a step; bytes that are read when a rank becomes the leading rank
_LINE_BYTES, _TAIL_BYTES = 2**10, 2**22
# a run may have stopped after this time without a step, in typical steps and in seconds
_LATE_STEPS, _LATE_S = 20.0, 10.0
_PARTS_S = tuple(f"{part}_s" for part in PARTS)
_COUNTS = ("step", "epoch", "local_samples")  # keys that some kinds of runs omit from the line of a step


@dataclass
class Curve:
    """Losses of a whole run. If there are too many losses to draw, pairs of values are merged.

    Attributes:
        each: number of steps that each value covers.
        values: mean loss of each group of steps. `low` and `high` are the smallest and largest loss of each group.
    """

    each: int = 1
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    _pending: list[float] = field(default_factory=list)

    def add(self, loss: float) -> None:
        """Add the loss of the next step."""
        self._pending.append(loss)
        if len(self._pending) < self.each:
            return
        self.values.append(fmean(self._pending))
        self.low.append(min(self._pending))
        self.high.append(max(self._pending))
        self._pending.clear()
        if len(self.values) >= CURVE:
            self.values, self.low, self.high = (
                [of((one, other)) for one, other in zip(kept[::2], kept[1::2], strict=False)]
                for of, kept in ((fmean, self.values), (min, self.low), (max, self.high))
            )
            self.each *= 2


@dataclass(frozen=True)
class RankNow:
    """Statistics of a rank's latest steps.

    Attributes:
        step: the rank's latest step. `behind` is the number of steps by which the rank trails the rank with the latest
            step. `behind` is 0 if the rank may only seem to trail because the files are not read at the same time.
        step_s: median time of the latest steps, in seconds.
        parts: fraction of the latest steps that each of `PARTS` takes; the fractions sum to 1.
        samples: number of samples that the rank computed in the latest complete batch. `share` is the corresponding
            fraction of the batch.
        memory_bytes: memory that the rank uses on its accelerator, or else on its host; None if unknown.
        sent: rates at which the rank sent bytes between its latest two readings; None if unknown.
    """

    rank: int
    step: int
    behind: int
    step_s: float
    parts: dict[str, float]
    samples: int
    share: float
    memory_bytes: int | None
    sent: Sent | None = None


@dataclass(frozen=True)
class Sent:
    """Rates of sent bytes: from a rank to other replicas, and from its host."""

    per_step: float
    per_s: float
    host_per_s: float


@dataclass(frozen=True)
class Happened:
    """Event for display. `number` is the index of the event in the run."""

    number: int
    time: float
    sentence: str
    trouble: bool


class LiveRun:
    """Follower of a run's directory. Each poll reads only the data added since the last poll.

    The leading rank is rank 0, or the rank with the latest step while rank 0 makes no steps. Every line of the leading
    rank is parsed. Only the latest few lines of the other ranks are parsed, so the statistics of the other ranks are
    estimates.

    Attributes:
        recent: latest steps of the leading rank.
        curve: losses of the whole run, starting at step `curve_from`.
        members: the ranks of the current generation.
        goodput: wall-clock time of the run so far, divided into parts.
        events: the latest events. `troubles` has the latest failures, and `happened` is the number of events of the
            whole run.
        metrics: the latest validation metrics. `transport` is the network transport that the ranks use.
        carried: bytes sent and received over the link of each emulated host. The numbers are recorded when an attempt
            ends.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.recent, self.curve, self.curve_from = run, RecentSteps(None), Curve(), 1
        self.members, self.goodput = Members(run), GoodputSoFar()
        self.events: deque[Happened] = deque(maxlen=EVENTS)
        self.troubles: deque[Happened] = deque(maxlen=EVENTS)
        self.happened = 0
        self.total_steps: int | None = None
        self.metrics: dict[str, float] = {}
        self.transport = ""
        self.carried: dict[str, list[int]] = {}
        self.began: float | None = None
        self.end: dict[str, Any] | None = None
        self._lead, self._lead_lines = 0, NewLines(run.path / "steps" / "rank-0.jsonl")
        self._others: dict[int, NewestSteps] = {}
        self._ranks: dict[int, _Rank] = {}
        self._event_lines = NewLines(run.path / "events.jsonl")
        self._newest_curve = 0
        self._took_s = 0.0  # duration of the last poll

    def look(self) -> bool:
        """Read new data, and return True if there was new data."""
        began = time.monotonic()
        events = self._look_at_events()
        steps = self._look_at_the_lead()
        others = self._look_at_others()
        if not steps and self._ranks:
            steps = self._another_lead()
        self._took_s = time.monotonic() - began
        self.goodput.add(steps, events, took_s=self._took_s, ended=self.ended)
        return bool(events or steps or others)

    @property
    def ended(self) -> bool:
        """True if the run has ended. A run that has ended may be resumed."""
        return self.end is not None

    def late(self, now: float | None = None) -> bool:
        """Return True if the last step is so old that the run may have stopped."""
        steps = self.recent.steps
        if not steps or self.ended:
            return False
        usual_s = float(statistics.median(step["step_s"] for step in steps))
        return self._since_s(now) > max(_LATE_S, _LATE_STEPS * usual_s)

    def state(self, now: float | None = None) -> str:
        """Describe the state of the run in words.

        The text gives the reason if the run has ended, or the time since the last step if the run is late.
        """
        if self.end is not None:
            return f"ended: {self.end.get('reason')}"
        if self.late(now):
            return f"no step for {self._since_s(now):,.0f} s: the run is waiting, was stopped, or crashed"
        return "running" if self.recent.steps else "starting"

    def _since_s(self, now: float | None) -> float:
        newest = max([self.recent.steps[-1]["time"], *(one.time for one in self.events)])
        return (time.time() if now is None else now) - float(newest)

    def ranks(self) -> list[RankNow]:
        """Return the statistics of every rank, in the order of the ranks."""
        newest = max((one.step for one in self._ranks.values()), default=0)
        meanwhile = self._took_s / (self.recent.step_s or math.inf)
        return [_now(rank, one, newest, 1 + meanwhile) for rank, one in sorted(self._ranks.items())]

    def _look_at_the_lead(self) -> list[dict[str, Any]]:
        steps = [line for line in self._lead_lines if is_step(line) and _filled(line)]
        self._lead_takes(steps)
        return steps

    def _lead_takes(self, steps: list[dict[str, Any]]) -> None:
        self._take(self._lead, steps)
        for line in steps:
            self.recent.add(line)
            if line["step"] > self._newest_curve and line["loss"] is not None:  # skips steps that are trained again
                if not self._newest_curve:
                    self.curve_from = line["step"]
                self._newest_curve = line["step"]
                self.curve.add(float(line["loss"]))

    def _look_at_others(self) -> bool:
        """Read the latest steps of all ranks except the leading rank."""
        there = sorted(rank for rank in ranks_of(self.run) if rank < MOST_RANKS and rank != self._lead)
        most = max(_PARSED // max(len(there), 1), _FEWEST_PARSED)
        found = False
        for rank in there:
            if rank not in self._others:
                self._others[rank] = NewestSteps(self.run.path / "steps" / f"rank-{rank}.jsonl")
            steps, unbroken = self._others[rank].look(most if rank in self._ranks else RECENT)
            found |= self._take(rank, [line for line in steps if _filled(line)], unbroken=unbroken)
        return found

    def _another_lead(self) -> list[dict[str, Any]]:
        """Choose a new leading rank if the leading rank makes no progress.

        The new leading rank is the rank with the latest step. The function returns the steps that this rank has made in
        the meantime.
        """
        now = self._ranks.get(self._lead)
        step, at = (now.step, now.time) if now else (0, 0.0)
        furthest = max(self._ranks, key=lambda rank: (self._ranks[rank].step, -rank))
        missed = self._ranks[furthest].step - step
        if missed <= 1:  # on accelerators, the line of a step is written after the next step
            return []
        self._lead = furthest
        self._others.pop(furthest, None)
        self._lead_lines = NewLines(self.run.path / "steps" / f"rank-{furthest}.jsonl")
        self._lead_lines.skip(min((missed + RECENT) * _LINE_BYTES, _TAIL_BYTES) if now else _TAIL_BYTES)
        steps = [line for line in self._lead_lines if is_step(line) and _filled(line) and line["time"] > at]
        self._ranks[furthest].forget()
        self._lead_takes(steps)
        return steps

    def _take(self, rank: int, steps: list[dict[str, Any]], *, unbroken: bool = True) -> bool:
        if steps:
            self._ranks.setdefault(rank, _Rank()).take(steps, unbroken=unbroken)
            self.members.stepped(rank, float(steps[-1]["time"]))
        return bool(steps)

    def _look_at_events(self) -> list[dict[str, Any]]:
        found = [event for event in self._event_lines if is_event(event)]
        for event in found:
            if event["event"] in ("start", "resume"):
                self._starts(event)
            try:
                self.recent.told(event)
                self.members.told(event)
                self._note(event)
                sentence = event_sentence(event)
            except UNKNOWN_EVENT:
                sentence = None
            self.total_steps = self.recent.total_steps or self.total_steps
            if event["event"] == "end":
                self.end, self.recent.total_steps = event, None  # no steps remain
            if sentence:
                one = Happened(self.happened, event["time"], sentence, event["event"] in TROUBLE)
                self.events.append(one)
                self.troubles.extend([one] if one.trouble else [])
                self.happened += 1
        return found

    def _note(self, event: dict[str, Any]) -> None:
        """Store the values of an event that the page shows separately from the event's sentence."""
        if type(event.get("transport")) is str:
            self.transport = event["transport"]
        if event["event"] == "evaluation":
            self.metrics = event["metrics"]
        if event["event"] == "links":
            for host, bytes_of in event["links"].items():
                before = self.carried.get(host, [0, 0])
                both = int(bytes_of["sent_bytes"]), int(bytes_of["received_bytes"])
                self.carried[str(host)] = [before[0] + both[0], before[1] + both[1]]

    def _starts(self, event: dict[str, Any]) -> None:
        if self.began is not None:
            try:
                self.run = Run(self.run.path)  # a resumed run may have another plan
                self.members.planned(self.run)
            except PacelineError:  # the files are being written, or another program wrote them
                pass
        self.began, self.end = self.began or event["time"], None
        if not _is_count(event.get("total_steps")):
            event.pop("total_steps", None)


class _Rank:
    """Latest steps and machine readings of a rank."""

    def __init__(self) -> None:
        self.steps: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.parts_s: deque[tuple[float, ...]] = deque(maxlen=RECENT)  # times of the parts of each step
        self.used: dict[str, float] = {}
        self.sent: Sent | None = None
        self._read: tuple[int, float] | None = None  # step number and time of the latest reading

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"])

    @property
    def time(self) -> float:
        return float(self.steps[-1]["time"])

    def forget(self) -> None:
        self.steps.clear()
        self.parts_s.clear()

    def take(self, steps: list[dict[str, Any]], *, unbroken: bool) -> None:
        if not unbroken:
            self._read = None
        for line in steps:
            self.steps.append(line)
            self.parts_s.append(tuple([max(line.get(name, 0.0), 0.0) for name in _PARTS_S]))
            if use := line.get("use"):
                self.used = use
                at = line["step"], float(line["time"])
                if self._read and "wire_bytes" in use and at[0] > self._read[0] and at[1] > self._read[1]:
                    passed_s, wire = at[1] - self._read[1], float(use["wire_bytes"])
                    network = float(use.get("network_sent_bytes", 0.0))
                    self.sent = Sent(wire / (at[0] - self._read[0]), wire / passed_s, network / passed_s)
                self._read = at


def _filled(line: dict[str, Any]) -> bool:
    """Set missing counts in a line to 0. Return True if all counts are integers."""
    return all(_is_count(line.setdefault(key, 0)) for key in _COUNTS)


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) < 2**53


def _now(number: int, rank: _Rank, newest: int, skew: float) -> RankNow:
    steps = rank.steps
    parts_s = list(map(sum, zip(*rank.parts_s, strict=True)))  # 0 for steps without times
    whole_s = sum(parts_s) or 1.0
    times = sorted([step["step_s"] for step in steps if step["step_s"] > 0]) or [0.0]
    memory = rank.used.get("gpu_memory_bytes", rank.used.get("memory_bytes"))
    whole_batch = max([step["samples"] for step in steps])
    newest_whole = next(step for step in reversed(steps) if step["samples"] == whole_batch)
    samples = newest_whole["local_samples"]
    return RankNow(
        number,
        rank.step,
        newest - rank.step if newest - rank.step > skew else 0,
        times[len(times) // 2],
        {part: seconds / whole_s for part, seconds in zip(PARTS, parts_s, strict=True)},
        samples,
        min(samples / whole_batch, 1.0) if whole_batch > 0 else 0.0,
        None if memory is None else int(memory),
        rank.sent,
    )


State = Literal["starts", "in", "back", "lost", "out", "left"]
STATES: dict[State, str] = {
    "starts": "starts",
    "in": "takes part",
    "back": "lost; started again",
    "lost": "lost; the others wait",
    "out": "lost; left out",
    "left": "left on request",
}
MOST_RANKS = 4096  # largest number of ranks that are followed


@dataclass
class Member:
    """Host and state of a rank. `since` is the Unix time at which the state began."""

    host: str
    state: State = "starts"
    since: float = 0.0
    slow: bool = False


class Members:
    """Ranks of a run with their states, derived from the run's events.

    Attributes:
        generation: number of times that the ranks have formed a new communication group.
    """

    def __init__(self, run: Run) -> None:
        self.generation = 0
        self.ranks: dict[int, Member] = {}
        self.planned(run)

    def planned(self, run: Run) -> None:
        """Assign the ranks of the run's plan to hosts."""
        ranks = min(run.plan.ranks, MOST_RANKS)
        cluster = run.cluster
        each = cluster.ranks_per_host(run.plan.ranks) if cluster.devices else []
        hosts = chain.from_iterable(repeat(host.name, here) for host, here in zip(cluster.hosts, each, strict=False))
        names = dict(zip(range(ranks), hosts, strict=False))
        self.ranks = {rank: self.ranks.get(rank) or Member(names.get(rank, "")) for rank in range(ranks)}

    def told(self, event: dict[str, Any]) -> None:
        """Update the states of the ranks from an event."""
        at = float(event["time"])
        if event["event"] in ("lost", "host_lost", "joins"):
            self.generation = min(max(self.generation, int(event.get("generation", 0))), 2**53)
        match event["event"]:
            case "launch" | "restart":
                self.generation = 0
                self._set([rank for rank, member in self.ranks.items() if member.state != "left"], "starts", at)
            case "start" | "resume":
                self._set([rank for rank, member in self.ranks.items() if member.state == "starts"], "in", at)
            case "lost":
                self._set([event["rank"]], "back" if event["again"] else "out", at)
            case "host_lost":
                self._set(event["ranks"], "lost" if event["again"] else "out", at)
            case "host_left":
                self._set(event["ranks"], "left", at)
            case "host_back":
                self._set(event["ranks"], "back", at)
            case "healed":
                self._set([event["rank"]], "in", at)
            case "scaled":
                self._set(event["ranks"], "left" if event["by"] < 0 else "back", at)
            case "slow_rank" | "slow_rank_over" if (member := self.ranks.get(event["rank"])) is not None:
                member.slow = event["event"] == "slow_rank"

    def take_part(self, rank: int) -> bool:
        """Return True if a rank takes part, or if no event has named the rank."""
        return rank not in self.ranks or self.ranks[rank].state == "in"

    def stepped(self, rank: int, at: float) -> None:
        """Record that a rank made a step, which shows that the rank takes part."""
        member = self.ranks.get(rank)
        if member is None:
            if rank < MOST_RANKS:
                self.ranks[rank] = Member("", "in", at)
        elif member.state != "in" and at > member.since:
            member.state, member.since = "in", at

    def _set(self, ranks: Iterable[int], state: State, at: float) -> None:
        for rank in ranks:
            if (member := self.ranks.get(rank)) is not None:
                member.state, member.since = state, at


_MOST_BYTES = 2**16  # bytes that are read per poll, which hold hundreds of lines
_READING = b'"use":'  # marks lines with a machine reading, which are written once per second
_MOST_READINGS = 8


class NewestSteps:
    """Reader of the latest lines of a rank's steps file.

    Each poll parses only a few of the new lines. Parsing all new lines would be too slow: 64 ranks with steps of 10 ms
    write 6,400 lines per second.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: int | None = None

    def look(self, most: int) -> tuple[list[dict[str, Any]], bool]:
        """Return new lines with machine readings, followed by the latest `most` new lines.

        The second value is False if lines were skipped that may contain a reading.
        """
        added, unbroken = self._added()
        until = added.rfind(b"\n") + 1  # the last line is still being written
        if self._place is not None:
            self._place += until
        newest = added[:until].rsplit(b"\n", most + 1)
        readings = _lines_with(_READING, newest[0]) if len(newest) > most + 1 else []
        found = []
        for line in [*readings, *(newest[1:] if len(newest) > most + 1 else newest)]:
            # a crash, or the start of this read within a line, may have truncated a line
            if line and is_step(step := parsed(line)):
                found.append(step)
        return found, unbroken

    def _added(self) -> tuple[bytes, bool]:
        """Return the bytes added since the last poll, and True if no bytes were skipped."""
        try:
            size = self.path.stat(follow_symlinks=False).st_size
            if size == self._place:
                return b"", True
            with opened_to_read(self.path) as file:
                before = self._place or 0
                self._place = max(before, size - _MOST_BYTES)
                file.seek(self._place)
                return file.read(_MOST_BYTES), self._place == before
        except OSError:  # the file does not exist yet, or is not a run's file
            return b"", True


def _lines_with(mark: bytes, text: bytes) -> list[bytes]:
    """Return the latest lines that contain `mark`, in order."""
    found: list[bytes] = []
    end = len(text)
    while len(found) < _MOST_READINGS and (at := text.rfind(mark, 0, end)) >= 0:
        begin = text.rfind(b"\n", 0, at) + 1
        line_end = text.find(b"\n", at)
        found.append(text[begin : line_end if line_end >= 0 else None])
        end = begin
    return found[::-1]


SHARE = 0.004  # fraction of one core; `paceline watch` and the live page then take at most 1 % of a 10 ms step
_LONGEST_S = 5.0


class Pace:
    """Time between polls, which grows if polls are expensive.

    Polls use at most the fraction `SHARE` of one core. The cost of a poll is the CPU time of this process since the
    last wait. To stay within this limit, a wait may be extended up to 5 s.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s, self._spent_s = every_s, time.process_time()

    def wait_s(self) -> float:
        """Return the seconds until the next poll."""
        before, self._spent_s = self._spent_s, time.process_time()
        return max(self.every_s, min((self._spent_s - before) / SHARE, _LONGEST_S))
