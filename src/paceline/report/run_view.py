"""The page of a run: headline, sentences, charts and events, from its directory's files."""

from __future__ import annotations

import statistics
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import RunError
from paceline.planning.sync_info import sync_info
from paceline.report import charts
from paceline.report.definitions import PARTS, SYNTHETIC
from paceline.report.goodput_view import GoodputView
from paceline.report.page import PAGE, Card, Chart, not_by_paceline, write_page
from paceline.report.parts import typical_parts
from paceline.report.run_charts import run_charts
from paceline.report.run_record import RunRecord
from paceline.report.sync_view import SyncView
from paceline.report.words import listed
from paceline.run.record.progress import event_sentence
from paceline.run.record.run import WARM_UP_STEPS, Run, Speed, timed

TROUBLE = (
    "nonfinite",
    "restart",
    "lost",
    "host_lost",
    "host_back",
    "scaled",
    "healed",
    "checkpoint_damaged",
    "checkpoint_failed",
    "corruption",
    "lines_lost",
    "rewind",
    "resume",
    "slow_rank",
    "spike",
    "unauthenticated",
    "balance",
    "recut",
)
TARGETS = ("metric_above", "loss_below")  # stop rules that are reached, not used up
WAITED_FOR = 0.03  # of a step; less waiting than this is not worth a sentence
EVENTS = 100  # as many are listed; the evaluations among them stand in a chart as well


def write_run_page(run: Run) -> Path:
    """Write `report.html` about a run into its directory.

    Raises:
        RunError: the run has not finished a step, or the file cannot be written.
    """
    with not_by_paceline(run.path, "run"):
        view = RunView(run)
        return write_page(
            run.path / PAGE,
            "run.html.j2",
            facts={"run": str(run.path.resolve()), "plan": view.record.plan, "machine": view.record.machine},
            environment=view.record.environment,
            view=view,
            charts=[*run_charts(view.record), *view.sync.charts],
        )


