"""Page of a run: headline, sentences, charts and events, read from the run's directory."""

from __future__ import annotations

import itertools
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from paceline.report.figures import (
    PARTS,
    RANK_FIGURES,
    SYNTHETIC,
    TARGETS,
    Bar,
    growth,
    mean_growth,
    parts_over_steps,
    reason_words,
)
from paceline.report.page import PAGE, Card, Chart, Row, not_by_paceline, write_page
from paceline.report.run_record import RunRecord, typical_parts
from paceline.run.record.goodput import USEFUL, Goodput
from paceline.run.record.memory import table_of
from paceline.run.record.progress import event_sentence
from paceline.run.record.run import HARNESS, WARM_UP_STEPS, Run, Speed, lost_samples, read_lines, timed
from paceline.run.record.utilization import utilization
from paceline.text import listed, printable
from paceline.units import Shown, digits, percent, seconds, size

TROUBLE = (
    "nonfinite",
    "restart",
    "lost",
    "host_lost",
    "host_left",
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
WAITED_FOR = 0.03  # smallest wait that the page mentions, as a fraction of a step
SAMPLES = 8  # largest number of continuations of a prompt that the page shows
RESULTS = 100  # largest number of lm-eval's results that the page shows
EVENTS = 100  # largest number of events that the page lists


def write_run_page(run: Run) -> Path:
    """Write `report.html` about a run into its directory.

    Raises:
        RunError: the run has not finished a step, or the file cannot be written.
    """
    with not_by_paceline(run.path, "run"):
        view = view_of(run)
        record: RunRecord = view["record"]
        return write_page(
            run.path / PAGE,
            "run.html.j2",
            facts={"run": str(run.path.resolve()), "plan": record.plan, "machine": record.machine},
            environment=record.environment,
            view=view,
            charts=[*run_charts(record), *view["sync"]["charts"]],
        )


def view_of(run: Run) -> dict[str, Any]:
    """Return the variables of the template for a run.

    Raises:
        RunError: rank 0 of the run has not finished a step.
    """
    record = RunRecord.read(run)
    if not record.ranks.get(0):
        raise RunError(
            "report.no_steps",
            "rank 0 of {run} has not finished a step, so there is nothing to show. The loss needs one step. Throughput "
            "and the breakdown need {needed} steps, because the first {warm_up} are warm-up. {gaps}",
            run=run.path,
            needed=WARM_UP_STEPS + 1,
            warm_up=WARM_UP_STEPS,
            gaps=" ".join(record.gaps),
        )
    steps, noun, events = record.ranks[0], record.noun, record.events
    start = _newest(events, "start", "resume") or {}
    newest = _newest(events, "start", "resume", "end") or {}
    end = newest if newest.get("event") == "end" else None
    ended_s = float(end["elapsed_s"]) if end is not None and "elapsed_s" in end else 0.0
    elapsed_s = ended_s or record.clock_s[-1]
    speed = Speed.of(steps, ended_s)
    typical = {rank: typical_parts(lines) for rank, lines in record.ranks.items()}
    parts_s = {rank: parts for rank, parts in typical.items() if parts is not None}
    whole_s = sum(sum(parts.values()) for parts in parts_s.values())
    comm_share = sum(parts["comm"] for parts in parts_s.values()) / whole_s if whole_s else None
    sentences = _sentences(parts_s, speed, noun)
    shown = _shown_ranks(parts_s)
    bars = [Bar("", f"rank {rank}", parts_s[rank]) for rank in shown]
    label = " ".join([f"Median {noun} of each rank, part by part.", *sentences])
    return {
        "run": run,
        "record": record,
        "noun": noun,
        "parts": list(PARTS),
        "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(steps[0]["time"])),
        "start": start,
        "synthetic": bool(start.get("synthetic", False)),
        "verdict": _verdict(units.count(steps[-1]["step"], noun), end, elapsed_s),
        "cards": _cards(run, record, end, elapsed_s, speed, utilization(events, speed)),
        "speed": speed,
        "parts_s": parts_s,
        "sentences": sentences,
        "of_ranks": f"{len(shown)} of {len(parts_s)} ranks, from the fastest to the slowest computation"
        if len(shown) < len(parts_s)
        else "each rank",
        "breakdown": Chart("breakdown", figures.breakdown(bars, noun), label) if bars else None,
        "warnings": _warnings(record, synthetic=bool(start.get("synthetic", False))),
        "happened": _happened(events, noun),
        "samples": _samples(record),
        "memory": table_of(record.ranks, events, run.plan),
        "harness": _harness(run),
        "sync": _sync(record, run.plan, comm_share),
        "goodput": _goodput(record.goodput, len(steps)),
    }


def _newest(events: Sequence[dict[str, Any]], *kinds: str) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] in kinds), None)


