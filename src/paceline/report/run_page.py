"""The page of a run: headline, sentences, charts and events, from its directory's files."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import RunError
from paceline.extensions import ExtensionPoint
from paceline.job.spec import load_object
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info
from paceline.report import charts, figures
from paceline.report.figures import PARTS, RANK_FIGURES, SYNTHETIC, Bar, growth, mean_growth, parts_over_steps
from paceline.report.page import PAGE, Card, Chart, Row, not_by_paceline, write_page
from paceline.report.run_record import RunRecord, typical_parts
from paceline.run.record.goodput import USEFUL, Failure, Goodput
from paceline.run.record.progress import event_sentence
from paceline.run.record.run import WARM_UP_STEPS, Run, Speed, timed
from paceline.text import listed
from paceline.units import Shown, digits, percent, seconds, size

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
        bars = [Bar("", f"rank {rank}", parts) for rank, parts in self.parts_s.items()]
        label = " ".join([f"Median {self.noun} of each rank, part by part.", *self.sentences])
        return Chart("breakdown", figures.breakdown(bars, self.noun), label) if bars else None

    # Events, and gaps in the record

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


_MARKED = {  # events that a curve shows; after a restart there is a resume
    "nonfinite": "not finite",
    "spike": "spike",
    "corruption": "corruption",
    "checkpoint_damaged": "checkpoint damaged",
    "rewind": "rewind",
    "lost": "rank lost",
    "host_lost": "host lost",
    "healed": "healed",
    "recut": "re-cut",
    "resume": "resume",
}


@dataclass(frozen=True)
class PanelInfo:
    """Description of a panel of a run's page.

    Attributes:
        panel: import path of a function that takes a `RunRecord` and returns the charts that it has values for.
    """

    panel: str


_BUILT_IN = ("losses", "metrics", "speeds", "shares", "staleness", "memory")
PANELS = ExtensionPoint(
    "panel",
    "paceline.panels",
    PanelInfo,
    {name: PanelInfo(f"paceline.report.run_page:{name}") for name in _BUILT_IN},
    RunError,
)


def run_charts(record: RunRecord) -> list[Chart]:
    """All charts that the record has values for, in the order of the page.

    Those of installed packages come last.

    Raises:
        RunError: a panel of a package cannot be loaded, or fails; names it.
    """
    found: list[Chart] = []
    for name, info in PANELS.all().items():
        try:
            found += load_object(info.panel)(record)
        except Exception as error:
            if name in PANELS.built_in:
                raise
            raise RunError(
                f'the panel "{name}" of an installed package ({info.panel}) failed: {type(error).__name__}: {error}'
            ) from error
    return found


def losses(record: RunRecord) -> Iterator[Chart]:
    """Training and validation loss, over steps and over time."""
    steps = record.ranks[0]
    values = [s["loss"] for s in steps]
    clock_of = record.clock_of
    evaluated = [e for e in record.evaluations if "loss" in e["metrics"] and e["step"] in clock_of]
    each = charts.steps_per_point(len(values))
    note = f"Each point is the mean of {each:,} {record.noun}s." if each > 1 else ""
    places: dict[str, dict[int, float]] = {f"{record.noun}s": {s["step"]: s["step"] for s in steps}, "time": clock_of}
    for over, place in places.items():
        training = charts.Line("training", list(place.values()), values)
        held_out = charts.Line(
            "validation",
            [place[e["step"]] for e in evaluated],
            [e["metrics"]["loss"] for e in evaluated],
            charts.VERMILLION,
            marked=True,
        )
        figure = charts.lines(
            [training, held_out] if evaluated else [training],
            "seconds" if over == "time" else over,
            "loss",
            marks=[charts.Mark(place[step], text) for step, text in _marks(record).items()],
            log_if_wide=True,
        )
        terms = ["loss", "held_out"] if evaluated else ["loss"]
        title = f"Loss over {over}"
        yield Chart(f"loss-{over}", figure, f"{title}.", title, terms, note)


def _marks(record: RunRecord) -> dict[int, str]:
    """Notable events on the curve, by the first step after each."""
    steps, marks = record.ranks[0], dict[int, str]()
    for event in record.events:
        if event["event"] in _MARKED:
            after = next((s["step"] for s in steps if s["time"] >= event["time"]), steps[-1]["step"])
            text = _MARKED[event["event"]]
            marks[after] = f"{marks[after]}, {text}" if after in marks else text
    return marks


def metrics(record: RunRecord) -> Iterator[Chart]:
    """Every validation metric but the loss."""
    names = dict.fromkeys(name for e in record.evaluations for name in e["metrics"] if name != "loss")
    for number, name in enumerate(names):
        measured = [(e["step"], e["metrics"][name]) for e in record.evaluations if name in e["metrics"]]
        steps, values = zip(*measured, strict=True)
        line = charts.Line(name, steps, values, charts.GREEN, marked=True)
        label = f"{name} on validation samples; newest {digits(values[-1])}."
        figure = charts.lines([line], f"{record.noun}s", name)
        yield Chart(f"metric-{number}", figure, label, f"Validation: {name}", ["held_out"])


def speeds(record: RunRecord) -> list[Chart]:
    """Throughput, and the parts of rank 0's steps."""
    return [_throughput(record), _parts(record)] if timed(record.ranks[0]) else []