class RunView:
    """A run as the template shows it.

    Raises:
        RunError: rank 0 of the run has not finished a step.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.record = run, RunRecord.read(run)
        if not self.record.ranks.get(0):
            raise RunError(
                f"{run.path} holds no finished step of rank 0, so there is nothing to show. One step is enough "
                "for the loss; throughput "
                f"and the breakdown need {WARM_UP_STEPS + 1}, as the first {WARM_UP_STEPS} are warm-up. "
                + " ".join(self.record.gaps)
            )
        self.steps, self.events = self.record.ranks[0], self.record.events
        self.timed, self.noun = timed(self.steps), self.record.noun
        self.parts = list(PARTS)
        self.began = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.steps[0]["time"]))
        self.start = self._newest("start", "resume") or {}
        newest = self._newest("start", "resume", "end")
        self.end = newest if newest is not None and newest["event"] == "end" else None
        self.synthetic = bool(self.start.get("synthetic", False))

    def _newest(self, *kinds: str) -> dict[str, Any] | None:
        return next((e for e in reversed(self.events) if e["event"] in kinds), None)

    # The headline

    @property
    def verdict(self) -> str:
        """The run's progress and end, in one sentence."""
        newest = self.steps[-1]["step"]
        steps = units.count(newest, self.noun)
        if self.end is None:
            return f"{steps} so far: the run has not ended, or it crashed."
        took, reason = units.seconds(self._elapsed_s), str(self.end.get("reason"))
        if self.end.get("interrupted"):
            return f"Interrupted by {reason} after {steps} in {took}."
        if reason.startswith(TARGETS):
            return f"Reached its target ({reason.partition(': ')[2]}) after {steps} in {took}."
        return f"Trained {steps} in {took} ({reason})."

    @property
    def cards(self) -> list[Card]:
        """The figures of the headline."""
        too_few, who = f"needs {WARM_UP_STEPS + 1} {self.noun}s", units.count(len(self.record.ranks), "rank")
        if sync_info(self.run.plan.sync).served:
            who = units.count(self.run.plan.dp, "worker")
        speed, note = self.speed, f"on {who}"
        if speed is not None and speed.overall_if_other is not None:
            note += f"; {units.rate(speed.overall_if_other)} overall"
        cards = [Card("throughput", too_few if speed is None else units.rate(speed.throughput), note)]
        reached = self.end is not None and str(self.end.get("reason")).startswith(TARGETS)
        until = f"from the first {self.noun}" if self.end is not None else f"until the newest {self.noun}"
        cards.append(Card("time_to_target" if reached else "training_time", units.seconds(self._elapsed_s), until))
        if speed is not None:
            over = f"over {units.count(len(self.timed), self.noun)}"
            cards.append(Card(f"{self.noun}_time", units.seconds(speed.step_s), over))
        metrics: dict[str, float] = (self._newest("evaluation") or {"metrics": {}})["metrics"]
        name = next((n for n in metrics if n != "loss"), None)
        if name is not None:
            return [*cards, Card("held_out", units.number(metrics[name]), f"{name}, newest")]
        losses = [s["loss"] for s in self.steps if s["loss"] is not None]
        return [*cards, Card("loss", units.number(losses[-1]) if losses else "never finite", f"newest {self.noun}")]

    @property
    def speed(self) -> Speed | None:
        """The run's speed; None if too few steps were made."""
        ended_s = float(self.end["elapsed_s"]) if self.end is not None and "elapsed_s" in self.end else 0.0
        return Speed.of(self.steps, ended_s)

    @property
    def _elapsed_s(self) -> float:
        if self.end is not None and "elapsed_s" in self.end:
            return float(self.end["elapsed_s"])
        return self.record.clock_s[-1]

    # Where the time goes

    @cached_property
    def parts_s(self) -> dict[int, dict[str, float]]:
        """Seconds of each part in the median step, by rank; without ranks that lack one."""
        found = {rank: typical_parts(steps) for rank, steps in self.record.ranks.items()}
        return {rank: parts for rank, parts in found.items() if parts is not None}

    @property
    def sentences(self) -> list[str]:
        """Sentences on where the time goes and which rank the others wait for."""
        each = list(self.parts_s.values())
        if not each or self.speed is None:
            return []
        step_s = statistics.fmean(sum(parts.values()) for parts in each)
        shares = {part: statistics.fmean(parts[part] for parts in each) / step_s for part in PARTS}
        largest = sorted(shares.items(), key=lambda x: -x[1])
        named = [f"{units.percent(share)} {PARTS[part].name}" for part, share in largest if share >= 0.005]
        took = units.seconds(self.speed.step_s)
        return [f"A {self.noun} takes {took} in the median: {listed(named)}.", *self._slow_rank(step_s)]

    @cached_property
    def sync(self) -> SyncView:
        """The known facts about the synchronisation of replicas."""
        each = list(self.parts_s.values())
        step_s = sum(sum(parts.values()) for parts in each)
        return SyncView(self.record, self.run.plan, sum(parts["comm"] for parts in each) / step_s if step_s else None)

    @cached_property
    def goodput(self) -> GoodputView:
        """Division of the run's wall-clock."""
        return GoodputView(self.record.goodput, len(self.steps))

    def _slow_rank(self, step_s: float) -> list[str]:
        waits = {rank: parts["imbalance"] for rank, parts in self.parts_s.items()}
        if len(waits) < 2 or max(waits.values()) < WAITED_FOR * step_s:
            return []
        slow = min(waits, key=lambda rank: waits[rank])
        others = statistics.fmean(wait for rank, wait in waits.items() if rank != slow)
        if waits[slow] > others / 3:
            return [
                (
                    f"The ranks wait for each other in turn, up to {units.seconds(max(waits.values()))} a step: no "
                    "rank is always the slow one."
                )
            ]
        waiting = f"{units.seconds(others)} of each step, {units.percent(others / step_s)}"
        return [f"The others wait for rank {slow}: {waiting}. A faster rank {slow} makes all of them faster."]

    @property
    def breakdown(self) -> Chart | None:
        """The median step of each rank; None without steps after the warm-up."""
        bars = [charts.Bar("", f"rank {rank}", parts) for rank, parts in self.parts_s.items()]
        label = " ".join([f"Median {self.noun} of each rank, part by part.", *self.sentences])
        return Chart("breakdown", charts.breakdown(bars, self.noun), label) if bars else None

    # What happened, and what is not known

    @property
    def warnings(self) -> list[str]:
        """Synthetic data, and reasons for everything that could not be drawn."""
        notes = [*([SYNTHETIC] if self.synthetic else []), *self.record.gaps]
        if not self.timed:
            notes.append(
                f"Throughput, {self.noun} time and the breakdown are not shown: they need {WARM_UP_STEPS + 1} timed "
                f"{self.noun}s, as the first {WARM_UP_STEPS} are warm-up, and this run has {len(self.steps)}."
            )
        if not any("use" in s for steps in self.record.ranks.values() for s in steps):
            notes.append("Memory is not shown: no reading of it was written.")
        return notes

    @property
    def happened(self) -> list[tuple[str, str, bool]]:
        """Time, sentence and trouble flag of each event for people; checkpoints are only counted."""
        told = [
            (f"{event['time'] - self.events[0]['time']:,.1f} s", sentence, event["event"] in TROUBLE)
            for event in self.events
            if (sentence := self._sentence(event)) is not None
        ]
        if len(told) > EVENTS:
            told = [("", f"{len(told) - EVENTS:,} earlier events are in events.jsonl", False), *told[-EVENTS:]]
        if saved := [e for e in self.events if e["event"] == "checkpoint_saved"]:
            newest = f"the newest at {self.noun} {saved[-1].get('step')}"
            told.append(("", f"{units.count(len(saved), 'checkpoint')} saved, {newest}", False))
        return told

    def _sentence(self, event: dict[str, Any]) -> str | None:
        try:
            match event["event"]:
                case "start":
                    return f"started with plan {event.get('plan')}, {event.get('parameters', 0):,} parameters"
                case "end":
                    return f"ended at {self.noun} {event.get('step')}: {event.get('reason')}"
            return event_sentence(event)
        except (KeyError, TypeError, ValueError):
            return f"{event['event']} (its line is not as paceline writes it)"