def _samples(record: RunRecord) -> list[tuple[str, list[tuple[int, str]]]]:
    """Return each prompt with the steps and texts of its newest continuations, the newest first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for event in reversed(record.evaluations):
        samples = event.get("samples")
        for sample in samples if isinstance(samples, list) else ():
            if isinstance(sample, dict):
                texts = found.setdefault(printable(str(sample.get("prompt"))), [])
                if len(texts) < SAMPLES:
                    texts.append((event["step"], printable(str(sample.get("text")))))
    return list(found.items())


def _harness(run: Run) -> list[tuple[str, str, str, str]]:
    """Return step, task, metric and value of the newest results of lm-eval."""
    found: dict[tuple[str, str, str], str] = {}
    for line in read_lines(run.path / HARNESS):
        results = line.get("results") if isinstance(line, dict) else None
        for one in results if isinstance(results, list) else ():
            if isinstance(one, dict) and isinstance(one.get("value"), (int, float)):
                name = [printable(str(value)) for value in (line.get("step"), one.get("task"), one.get("metric"))]
                error, limit = one.get("stderr"), line.get("limit")
                more = f" ± {units.number(error)}" if isinstance(error, (int, float)) else ""
                part = f" (first {limit} documents)" if isinstance(limit, int) else ""
                found[name[0], name[1], name[2]] = f"{units.number(one['value'])}{more}{part}"
    return [(*name, value) for name, value in list(found.items())[-RESULTS:]]


# The headline


def _verdict(steps: str, end: dict[str, Any] | None, elapsed_s: float) -> str:
    if end is None:
        return f"{steps} so far: the run has not ended, or it crashed."
    took, reason = units.seconds(elapsed_s), str(end.get("reason"))
    if end.get("interrupted"):
        return f"Interrupted by {reason} after {steps} in {took}."
    if reason.startswith(TARGETS):
        return f"Reached its target ({reason.partition(': ')[2]}) after {steps} in {took}."
    return f"Trained {steps} in {took} ({reason_words(reason)})."


def _cards(
    run: Run,
    record: RunRecord,
    end: dict[str, Any] | None,
    elapsed_s: float,
    speed: Speed | None,
    mfu: float | None,
) -> list[Card]:
    steps, noun = record.ranks[0], record.noun
    served = sync_info(run.plan.sync).served
    who = units.count(run.plan.dp, "worker") if served else units.count(len(record.ranks), "rank")
    overall = (
        "" if speed is None or speed.overall_if_other is None else f"; {units.rate(speed.overall_if_other)} overall"
    )
    too_few = f"needs {WARM_UP_STEPS + 1} {noun}s"
    reached = end is not None and str(end.get("reason")).startswith(TARGETS)
    until = f"from the first {noun}" if end is not None else f"until the newest {noun}"
    cards = [
        Card("throughput", too_few if speed is None else units.rate(speed.throughput), f"on {who}{overall}"),
        Card("time_to_target" if reached else "training_time", units.seconds(elapsed_s), until),
    ]
    if speed is not None and speed.tokens_per_s is not None and speed.padding is not None:
        beside = "; ".join(filter(None, (f"{units.percent(speed.padding)} padding", lost_samples(steps))))
        cards.append(Card("tokens", units.rate(speed.tokens_per_s, "tokens/s"), beside))
    if mfu is not None:
        cards.append(Card("mfu", units.percent(mfu), f"of the peak of {units.count(run.plan.ranks, 'device')}"))
    if speed is not None:
        cards.append(Card(f"{noun}_time", units.seconds(speed.step_s), f"over {units.count(len(timed(steps)), noun)}"))
    metrics: dict[str, float] = (_newest(record.events, "evaluation") or {"metrics": {}})["metrics"]
    name = next((n for n in metrics if n != "loss"), None)
    tested: dict[str, float] = (_newest(record.events, "test") or {"metrics": {}})["metrics"]
    cards += [Card("test", units.number(value), f"{n} of the test set") for n, value in tested.items()]
    if name is not None:
        return [*cards, Card("held_out", units.number(metrics[name]), f"{name}, newest")]
    losses = [s["loss"] for s in steps if s["loss"] is not None]
    return [*cards, Card("loss", units.number(losses[-1]) if losses else "never finite", f"newest {noun}")]


# Where the time goes


def _sentences(parts_s: dict[int, dict[str, float]], speed: Speed | None, noun: str) -> list[str]:
    each = list(parts_s.values())
    if not each or speed is None:
        return []
    step_s = statistics.fmean(sum(parts.values()) for parts in each)
    shares = {part: statistics.fmean(parts[part] for parts in each) / step_s for part in PARTS}
    largest = sorted(shares.items(), key=lambda x: -x[1])
    named = [f"{units.percent(share)} {PARTS[part].name}" for part, share in largest if share >= 0.005]
    took = units.seconds(speed.step_s)
    return [f"A {noun} takes {took} in the median: {listed(named)}.", *_slow_rank(parts_s, step_s)]


_MOST_BARS = 16  # largest number of ranks in the breakdown


def _shown_ranks(parts_s: Mapping[int, Mapping[str, float]]) -> list[int]:
    """Select the ranks for the breakdown.

    If there are too many ranks, the selection ranges evenly from the fastest to the slowest rank.
    """
    if len(parts_s) <= _MOST_BARS:
        return list(parts_s)
    by_compute = sorted(parts_s, key=lambda rank: parts_s[rank]["compute"])
    return sorted(by_compute[round(i * (len(by_compute) - 1) / (_MOST_BARS - 1))] for i in range(_MOST_BARS))


def _slow_rank(parts_s: dict[int, dict[str, float]], step_s: float) -> list[str]:
    waits = {rank: parts["imbalance"] for rank, parts in parts_s.items()}
    if len(waits) < 2 or max(waits.values()) < WAITED_FOR * step_s:
        return []
    slow = min(waits, key=lambda rank: waits[rank])
    others = statistics.fmean(wait for rank, wait in waits.items() if rank != slow)
    if waits[slow] > others / 3:
        in_turn = f"Each rank waits for others, up to {units.seconds(max(waits.values()))} a step"
        return [f"{in_turn}. No single rank is always the slowest."]
    waiting = f"{units.seconds(others)} of each step, {units.percent(others / step_s)}"
    return [f"The others wait for rank {slow}: {waiting}. A faster rank {slow} makes all of them faster."]


# Events, and gaps in the record


def _warnings(record: RunRecord, *, synthetic: bool) -> list[str]:
    """List notes for the reader.

    For example, a note says that the data is synthetic, or explains why a chart is missing.
    """
    steps, noun = record.ranks[0], record.noun
    notes = [*([SYNTHETIC] if synthetic else []), *record.gaps]
    if not timed(steps):
        notes.append(
            f"Throughput, {noun} time and the breakdown are not shown: they need {WARM_UP_STEPS + 1} timed {noun}s, as "
            f"the first {WARM_UP_STEPS} are warm-up, and this run has {len(steps)}."
        )
    if not any("use" in s for lines in record.ranks.values() for s in lines):
        notes.append("Memory is not shown: the run recorded no reading of it.")
    return notes


def _happened(events: Sequence[dict[str, Any]], noun: str) -> list[tuple[str, str, bool]]:
    """List each event with its time, its sentence and a flag for failures.

    Saved checkpoints are only counted.
    """
    told = [
        (f"{event['time'] - events[0]['time']:,.1f} s", sentence, event["event"] in TROUBLE)
        for event in events
        if (sentence := _sentence(event, noun)) is not None
    ]
    if len(told) > EVENTS:
        told = [("", f"{len(told) - EVENTS:,} earlier events are in events.jsonl", False), *told[-EVENTS:]]
    if saved := [e for e in events if e["event"] == "checkpoint_saved"]:
        newest = f"the newest at {noun} {saved[-1].get('step')}"
        told.append(("", f"{units.count(len(saved), 'checkpoint')} saved, {newest}", False))
    return told


def _sentence(event: dict[str, Any], noun: str) -> str | None:
    try:
        match event["event"]:
            case "start":
                return f"started with plan {event.get('plan')}, {event.get('parameters', 0):,} parameters"
            case "end":
                return f"ended at {noun} {event.get('step')}: {reason_words(str(event.get('reason')))}"
        return event_sentence(event)
    except (KeyError, TypeError, ValueError):
        return f"{event['event']} (its line is not as paceline writes it)"


_MARKED = {  # events that are marked on a curve; a restart is left out, because a resume follows it
    "nonfinite": "not finite",
    "spike": "spike",
    "corruption": "corruption",
    "checkpoint_damaged": "checkpoint damaged",
    "rewind": "rewind",
    "lost": "rank lost",
    "host_lost": "host lost",
    "host_left": "host left",
    "healed": "healed",
    "recut": "re-cut",
    "resume": "resume",
}


@dataclass(frozen=True)
class PanelInfo:
    """Declaration of a panel on the page of a run.

    Attributes:
        panel: import path of a function that takes a `RunRecord` and returns charts.
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
    """Return all charts for which the record has values, in page order.

    Charts from installed packages come last.

    Raises:
        RunError: a panel of an installed package cannot be loaded or fails. The message names the panel.
    """
    found: list[Chart] = []
    for name, info in PANELS.all().items():
        try:
            found += load_object(info.panel)(record)
        except Exception as error:
            if name in PANELS.built_in:
                raise
            raise RunError(
                "report.panel_failed",
                'the panel "{name}" ({panel}), which an installed package provides, failed with {kind}: {error}',
                name=name,
                panel=info.panel,
                kind=type(error).__name__,
                error=error,
            ) from error
    return found