def _throughput(record: RunRecord) -> Chart:
    steps = timed(record.ranks[0])
    line = charts.Line(
        "throughput", [record.clock_of[s["step"]] for s in steps], [s["samples"] / s["step_s"] for s in steps]
    )
    figure = charts.lines([line], "seconds", "samples per second", middle=statistics.median)
    title = "Throughput over time"
    return Chart("throughput", figure, f"{title}, in samples per second.", title, ["throughput"])


def _parts(record: RunRecord) -> Chart:
    steps = timed(record.ranks[0])
    figure = parts_over_steps(
        [s["step"] for s in steps], {part: [s[f"{part}_s"] for s in steps] for part in PARTS}, record.noun
    )
    label = f"Time of rank 0’s {record.noun}s over the run, part by part."
    return Chart("parts", figure, label, "Where rank 0’s time went", list(PARTS))


def shares(record: RunRecord) -> Iterator[Chart]:
    """Each rank's share of the full batches, where shares followed the replicas' speeds."""
    if not any(event["event"] == "balance" for event in record.events):
        return
    series = []
    for rank, steps in record.ranks.items():
        batch = max(s["samples"] for s in steps)
        full = [s for s in steps if s["samples"] == batch > 0 and isinstance(s.get("local_samples"), int)]
        percent = [100 * s["local_samples"] / s["samples"] for s in full]
        colour = charts.SERIES[rank % len(charts.SERIES)]
        series.append(charts.Line(f"rank {rank}", [s["step"] for s in full], percent, colour))
    title = "Share of the batch of each rank"
    yield Chart("shares", charts.lines(series, "steps", "percent"), f"{title}, in percent.", title, ["share"])


def staleness(record: RunRecord) -> Iterator[Chart]:
    """Gradients of each worker by their staleness, where servers owned the parameters."""
    told = [event for event in record.events if event["event"] == "served"]
    series, sentences = [], []
    for number, (name, counts) in enumerate(_workers(told[-1]) if told else ()):
        by_steps = sorted((int(steps), int(times)) for steps, times in counts["staleness"].items())
        pushes = max(1, int(counts["pushes"]))
        percent = [100 * times / pushes for _, times in by_steps]
        colour = charts.SERIES[number % len(charts.SERIES)]
        series.append(charts.Line(name, [steps for steps, _ in by_steps], percent, colour, marked=True))
        sentences.append(f"{name}: {pushes:,} pieces, {size(int(counts['bytes']))} pushed, {counts['late']} too late")
    if series:
        title = "Staleness of the gradients of each worker"
        figure = charts.lines(series, "updates since the parameters were read", "percent of its gradients")
        yield Chart("staleness", figure, f"{title}, in percent.", title, ["staleness"], f"{'; '.join(sentences)}.")


