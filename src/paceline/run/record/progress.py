"""Live progress of a run: loss, throughput, remaining time, and step time by part."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.engine.meter import PARTS
from paceline.files import LINE_LIMIT, opened_to_read
from paceline.text import printable
from paceline.units import clock, count, size

if TYPE_CHECKING:
    from paceline.engine.engine import StepResult

LINE_EVERY_S = 5.0  # seconds between progress lines if the output is not a terminal
# limits in days: from the first, the remaining time is shown in days; above the second, it is not shown
_COUNTED_IN_DAYS, _IN_SIGHT_DAYS = 2, 365
_TOO_OFTEN = "it was lost too often within an hour, or cannot be started."
LEFT_OUT = f"It is left out: {_TOO_OFTEN}"
# events that are shown in color
TROUBLE = (
    "balance",
    "coordinator",
    "lost",
    "host_lost",
    "host_left",
    "checkpoint_damaged",
    "checkpoint_failed",
    "corruption",
    "nonfinite",
    "recut",
    "restart",
    "slow_rank",
    "spike",
    "unauthenticated",
    "tracker",
)


@dataclass
class RecentSteps:
    """The newest steps of a run, and a one-line summary of them."""

    total_steps: int | None
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=50))
    slow: str = ""  # text that lists slow replicas, which have a smaller share of the batch

    def told(self, event: dict[str, Any]) -> None:
        """Update the summary from an event."""
        if event["event"] in ("start", "resume"):
            self.total_steps, self.slow = event.get("total_steps", self.total_steps), ""
        if event["event"] == "balance":
            self.slow = ", ".join(f"{_straggler(slow)} at {slow['speed']:.2f}" for slow in event["slow"])

    def add(self, record: dict[str, Any]) -> None:
        """Add a step's record."""
        self.steps.append(record)

    @property
    def step(self) -> int:
        """Number of the newest step."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    def sentence(self) -> str:
        """Return a summary of the newest steps.

        Example: `epoch 3 · step 120/480 · loss 0.1234 · 5,012 samples/s · 0:12 left · 71 % compute, 18 %
        comm, 6 % data`.
        """
        if not self.steps:
            return "starting"
        newest = self.steps[-1]
        words = [
            f"epoch {newest['epoch'] + 1}",
            f"step {self.step:,}" + (f"/{self.total_steps:,}" if self.total_steps else ""),
        ]
        words.append("loss not finite" if self.loss is None else f"loss {self.loss:.4f}")
        if (speed := self.samples_per_s) is not None:
            words.append(f"{speed:,.0f} samples/s")
            if self.left_s is not None:
                words += _time_left(self.left_s)
            words += [f"slow: {self.slow}"] if self.slow else []
            # the longest text comes last, because a narrow terminal cuts off the end
            words.append(_where_time_goes(self._timed))
        return " · ".join(words)

    @property
    def loss(self) -> float | None:
        """Mean of the newest ten finite losses; None if there are none."""
        losses = [step["loss"] for step in self.steps if step["loss"] is not None]
        return statistics.fmean(losses[-10:]) if losses else None

    @property
    def step_s(self) -> float | None:
        """Median step time in seconds; None before the first timed step."""
        return statistics.median(step["step_s"] for step in self._timed) if self._timed else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second; None before the first timed step."""
        # take the median, because an epoch's last step may have fewer samples
        samples = statistics.median(step["samples"] for step in self._timed) if self._timed else 0.0
        return samples / self.step_s if self.step_s else None

    @property
    def left_s(self) -> float | None:
        """Remaining training time in seconds; None if unknown."""
        return self.step_s * (self.total_steps - self.step) if self.total_steps and self.step_s else None

    @property
    def _timed(self) -> list[dict[str, Any]]:
        return [step for step in self.steps if step["step_s"] > 0]