def losses(record: RunRecord) -> Iterator[Chart]:
    """Chart the training loss and the validation loss, over steps and over time."""
    steps = record.ranks[0]
    values = [s["loss"] for s in steps]
    clock_of = record.clock_of
    evaluated = [e for e in record.evaluations if "loss" in e["metrics"] and e["step"] in clock_of]
    each = charts.steps_per_point(len(values))
    note = (
        f"The line is the mean of each {each:,} {record.noun}s; the band spans the lowest to the highest loss."
        if each > 1
        else ""
    )
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


_MOST_ON_CURVE = 12  # largest number of marks whose texts fit on a curve


def _marks(record: RunRecord) -> dict[int, str]:
    """Return marks for notable events, each at the first step after the event.

    If there are many events, neighbouring events share a mark.
    """
    steps, found = record.ranks[0], dict[int, dict[str, int]]()
    times, close = [step["time"] for step in steps], len(steps) // _MOST_ON_CURVE or 1
    many = sum(event["event"] in _MARKED for event in record.events) > _MOST_ON_CURVE
    for event in record.events:
        if event["event"] in _MARKED:
            after = min(bisect_left(times, event["time"]), len(steps) - 1)
            first = after - after % close if many else after
            names = found.setdefault(steps[first]["step"], {})
            names[_MARKED[event["event"]]] = names.get(_MARKED[event["event"]], 0) + 1
    return {
        step: ", ".join(f"{name} × {count:,}" if count > 1 else name for name, count in names.items())
        for step, names in found.items()
    }


