"""Live state of a run: latest steps by rank, losses, members and events."""

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
from paceline.run.record.progress import TROUBLE, NewLines, RecentSteps, event_sentence, parsed
from paceline.run.record.run import Run

RECENT = 50  # steps of each rank
EVENTS = 100
CURVE = 256  # largest number of losses in a curve
_PARSED = 256  # approximate lines per poll, for all ranks except the leading one
_FEWEST_PARSED = 4
_LINE_BYTES, _TAIL_BYTES = 2**10, 2**22  # of a step, at most; read when a rank becomes the leading one
# time without a step, in typical steps and in seconds, after which a run may have stopped
_LATE_STEPS, _LATE_S = 20.0, 10.0
_PARTS_S = tuple(f"{part}_s" for part in PARTS)
_COUNTS = ("step", "epoch", "local_samples")  # keys of a step's line that some kinds of runs omit


@dataclass
class Curve:
    """Losses of a whole run. If there are too many to draw, pairs are merged.

    Attributes:
        each: number of steps per value.
        values: mean losses. `low` and `high` are the smallest and largest loss of the same steps.
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
        step: the rank's latest step. `behind` is its distance to the latest step of all ranks, or 0 if reading the
            files may explain the distance.
        step_s: the median time of its latest steps, in seconds.
        parts: fraction of each of `PARTS` in these steps; they sum to 1.
        samples: the rank's samples in the latest complete batch. `share` is their fraction of that batch.
        memory_bytes: memory of the rank's process, or of its device; None if unknown.
        sent: mean rate of sent bytes between the latest readings; None if unknown.
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
    """Bytes that a rank sent to other replicas, and its host over its network."""

    per_step: float
    per_s: float
    host_per_s: float


@dataclass(frozen=True)
class Happened:
    """Event for display; `number` counts the events of a run from 0."""

    number: int
    time: float
    sentence: str
    trouble: bool


class LiveRun:
    """Follower of a run's directory, which only reads data added since the last poll.

    Every line of the leading rank is parsed. This is rank 0, or the furthest rank while rank 0 makes no steps. Only the
    latest few lines of other ranks are parsed, so their statistics are samples.

    Attributes:
        recent: latest steps of the leading rank, with a sentence about them.
        curve: losses of the whole run, from step `curve_from` on.
        members: the ranks of the current generation.
        goodput: the wall-clock time so far, divided into parts.
        events: the latest readable events. `troubles` are the latest failures, and `happened` counts the events of the
            whole run.
        metrics: the latest validation metrics. `transport` is the network transport of the ranks.
        carried: bytes that each emulated host's link sent and received, known at the end of an attempt.
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
        """Read new data; return True if there was any."""
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
        """True once the run has ended; it may be resumed."""
        return self.end is not None

    def late(self, now: float | None = None) -> bool:
        """True if the last step is so old that the run may have stopped."""
        steps = self.recent.steps
        if not steps or self.ended:
            return False
        usual_s = float(statistics.median(step["step_s"] for step in steps))
        return self._since_s(now) > max(_LATE_S, _LATE_STEPS * usual_s)

    def state(self, now: float | None = None) -> str:
        """Describe the state: running, ended with the reason, or the time since the last step."""
        if self.end is not None:
            return f"ended: {self.end.get('reason')}"
        if self.late(now):
            return f"no step for {self._since_s(now):,.0f} s: the run is waiting, was stopped, or crashed"
        return "running" if self.recent.steps else "starting"

    def _since_s(self, now: float | None) -> float:
        newest = max([self.recent.steps[-1]["time"], *(one.time for one in self.events)])
        return (time.time() if now is None else now) - float(newest)

    def ranks(self) -> list[RankNow]:
        """Return statistics of each rank's latest steps, by rank."""
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
            if line["step"] > self._newest_curve and line["loss"] is not None:  # without steps that are trained again
                if not self._newest_curve:
                    self.curve_from = line["step"]
                self._newest_curve = line["step"]
                self.curve.add(float(line["loss"]))

    def _look_at_others(self) -> bool:
        """Read the latest steps of the other ranks."""
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
        """Make the furthest rank the leading one if the current one makes no progress.

        Returns the new leader's steps since then.
        """
        now = self._ranks.get(self._lead)
        step, at = (now.step, now.time) if now else (0, 0.0)
        furthest = max(self._ranks, key=lambda rank: (self._ranks[rank].step, -rank))
        missed = self._ranks[furthest].step - step
        if missed <= 1:  # on accelerators a step's line is written after the next step
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
            except (KeyError, TypeError, ValueError, AttributeError):  # from another version, or edited by hand
                sentence = None
            self.total_steps = self.recent.total_steps or self.total_steps
            if event["event"] == "end":
                self.end, self.recent.total_steps = event, None  # nothing is left
            if sentence:
                one = Happened(self.happened, event["time"], sentence, event["event"] in TROUBLE)
                self.events.append(one)
                self.troubles.extend([one] if one.trouble else [])
                self.happened += 1
        return found

    def _note(self, event: dict[str, Any]) -> None:
        """Store the values of an event that the page shows in addition to its sentence."""
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
                self.run = Run(self.run.path)  # a resumed one may have another plan
                self.members.planned(self.run)
            except PacelineError:  # its files are being written, or come from another program
                pass
        self.began, self.end = self.began or event["time"], None
        if not _is_count(event.get("total_steps")):
            event.pop("total_steps", None)