class PlainProgress:
    """Progress line every few seconds, printed by rank 0 under another launcher."""

    def __init__(self, total_steps: int | None) -> None:
        self.recent = RecentSteps(total_steps)
        self._printed_at = time.monotonic()

    def step(self, result: StepResult, epoch: int) -> None:
        """Add a step; print a line if due."""
        timing = result.timing
        parts = dict(zip((f"{p}_s" for p in PARTS), timing.parts_s, strict=True)) if timing else {}
        loss = result.loss if result.problem is None else None
        self.recent.add(
            {
                "step": result.step,
                "epoch": epoch,
                "loss": loss,
                "samples": result.samples,
                "step_s": timing.step_s if timing else 0.0,
                **parts,
            }
        )
        if time.monotonic() - self._printed_at >= LINE_EVERY_S:
            self._printed_at = time.monotonic()
            print(self.recent.sentence(), file=sys.stderr, flush=True)

    def event(self, event: dict[str, Any]) -> None:
        """Print an event that the user should see."""
        self.recent.told(event)
        if sentence := _shown(event):
            print(printable(sentence), file=sys.stderr, flush=True)


class LiveProgress:
    """Live progress line of a run, read from its files.

    If the output is not a terminal, a plain line is printed every few seconds. The launcher draws the line, so drawing
    takes no time on a rank.
    """

    def __init__(self, run: Path, console: Console) -> None:
        self.console = console
        self.steps = NewLines(run / "steps" / "rank-0.jsonl")
        self.events = NewLines(run / "events.jsonl")
        self.recent = RecentSteps(None)
        self._printed_at, self._printed_step = time.monotonic(), 0
        self._live = Progress(
            BarColumn(bar_width=10),
            TextColumn("{task.description}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._live.add_task("starting", total=None)

    def __enter__(self) -> LiveProgress:
        self.steps.skip()
        # existing events are from an earlier attempt or an earlier coordinator, so do not show them
        for event in self.events:
            self.recent.told(event)
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.tick()
        if self.console.is_terminal:
            self._live.stop()

    def tick(self) -> None:
        """Read new records and show them; called several times a second."""
        for event in self.events:
            self._event(event)
        for step in self.steps:
            self.recent.add(step)
        if self.console.is_terminal:
            self._live.update(
                self._task,
                description=self.recent.sentence(),
                completed=self.recent.step,
                total=self.recent.total_steps,
            )
            self._live.refresh()
        elif self.recent.step != self._printed_step and time.monotonic() - self._printed_at >= LINE_EVERY_S:
            self._printed_at, self._printed_step = time.monotonic(), self.recent.step
            self.console.print(self.recent.sentence(), highlight=False)

    def _event(self, event: dict[str, Any]) -> None:
        self.recent.told(event)
        if sentence := _shown(event):
            self.console.print(
                printable(sentence),
                style="yellow" if event["event"] in TROUBLE else None,
                highlight=False,
                markup=False,
            )


def _shown(event: dict[str, Any]) -> str | None:
    # the rank that lost lines prints this event itself
    return None if event["event"] == "lines_lost" else event_sentence(event)


class NewLines:
    """Lines added to a JSON-lines file since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0

    def skip(self, but_bytes: int = 0) -> None:
        """Skip existing lines, except the last `but_bytes` bytes."""
        self._place = max(self.path.stat().st_size - but_bytes, 0) if self.path.exists() else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # the file may not exist yet, or may not be a regular file
        with suppress(OSError), opened_to_read(self.path) as file:
            file.seek(self._place)
            while line := file.readline(LINE_LIMIT):
                if not line.endswith(b"\n") and len(line) < LINE_LIMIT:
                    return  # the line is incomplete
                self._place += len(line)
                if (found := parsed(line)) is not None:
                    yield found


def parsed(line: bytes) -> Any:
    """Parse a line of JSON; return None for an invalid line.

    A crash can truncate a line.
    """
    with suppress(msgspec.DecodeError, ValueError, RecursionError):
        return msgspec.json.decode(line)  # several times as fast as `json`, which matters for long records
    with suppress(ValueError, RecursionError):
        return json.loads(line)  # unlike msgspec, `json` accepts NaN, which a metric may be
    return None


_MUCH_READ = 1.1  # samples read per sample used beyond which reading is worth a sentence
_SENTENCES = {
    "transport": "the ranks communicate over {transport}: {reason}",
    "resume": "resumed at step {step}",
    "checkpoint_damaged": "{reason}; trying the previous checkpoint",
    "slow_rank_over": (
        "rank {rank} is as fast as the others again at step {step}; it had been slow since step {since_step}"
    ),
    "lines_lost": "{lines} lines of {file} are lost, because writing to the disk failed; it works again",
    "unauthenticated": "{connections} connections to the ranks' ports did not prove the run's key and were closed",
    "tracker": 'tracker "{name}" {said}',
    "host_back": "host {host} (number {number}) has joined; its ranks are started",
    "host_left": "host {host} (number {number}) has left; start the same command there to add the host again",
    "coordinator": "{by} is the coordinator now, in place of {lost}",
    "went_back": "continuing from step {step}, kept in memory: {lost_steps} steps are repeated",
    "healed": "rank {rank} is back at step {step}",
}


# raised for an event that another version has written, or that was edited by hand
UNKNOWN_EVENT = (KeyError, TypeError, ValueError, AttributeError)


def event_sentence(event: dict[str, Any]) -> str | None:
    """Return an event as a sentence for the user; None for events without a text.

    Example: `step 120: validation loss 0.1021, accuracy 0.9722`.
    """
    if (sentence := _SENTENCES.get(event["event"])) is not None:
        return sentence.format_map(event)
    match event["event"]:
        case "sync" | "loss" | "packed" | "weights":
            return "; ".join(event["said"])
        case "stream" if event["said"]:
            return "; ".join(event["said"])
        case "stream_read" if event.get("read_again"):
            seconds = f"{event['read_again_s']:.3g} s"
            return f"{event['read_again']} samples were read again in {seconds} to resume in the stream"
        case "stream_read" if event["read_per_used"] > _MUCH_READ:
            return (
                f"step {event['step']}: each rank has read {event['read_per_used']:.3g} samples per sample used; a "
                f"resume repeats up to {event['resume_s']:.3g} s of reading"
            )
        case "evaluation" | "test" as kind:
            return f"step {event['step']}: {'test' if kind == 'test' else 'validation'} " + ", ".join(
                f"{name} {value:.4f}" for name, value in event["metrics"].items()
            )
        case "checkpoint_failed":
            tries = f"{event['failures']} of at most {event['max_failures']} consecutive failures"
            return f"{event['reason']} Training continues to the next checkpoint ({tries})."
        case "slow_rank":
            times = (
                f"{1e3 * event['busy_s']:.3g} ms of work per step, {1e3 * event['others_busy_s']:.3g} ms on the others"
            )
            host = f" (host {event['host']})" if event["host"] else ""
            found = [f"its device lowers the clock ({reason})" for reason in event.get("lowers_clock", ())]
            if faults := sum(event.get("device", {}).values()):
                found.append(f"a check of its device found {count(faults, 'wrong value')}: train without this device")
            return "; ".join(
                [
                    f"rank {event['rank']}{host} has taken {event['ratio']:.1f} times as long as the others since step "
                    f"{event['since_step']}: {times}",
                    *found,
                ]
            )
        case "balance" if event["slow_changed"]:
            return _sentence_of_balance(event)
        case "recut":
            return _sentence_of_recut(event)
        case "corruption":
            tensors = ", ".join(event["tensors"]) + (f" and {event['more']} more" if event["more"] else "")
            faults = sum(event.get("device", {}).values())
            advice = "If this happens again, check the memory of that host"
            if faults:
                advice = f"A check of its device found {count(faults, 'wrong value')}: train without this device"
            return (
                f"step {event['step']}: rank {event['rank']} (host {event['host']}) had values of {tensors} "
                f"that differ from most ranks; its state is now that of rank {event['healed_from']}. {advice}"
            )
        case "nonfinite" | "spike" if event["policy"] == "skip":
            return f"{event['problem']}; the update is skipped, as the job requests"
        case "nonfinite" | "spike":
            return str(event["problem"])
        case "rewind":
            kept = f", kept {'in memory' if event['kept'] == 'memory' else 'on disk'}" if event.get("kept") else ""
            return f"went back from step {event['from_step']} to step {event['to_step']}{kept}; that batch is skipped"
        case "lost":
            stack = f"\n{event['stack']}" if event["stack"] else ""
            if event.get("ends"):
                return f"{event['reason']}; the run ends: {_TOO_OFTEN}{stack}"
            others = "the others wait for it" if event.get("waits") else "the others go on"
            if event.get("ending"):
                return f"{event['reason']}; {others} to the end of the run{stack}"
            then = "It is started again." if event["again"] else LEFT_OUT
            return f"{event['reason']}; {others}. {then}{stack}"
        case "host_lost":
            waits_s = event.get("waits_s")
            waits = f"the others wait for it, {waits_s:g} s at most" if waits_s else "the run cannot go on without it"
            others = "the others go on" if waits_s is None else waits
            back = (
                "It is started again."
                if event.get("revived")
                else "Start the same command there to add the host again."
            )
            return f"{event['reason']}; {others}. {back if event['again'] else LEFT_OUT}"
        case "scaled":
            return _sentence_of_scaled(event)
        case "not_mirrored":
            return (
                f"ranks keep no copies of each other's state: copies need {size(event['wanted_bytes'])} more memory on "
                f"a machine, and {size(event['free_bytes'])} is free. If a rank is lost, all ranks resume from the "
                "newest checkpoint"
            )
        case "restart":
            return f"{event['reason']} Starting again, attempt {event['attempt'] + 1}."
    return None


def _sentence_of_balance(event: dict[str, Any]) -> str:
    shares = f"from step {event['step']} on: {', '.join(map(str, event['shares']))} samples"
    if not event["slow"]:
        return f"the shares of the batch follow the replicas' speeds {shares}"
    slow = [
        f"{_straggler(slow)} has computed at {slow['speed']:.2f} of the usual speed since step "
        f"{slow['since_step']} and gets {slow['share']:.1%} of the batch"
        for slow in event["slow"]
    ]
    return f"{'; '.join(slow)} (shares {shares})"


def _sentence_of_scaled(event: dict[str, Any]) -> str:
    numbers, host = event["ranks"], event["host"]
    ranks = _numbered("rank", numbers)
    who, one = (f"host number {host} with its {ranks}", True) if host else (ranks, len(numbers) == 1)
    if event["by"] < 0:
        return f"{who} {'has' if one else 'have'} left, as `paceline scale` requested; the others go on"
    return f"{who} {'may join' if host else 'is started' if one else 'are started'}, as `paceline scale` requested"


def _sentence_of_recut(event: dict[str, Any]) -> str:
    ranks, hosts = event["ranks"], event["hosts"]
    who = _numbered("rank", ranks)
    where = f" ({_numbered('host', hosts)})" if any(hosts) else ""
    slow = f"computed {event['share']:.0%} of the pipeline's time since step {event['since_step']}"
    begin = f"after step {event['step']} stages begin at {event['cut']} instead of {event['cut_before']}"
    return f"{who}{where} {slow}; {begin}, which is expected to save {event['gain']:.0%} of each step"


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _straggler(slow: dict[str, Any]) -> str:
    first, last = slow["ranks"]
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    host = f", host {slow['host']}" if slow["host"] else ""
    return f"replica {slow['replica']} ({ranks}{host})"


def _time_left(seconds: float) -> list[str]:
    days = seconds / 86_400
    if days > _IN_SIGHT_DAYS:
        return []
    return [f"{days:.0f} days left" if days >= _COUNTED_IN_DAYS else f"{clock(seconds)} left"]


def _where_time_goes(steps: list[dict[str, Any]]) -> str:
    totals = {name: sum(s.get(f"{name}_s", 0.0) for s in steps) for name in PARTS}
    whole = sum(totals.values()) or 1.0
    shares = {name: round(100 * t / whole) for name, t in totals.items()}
    largest = sorted(shares.items(), key=lambda x: -x[1])[:3]
    return ", ".join(f"{share} % {name}" for name, share in largest if share)
