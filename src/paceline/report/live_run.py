"""Live run: newest steps by rank, losses, and events of a run that trains."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.meter import PARTS
from paceline.report.run_record import is_event, is_step, ranks_of
from paceline.training.record.progress import TROUBLE, NewLines, RecentSteps, event_sentence
from paceline.training.record.run import Run

RECENT = 50  # steps of each rank
EVENTS = 100
CURVE = 512  # losses of a curve, at most
_TAIL_BYTES = 2**16  # of what ranks beside the first had written before
# without a step for so many times the usual step, and so many seconds, a run may have stopped
_LATE_STEPS, _LATE_S = 20.0, 10.0
_COUNTS = ("epoch", "local_samples")  # of a step's line, that runs of some kinds leave out


@dataclass
class Curve:
    """Losses of a whole run, few enough to draw.

    When they are too many, each two become their mean.
    """

    each: int = 1  # steps of a value
    values: list[float] = field(default_factory=list)
    _sum: float = 0.0
    _count: int = 0

    def add(self, loss: float) -> None:
        """Take in the loss of the next step."""
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < self.each:
            return
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.values) >= CURVE:
            self.values = [(one + other) / 2 for one, other in zip(self.values[::2], self.values[1::2], strict=False)]
            self.each *= 2


@dataclass(frozen=True)
class RankNow:
    """Newest steps of a rank, in figures.

    Attributes:
        step: its newest step; `behind`: by how many steps the newest of all is later.
        step_s: the median of its newest steps, in seconds.
        parts: share of each of `PARTS` in them; they sum to 1.
        samples: its own of the newest whole batch.
        memory_bytes: of its process, or of its device; None if it was not read.
    """

    rank: int
    step: int
    behind: int
    step_s: float
    parts: dict[str, float]
    samples: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Happened:
    """An event for people."""

    time: float
    sentence: str
    trouble: bool


class LiveRun:
    """A run's directory, followed. Only what was added since the last look is read.

    Attributes:
        recent: of rank 0, with the sentence about them.
        curve: losses of the whole run.
        events: the newest, for people.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.recent, self.curve = run, RecentSteps(None), Curve()
        self.events: deque[Happened] = deque(maxlen=EVENTS)
        self.began: float | None = None
        self._end: dict[str, Any] | None = None
        self._lines = {0: NewLines(run.path / "steps" / "rank-0.jsonl")}
        self._steps: dict[int, deque[dict[str, Any]]] = {0: deque(maxlen=RECENT)}
        self._used: dict[int, dict[str, float]] = {}  # of each rank the newest reading, which is one in a second
        self._event_lines = NewLines(run.path / "events.jsonl")
        self._newest_curve = 0

    def look(self) -> bool:
        """Read what was added; True if there was something."""
        return any([self._look_at_events(), *(self._look_at(rank) for rank in self._ranks())])

    @property
    def ended(self) -> bool:
        """True once the run has ended; it may be resumed."""
        return self._end is not None

    def late(self, now: float | None = None) -> bool:
        """True if no step has come for so long that the run may have stopped."""
        steps = self.recent.steps
        if not steps or self.ended:
            return False
        usual_s: float = sorted(step["step_s"] for step in steps)[len(steps) // 2]
        return self._since_s(now) > max(_LATE_S, _LATE_STEPS * usual_s)

    def state(self, now: float | None = None) -> str:
        """In words: running, ended with the reason, or for how long no step has come."""
        if self._end is not None:
            return f"ended: {self._end.get('reason')}"
        if self.late(now):
            return f"no step for {self._since_s(now):,.0f} s: it waits, was stopped, or crashed"
        return "running" if self.recent.steps else "starting"

    def _since_s(self, now: float | None) -> float:
        newest = max([self.recent.steps[-1]["time"], *(one.time for one in self.events)])
        return (time.time() if now is None else now) - float(newest)

    def ranks(self) -> list[RankNow]:
        """Newest steps of each rank, in figures, by rank."""
        newest = max((steps[-1]["step"] for steps in self._steps.values() if steps), default=0)
        return [_now(rank, steps, newest, self._used[rank]) for rank, steps in sorted(self._steps.items()) if steps]

    def _ranks(self) -> Iterator[int]:
        for rank in sorted(ranks_of(self.run)):
            if rank not in self._lines:
                self._lines[rank] = NewLines(self.run.path / "steps" / f"rank-{rank}.jsonl")
                self._lines[rank].skip(_TAIL_BYTES)
                self._steps[rank] = deque(maxlen=RECENT)
            yield rank

    def _look_at(self, rank: int) -> bool:
        found = False
        for line in self._lines[rank]:
            if not is_step(line) or not all(type(line.setdefault(key, 0)) is int for key in _COUNTS):
                continue
            found = True
            self._steps[rank].append(line)
            self._used[rank] = line.get("use", self._used.get(rank, {}))
            if rank == 0:
                self.recent.add(line)
                self._to_curve(line)
        return found

    def _to_curve(self, step: dict[str, Any]) -> None:
        if step["step"] > self._newest_curve and step["loss"] is not None:  # those trained again stand there already
            self._newest_curve = step["step"]
            self.curve.add(float(step["loss"]))

    def _look_at_events(self) -> bool:
        found = False
        for event in self._event_lines:
            if not is_event(event):
                continue
            found = True
            if event["event"] in ("start", "resume"):
                if self.began is not None:
                    self.run = Run(self.run.path)  # a resumed one may have another plan
                self.began, self._end = self.began or event["time"], None
                if type(event.get("total_steps")) is not int:
                    event.pop("total_steps", None)
            try:
                self.recent.told(event)
                sentence = event_sentence(event)
            except (KeyError, TypeError, ValueError, AttributeError):  # of another version, or made by hand
                sentence = None
            if event["event"] == "end":
                self._end, self.recent.total_steps = event, None  # nothing is left
            if sentence:
                self.events.append(Happened(event["time"], sentence, event["event"] in TROUBLE))
        return found


def _now(rank: int, steps: deque[dict[str, Any]], newest: int, used: dict[str, float]) -> RankNow:
    timed = [step for step in steps if step["step_s"] > 0]
    parts = {part: sum(step.get(f"{part}_s", 0.0) for step in timed) for part in PARTS}
    whole = sum(parts.values()) or 1.0
    times = sorted(step["step_s"] for step in timed) or [0.0]
    memory = used.get("gpu_memory_bytes", used.get("memory_bytes"))
    whole_batch = max(step["samples"] for step in steps)
    newest_whole = next(step for step in reversed(steps) if step["samples"] == whole_batch)
    return RankNow(
        rank,
        steps[-1]["step"],
        newest - steps[-1]["step"],
        times[len(times) // 2],
        {part: seconds / whole for part, seconds in parts.items()},
        newest_whole["local_samples"],
        None if memory is None else int(memory),
    )