def metrics(record: RunRecord) -> Iterator[Chart]:
    """Chart every validation metric except the loss."""
    names = dict.fromkeys(name for e in record.evaluations for name in e["metrics"] if name != "loss")
    for number, name in enumerate(names):
        measured = [(e["step"], e["metrics"][name]) for e in record.evaluations if name in e["metrics"]]
        steps, values = zip(*measured, strict=True)
        line = charts.Line(name, steps, values, charts.GREEN, marked=True)
        label = f"{name} on validation samples; newest {digits(values[-1])}."
        figure = charts.lines([line], f"{record.noun}s", name)
        yield Chart(f"metric-{number}", figure, label, f"Validation: {name}", ["held_out"])


def speeds(record: RunRecord) -> list[Chart]:
    """Chart the throughput, and the parts of rank 0's steps."""
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
    """Chart each rank's share of the full batches, if the run balances the shares."""
    if not any(event["event"] == "balance" for event in record.events):
        return
    series = {}
    for rank, steps in record.ranks.items():
        batch = max(s["samples"] for s in steps)
        full = [s for s in steps if s["samples"] == batch > 0 and isinstance(s.get("local_samples"), int)]
        percent = [100 * s["local_samples"] / s["samples"] for s in full]
        series[rank] = {s["step"]: share for s, share in zip(full, percent, strict=True)}
    title = "Share of the batch of each rank"
    figure = charts.lines(_of_ranks(series), "steps", "percent of the batch")
    yield Chart("shares", figure, f"{title}, in percent.", title, ["share"])