class _Rank:
    """A rank's latest steps and machine readings."""

    def __init__(self) -> None:
        self.steps: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.parts_s: deque[tuple[float, ...]] = deque(maxlen=RECENT)  # part times of each step
        self.used: dict[str, float] = {}
        self.sent: Sent | None = None
        self._read: tuple[int, float] | None = None  # step and time of the latest reading

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
    """Set missing counts to 0; return True if all counts are integers."""
    return all(_is_count(line.setdefault(key, 0)) for key in _COUNTS)


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) < 2**53


def _now(number: int, rank: _Rank, newest: int, skew: float) -> RankNow:
    steps = rank.steps
    parts_s = list(map(sum, zip(*rank.parts_s, strict=True)))  # 0 of steps without times
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
MOST_RANKS = 4096  # that are followed


@dataclass
class Member:
    """A rank: its host, its state since a Unix time, and whether it is slow."""

    host: str
    state: State = "starts"
    since: float = 0.0
    slow: bool = False


class Members:
    """Ranks of a run by number, according to its events.

    Attributes:
        generation: number of times that the ranks have formed a new group.
    """

    def __init__(self, run: Run) -> None:
        self.generation = 0
        self.ranks: dict[int, Member] = {}
        self.planned(run)

    def planned(self, run: Run) -> None:
        """Set the plan's ranks, each on its host."""
        ranks = min(run.plan.ranks, MOST_RANKS)
        cluster = run.cluster
        each = cluster.ranks_per_host(run.plan.ranks) if cluster.devices else []
        hosts = chain.from_iterable(repeat(host.name, here) for host, here in zip(cluster.hosts, each, strict=False))
        names = dict(zip(range(ranks), hosts, strict=False))
        self.ranks = {rank: self.ranks.get(rank) or Member(names.get(rank, "")) for rank in range(ranks)}

    def told(self, event: dict[str, Any]) -> None:
        """Apply an event."""
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
            case "host_back":
                self._set(event["ranks"], "back", at)
            case "healed":
                self._set([event["rank"]], "in", at)
            case "scaled":
                self._set(event["ranks"], "left" if event["by"] < 0 else "back", at)
            case "slow_rank" | "slow_rank_over" if (member := self.ranks.get(event["rank"])) is not None:
                member.slow = event["event"] == "slow_rank"

    def take_part(self, rank: int) -> bool:
        """True if a rank takes part, or if no event has named it."""
        return rank not in self.ranks or self.ranks[rank].state == "in"

    def stepped(self, rank: int, at: float) -> None:
        """Record a rank's step. The rank then takes part, regardless of earlier events."""
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


_MOST_BYTES = 2**16  # bytes per poll: hundreds of lines
_READING = b'"use":'  # bytes per poll for lines with a machine reading, which are written once per second
_MOST_READINGS = 8


class NewestSteps:
    """Reader of the latest lines of a rank's steps.

    A poll parses only a few of the new lines, because a run of 64 ranks with steps of 10 ms writes 6,400 lines per
    second.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: int | None = None

    def look(self, most: int) -> tuple[list[dict[str, Any]], bool]:
        """Return new lines with machine readings, and then the latest `most` new lines.

        The second value is False if skipped lines may contain a reading.
        """
        added, unbroken = self._added()
        until = added.rfind(b"\n") + 1  # the last line is still being written
        if self._place is not None:
            self._place += until
        newest = added[:until].rsplit(b"\n", most + 1)
        readings = _lines_with(_READING, newest[0]) if len(newest) > most + 1 else []
        found = []
        for line in [*readings, *(newest[1:] if len(newest) > most + 1 else newest)]:
            # an invalid line was truncated by a crash, or by the start of this read
            if line and is_step(step := parsed(line)):
                found.append(step)
        return found, unbroken

    def _added(self) -> tuple[bytes, bool]:
        """Return the bytes since the last poll, and True if none were skipped."""
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


SHARE = 0.004  # of one core, so that `paceline watch` and the live page take at most 1 % of a 10 ms step
_LONGEST_S = 5.0


class Pace:
    """Time between polls: as requested, and longer if polls are expensive.

    Polls take at most `SHARE` of a core, measured by the CPU time of this process since the last wait. A wait lasts at
    most 5 s.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s, self._spent_s = every_s, time.process_time()

    def wait_s(self) -> float:
        """Seconds until the next poll."""
        before, self._spent_s = self._spent_s, time.process_time()
        return max(self.every_s, min((self._spent_s - before) / SHARE, _LONGEST_S))