def _workers(event: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Counts of each worker by name; of a damaged record those that are whole."""
    workers = event.get("workers")
    found = workers.items() if isinstance(workers, dict) else ()
    return sorted((name, counts) for name, counts in found if _is_whole(counts))


def _is_whole(counts: Any) -> bool:
    if not isinstance(counts, dict) or not isinstance(counts.get("staleness"), dict):
        return False
    steps = counts["staleness"]
    numbers = [counts.get(key) for key in ("pushes", "bytes", "late")]
    return all(isinstance(n, int) for n in (*numbers, *steps.values())) and all(map(str.isdecimal, steps))


def memory(record: RunRecord) -> Iterator[Chart]:
    """Memory of each rank, on the host and on its accelerator."""
    for curve in filter(None, (figure.curve for figure in RANK_FIGURES)):
        series = []
        for rank, steps in record.ranks.items():
            if read := [(s["step"], s["use"][curve.key] / 2**20) for s in steps if curve.key in s.get("use", {})]:
                at, used = zip(*read, strict=True)
                series.append(charts.Line(f"rank {rank}", at, used, charts.SERIES[rank % len(charts.SERIES)]))
        if series:
            figure = charts.lines(series, "steps", "MiB")
            yield Chart(curve.term, figure, f"{curve.title}, in MiB.", curve.title, [curve.term])


DOMINATES = 0.5  # of a step, from where communication is what a user should look at first


class SyncView:
    """The replicas of a run as the template shows them.

    `comm_share`: of a step, that communication takes; None where no step is timed.
    """

    def __init__(self, record: RunRecord, plan: Plan, comm_share: float | None) -> None:
        self.record, self.plan, self.comm_share = record, plan, comm_share
        self.sent = {rank: growth(steps, "wire_bytes") for rank, steps in record.ranks.items()}
        self.saved = {rank: growth(steps, "saved_bytes") for rank, steps in record.ranks.items()}
        self.errors = [
            (step["step"], step["use"]["compression_error"])
            for step in record.ranks.get(0, [])
            if "compression_error" in step.get("use", {})
        ]

    @property
    def shown(self) -> bool:
        """True if there are replicas that synchronise, and anything is known of it."""
        return self.plan.dp > 1 and (any(self.sent.values()) or bool(self._said))

    @property
    def sentences(self) -> list[str]:
        """The rule's messages, and a sentence if communication dominates the run."""
        return [*self._said, *self._dominance()]

    @property
    def _said(self) -> list[str]:
        told = [said for event in self.record.events if event["event"] == "sync" for said in event.get("said", [])]
        return list(dict.fromkeys(map(str, told)))

    def _dominance(self) -> Iterator[str]:
        if self.comm_share is None or self.comm_share < DOMINATES:
            return
        share = f"Communication takes {units.percent(self.comm_share)} of a step"
        if self.plan.inexact:
            yield f"{share}, also under this rule."
            return
        yield (
            f"{share}. Replicas send less with compress= (int8 about a quarter) or a sync= that agrees less often "
            "(local:8, diloco:30); paceline bench with one --plan for each measures whether that is faster here, and "
            "what it does to the loss."
        )

    @property
    def rows(self) -> list[Row]:
        """Figures of a mean step for the rank that sends most, with the links' totals."""
        errors = [error for _, error in self.errors]
        values = {
            "wire_bytes": _largest(self.sent) or None,
            "saved_bytes": _largest(self.saved) if errors else None,
            "compression_error": statistics.median(errors) if errors else None,
        }
        shown = ((figure, values.get(figure.name)) for figure in RANK_FIGURES)
        return [Row(figure.term, [figure.shown(value)]) for figure, value in shown if value is not None]

    @property
    def links(self) -> list[tuple[str, Shown, Shown]]:
        """Name, bytes sent and bytes received of each emulated host's link, over all attempts."""
        totals: dict[str, list[int]] = {}
        for event in self.record.events:
            for name, carried in _links_of(event):
                total = totals.setdefault(name, [0, 0])
                total[0] += carried["sent_bytes"]
                total[1] += carried["received_bytes"]
        return [(name, units.size(sent), units.size(received)) for name, (sent, received) in totals.items()]

    @property
    def charts(self) -> list[Chart]:
        """Bytes on the wire over the steps, and the error of compression."""
        return [*self._wire_chart(), *self._error_chart()]

    def _wire_chart(self) -> Iterator[Chart]:
        means = {rank: mean for rank, readings in self.sent.items() if (mean := mean_growth(readings))}
        if not means:
            return
        rank = max(means, key=lambda rank: means[rank])
        steps = [step for step, _, _ in self.sent[rank]]
        sent = [grown / passed / 1024 for _, passed, grown in self.sent[rank]]
        series = [charts.Line("sent", steps, sent, charts.VERMILLION)]
        if self.errors:
            saved = [grown / passed / 1024 for _, passed, grown in self.saved[rank]]
            whole = [a + b for a, b in zip(sent, saved, strict=True)]
            series.append(charts.Line("without compression", steps, whole, charts.GREY, dashed=True))
        title = f"Bytes on the wire, rank {rank}"
        figure = charts.lines(series, "steps", "KiB per step", log_if_wide=True)
        terms = ["wire", "saved"] if self.errors else ["wire"]
        yield Chart("wire", figure, f"{title}, in KiB per step.", title, terms)

    def _error_chart(self) -> Iterator[Chart]:
        if self.errors:
            steps, errors = zip(*self.errors, strict=True)
            figure = charts.lines([charts.Line("error", steps, errors, charts.PURPLE)], "steps", "relative error")
            label = "Relative error of compression over the steps."
            yield Chart("error", figure, label, "Error of compression", ["compression_error"])


def _largest(of_ranks: dict[int, list[tuple[int, int, float]]]) -> float | None:
    return max((mean for readings in of_ranks.values() if (mean := mean_growth(readings)) is not None), default=None)


def _links_of(event: dict[str, Any]) -> Iterator[tuple[str, dict[str, int]]]:
    links = event.get("links")
    if event["event"] == "links" and isinstance(links, dict):
        yield from links.items()


_STRETCHES = 60  # of the wall-clock, at most, in the curve
_STEPS = 4  # that a stretch holds at least, in the mean
_MOST_MARKED = 30  # failures that the curve names; more would hide it


class GoodputView:
    """Division of a run's wall-clock as the template shows it.

    Args:
        steps: number of steps that the run made.
    """

    def __init__(self, goodput: Goodput, steps: int) -> None:
        self.goodput, self._steps = goodput, steps

    @property
    def sentence(self) -> str:
        """Goodput, and the largest losses."""
        return f"Goodput is {self.goodput.sentence()}."

    @property
    def rows(self) -> list[Row]:
        """Seconds and share of each part that took any time."""
        wall_s = self.goodput.wall_s
        return [
            Row(f"wall_{part}", [seconds(s), percent(s / wall_s)], loud=part != USEFUL)
            for part, s in self.goodput.parts_s.items()
            if s > 0
        ]

    @cached_property
    def chart(self) -> Chart | None:
        """Goodput over the run, with the failures; None where no time passed."""
        if not self.goodput.wall_s:
            return None
        points = self.goodput.over_time(max(1, min(_STRETCHES, self._steps // _STEPS)))
        moments = [0.0, *(second for second, _ in points)]
        middles = [(before + after) / 2 for before, after in pairwise(moments)]
        line = charts.Line("goodput", middles, [100 * share for _, share in points], charts.GREEN)
        marks = [charts.Mark(failure.at_s, failure.text) for failure in self._marked]
        figure = charts.lines([line], "seconds of wall-clock", "goodput, %", marks=marks)
        figure.y.span = (0, 105)
        told = [f"{failure.text} after {seconds(failure.at_s)}." for failure in self._marked]
        return Chart("goodput", figure, " ".join([self.sentence, *told]))

    @property
    def _marked(self) -> Sequence[Failure]:
        return self.goodput.failures[:_MOST_MARKED]