_MOST_RANKS = 8  # largest number of ranks with separate lines; otherwise, minimum, median and maximum are drawn


def _of_ranks(values: Mapping[int, Mapping[int, float]]) -> list[charts.Line]:
    """Return one line for each rank, or the maximum, median and minimum of many ranks."""
    if len(values) <= _MOST_RANKS:
        colours = itertools.cycle(charts.SERIES)
        return [
            charts.Line(f"rank {rank}", list(of_rank), list(of_rank.values()), colour)
            for (rank, of_rank), colour in zip(values.items(), colours, strict=False)
        ]
    at: dict[int, list[float]] = {}
    for of_rank in values.values():
        for step, value in of_rank.items():
            at.setdefault(step, []).append(value)
    steps = sorted(at)
    together: dict[str, Callable[[Sequence[float]], float]]
    together = {"greatest": max, "median": statistics.median, "least": min}
    return [
        charts.Line(f"{name} of {len(values)} ranks", steps, [of(at[step]) for step in steps], colour)
        for (name, of), colour in zip(together.items(), charts.SERIES, strict=False)
    ]


def staleness(record: RunRecord) -> Iterator[Chart]:
    """Chart the staleness of each worker's gradients, if parameter servers own the parameters."""
    told = [event for event in record.events if event["event"] == "served"]
    series, sentences = [], []
    for number, (name, counts) in enumerate(_workers(told[-1])[:_MOST_BARS] if told else ()):
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
    """Return the counters of each worker, by name. Damaged counters are skipped."""
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
    """Chart the memory that each rank uses on its host and on its accelerator."""
    for curve in filter(None, (figure.curve for figure in RANK_FIGURES)):
        series = {
            rank: {s["step"]: s["use"][curve.key] / 2**20 for s in steps if curve.key in s.get("use", {})}
            for rank, steps in record.ranks.items()
        }
        if series := {rank: read for rank, read in series.items() if read}:
            figure = charts.lines(_of_ranks(series), "steps", "MiB")
            yield Chart(curve.term, figure, f"{curve.title}, in MiB.", curve.title, [curve.term])


DOMINATES = 0.5  # fraction of a step from which communication is named as the bottleneck


def _sync(record: RunRecord, plan: Plan, comm_share: float | None) -> dict[str, Any]:
    """Return the variables of the template that describe synchronization.

    Args:
        comm_share: fraction of a step that communication takes; None if no step has times.
    """
    sent = {rank: growth(steps, "wire_bytes") for rank, steps in record.ranks.items()}
    saved = {rank: growth(steps, "saved_bytes") for rank, steps in record.ranks.items()}
    errors = [
        (step["step"], step["use"]["compression_error"])
        for step in record.ranks[0]
        if "compression_error" in step.get("use", {})
    ]
    events = [event for event in record.events if event["event"] == "sync"]
    told = list(dict.fromkeys(str(said) for event in events for said in event.get("said", [])))
    values = {
        "wire_bytes": _largest(sent) or None,
        "saved_bytes": _largest(saved) if errors else None,
        "compression_error": statistics.median(error for _, error in errors) if errors else None,
    }
    shown = ((figure, values.get(figure.name)) for figure in RANK_FIGURES)
    return {
        "shown": plan.dp > 1 and (any(sent.values()) or bool(told)),
        "sentences": [*told, *_dominance(plan, comm_share)],
        "rows": [Row(figure.term, [figure.shown(value)]) for figure, value in shown if value is not None],
        "links": _links(record.events),
        "charts": [*_wire_chart(sent, saved if errors else None), *_error_chart(errors)],
    }


def _dominance(plan: Plan, comm_share: float | None) -> Iterator[str]:
    if comm_share is None or comm_share < DOMINATES:
        return
    share = f"Communication takes {units.percent(comm_share)} of a step"
    if plan.inexact:
        yield f"{share}, even with this sync rule or codec."
        return
    yield (
        f"{share}. Replicas send less with compress= (int8 about a quarter) or a sync= that synchronizes less often "
        "(local:8, diloco:30); paceline bench scaling with --plans measures whether that is faster here, and "
        "what it does to the loss."
    )


def _links(events: Sequence[dict[str, Any]]) -> list[tuple[str, Shown, Shown]]:
    """List the bytes sent and received over each emulated host's link, over all attempts."""
    totals: dict[str, list[int]] = {}
    for event in events:
        links = event.get("links")
        for name, carried in links.items() if event["event"] == "links" and isinstance(links, dict) else ():
            total = totals.setdefault(name, [0, 0])
            total[0] += carried["sent_bytes"]
            total[1] += carried["received_bytes"]
    return [(name, units.size(sent), units.size(received)) for name, (sent, received) in totals.items()]


_Readings = dict[int, list[tuple[int, int, float]]]  # result of `growth` for each rank


def _wire_chart(sent: _Readings, saved: _Readings | None) -> Iterator[Chart]:
    """Chart the sent bytes over steps, for the rank that sends most."""
    means = {rank: mean for rank, readings in sent.items() if (mean := mean_growth(readings))}
    if not means:
        return
    rank = max(means, key=lambda rank: means[rank])
    steps = [step for step, _, _ in sent[rank]]
    own = [grown / passed / 1024 for _, passed, grown in sent[rank]]
    series = [charts.Line("sent", steps, own, charts.VERMILLION)]
    if saved is not None:
        less = [grown / passed / 1024 for _, passed, grown in saved[rank]]
        whole = [a + b for a, b in zip(own, less, strict=True)]
        series.append(charts.Line("without compression", steps, whole, charts.GREY))
    title = f"Bytes on the wire, rank {rank}"
    figure = charts.lines(series, "steps", "KiB per step", log_if_wide=True)
    yield Chart("wire", figure, f"{title}, in KiB per step.", title, ["wire"] if saved is None else ["wire", "saved"])


def _error_chart(errors: Sequence[tuple[int, float]]) -> Iterator[Chart]:
    if errors:
        steps, values = zip(*errors, strict=True)
        figure = charts.lines([charts.Line("error", steps, values, charts.PURPLE)], "steps", "relative error")
        label = "Relative error of compression over the steps."
        yield Chart("error", figure, label, "Error of compression", ["compression_error"])


def _largest(of_ranks: _Readings) -> float | None:
    return max((mean for readings in of_ranks.values() if (mean := mean_growth(readings)) is not None), default=None)


_STRETCHES = 60  # largest number of time intervals in the curve
_STEPS = 4  # minimum average number of steps in an interval
_MOST_MARKED = 30  # largest number of failures marked on the curve


def _goodput(goodput: Goodput, steps: int) -> dict[str, Any]:
    """Return the variables of the template that describe the wall-clock time of a run."""
    sentence, wall_s = f"Goodput is {goodput.sentence()}.", goodput.wall_s
    if not wall_s:
        return {"chart": None}
    rows = [
        Row(f"wall_{part}", [seconds(s), percent(s / wall_s)], loud=part != USEFUL)
        for part, s in goodput.parts_s.items()
        if s > 0
    ]
    points = goodput.over_time(max(1, min(_STRETCHES, steps // _STEPS)))
    moments = [0.0, *(second for second, _ in points)]
    middles = [(before + after) / 2 for before, after in pairwise(moments)]
    line = charts.Line("goodput", middles, [100 * share for _, share in points], charts.GREEN)
    marked = goodput.failures[:_MOST_MARKED]
    marks = [charts.Mark(failure.at_s, failure.text) for failure in marked]
    figure = charts.lines([line], "seconds of wall-clock", "goodput, %", marks=marks)
    figure.y.span = (0, 105)
    told = [f"{failure.text} after {seconds(failure.at_s)}." for failure in marked]
    return {"sentence": sentence, "rows": rows, "chart": Chart("goodput", figure, " ".join([sentence, *told]))}
