"""Page of `paceline plan`: the chosen plan, with charts and tables that explain the choice."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline import units
from paceline.planning.cost.estimate import timeline
from paceline.planning.cost.layout import PART_NAMES, PARTS, Span
from paceline.planning.explain.advice import ScaledPlan
from paceline.planning.explain.explain import Explanation, shares_of_time
from paceline.planning.explain.questions import BatchAdvice
from paceline.planning.explain.which_cluster import ClusterChoice, Option, pareto
from paceline.planning.machines import factor_of
from paceline.planning.search.result import Candidate
from paceline.report.charts import (
    AMBER,
    AZURE,
    BLUE,
    GREEN,
    GREY,
    ICE,
    LEAF,
    OCHRE,
    PALE,
    PINK,
    PURPLE,
    SLATE,
    VERMILLION,
    Axis,
    Bars,
    Figure,
    Note,
    Points,
    Rule,
)
from paceline.report.figures import Definition, Part
from paceline.report.page import Card, Cell, Chart, Row, write_page
from paceline.units import Shown, digits, percent, seconds, size, span

_BARS = 8  # number of plans whose step time and memory are charted by part
_ROUNDS = 3  # number of drawn microbatches, as a multiple of the pipeline stages
_LISTED = 10  # number of plans in the table that are visible at first; the others are collapsed
_MATTERS = 0.3  # fraction of a device's memory; if all plans need less, the charts do not show the limit
_GIB = 2**30


def write_plan_page(
    explanation: Explanation, scaling: Sequence[ScaledPlan], advice: BatchAdvice | None, command: str, file: Path
) -> Path:
    """Write the page about a plan.

    Raises:
        RunError: the file cannot be written.
    """
    found = explanation.found
    considered = f"{found.considered:,} considered, {found.evaluated:,} predicted"
    facts = {
        "cluster": explanation.cluster.describe(),
        "command": command,
        "paceline": version("paceline"),
        "plans": f"{considered}, {found.pruned:,} excluded by a bound",
        "searched in": str(seconds(found.seconds)),
        "speeds": "measured on these machines" if explanation.measured else "from the catalogue",
    }
    on_cores = explanation.winner.layout.machines.device.is_core
    view = _plan_view(explanation, scaling, advice)
    return write_page(file, "plan.html.j2", definitions=DEFINITIONS, facts=facts, on_cores=on_cores, view=view)


def _plan_view(explanation: Explanation, scaling: Sequence[ScaledPlan], advice: BatchAdvice | None) -> dict[str, Any]:
    """Return the variables of the template for an explanation."""
    job, found, best = explanation.job, explanation.found, explanation.winner
    tokens = [f"{explanation.tokens:,} tokens a sample"] if explanation.tokens > 1 else []
    parameters = f"{units.large(best.layout.trace.parameters)} parameters"
    shown = found.best[:_BARS]
    there = {part.name for c in shown for part in shares_of_time(c)}
    parts = [part for part in PARTS if part in there]
    held = dict.fromkeys(name for c in shown for name, size in c.prediction.memory.items() if size > 0)
    holders, room = holder_colours(list(held)), _room(explanation)
    named = {"weight": "gradients of weights", "wait": "waiting"}
    rows = list(enumerate(_candidates(explanation), 1))
    scaled, outlook = [point for point in scaling if point.best], explanation.failures
    return {
        "explanation": explanation,
        "job": job,
        "found": found,
        "best": best,
        "advice": advice,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "gap": percent(found.gap),
        "verdict": _verdict(best),
        "badges": [parameters, *tokens, f"global batch {job.global_batch:,}", best.plan.precision_for(job)],
        "cards": _cards(explanation),
        "limit": explanation.limit[0].upper() + explanation.limit[1:],
        "memory_chart": _memory_chart(explanation, room),
        "cost_chart": _cost_chart(explanation, scaled),
        "pipeline": _pipeline(found.best),
        "spans": [(named.get(kind, kind), colour) for kind, colour in SPAN_COLOURS.items()],
        "time_chart": _time_chart(shown, parts),
        "part_terms": [f"part_{part}" for part in parts],
        "held_chart": _held_chart(shown, holders, room),
        "holders": holders,
        "room": room,
        # a curve needs at least two device counts
        "scaling_chart": _scaling_chart(scaled, best) if len(scaled) > 1 else None,
        "batch_chart": Chart("batches", batches_figure(advice), advice.line) if advice else None,
        "tables": [part for part in (rows[:_LISTED], rows[_LISTED:]) if part],
        "heads": _heads(explanation),
        "devices": _devices(scaling),
        "changes": [
            Row(row.change, [row.words or "not predicted"], row.about, loud=row.words.startswith("+"))
            for row in explanation.helps
        ],
        "failures": [Row(name, [percent(share, 2)], why) for name, share, why in outlook.rows] if outlook else [],
    }


def _verdict(best: Candidate) -> str:
    device, ranks = best.layout.machines.device, best.plan.ranks
    devices = f"{ranks:,} × {device.name}" if ranks > 1 else f"one {device.name}"
    if device.is_core:
        devices = f"{ranks:,} cores" if ranks > 1 else "one rank"
    return (
        f"{seconds(best.prediction.step_time_s)} a step on {devices}, as predicted, ± "
        f"{percent(best.interval.relative, 0)} (80 %, by {best.interval.rests_on})."
    )


def _cards(explanation: Explanation) -> list[Card]:
    best, cost = explanation.winner, explanation.cost(explanation.winner)
    prediction, room = best.prediction, explanation.capacity_bytes
    rate = units.rate(prediction.throughput)
    speed = Card("predicted_throughput", rate)
    if explanation.tokens > 1:
        speed = Card("predicted_tokens", _thousands(prediction.throughput * explanation.tokens), str(rate))
    return [
        Card("predicted_step", seconds(prediction.step_time_s), f"{best.plan.ranks:,} ranks"),
        speed,
        *([] if prediction.mfu is None else [Card("mfu", percent(prediction.mfu))]),
        Card("device_memory", size(prediction.memory_bytes), f"of {size(room)} on each device"),
        *([] if cost is None else [Card("cost", Shown(cost.value, units.digits(cost.value)), cost.of)]),
    ]


def _room(explanation: Explanation) -> float | None:
    """Return the memory of a device in GiB.

    The result is None if all plans leave most of the memory free.
    """
    room, most = explanation.capacity_bytes, max(c.prediction.memory_bytes for c in explanation.found.best)
    return room / _GIB if most > _MATTERS * room else None


def _memory_chart(explanation: Explanation, room: float | None) -> Chart:
    points = [
        Point(str(i), str(c.plan), c.prediction.memory_bytes / _GIB, c.prediction.step_time_s)
        for i, c in enumerate(explanation.found.best, 1)
    ]
    figure, best = pareto_figure(points, "GiB on the fullest device", room=room), explanation.winner.prediction
    chosen = f"{seconds(best.step_time_s)}, {size(best.memory_bytes)}"
    return Chart("pareto-memory", figure, f"Step time over memory of {len(points)} plans; the chosen one: {chosen}.")


def _cost_chart(explanation: Explanation, scaled: Sequence[ScaledPlan]) -> Chart:
    """Plot step time over cost, for plans on this cluster and on other device counts."""
    best, priced = explanation.winner, explanation.cluster.price_per_hour
    cost = explanation.cost(best)
    of = cost.of if cost else "a step"
    per_second = cost.value / (best.prediction.step_time_s * best.plan.ranks) if cost and priced else 1.0

    def point(name: str, about: str, one: Candidate) -> Point:
        step_s = one.prediction.step_time_s
        return Point(name, f"{about}{one.plan}", step_s * one.plan.ranks * per_second, step_s)

    points = [point(str(i), "", one) for i, one in enumerate(explanation.found.best, 1)]
    for on in scaled:
        if on.devices != best.layout.machines.devices and on.best:
            name = units.count(on.devices, "device")
            points.append(point(name, f"{name}: ", on.best))
    figure = pareto_figure(points, f"cost of {of}" if priced else "device-seconds per step", log=len(scaled) > 1)
    label = f"Step time over the cost of {of}, for {len(points)} plans, on fewer and more devices as well."
    return Chart("pareto-cost", figure, label)


def _pipeline(best: Sequence[Candidate]) -> tuple[Candidate, Chart] | None:
    """Draw the timeline of the best plan that has a pipeline, or return None."""
    piped = next((candidate for candidate in best if candidate.plan.pp > 1), None)
    if piped is None:
        return None
    drawn = min(piped.plan.microbatches, _ROUNDS * piped.plan.pp)
    note = ""
    if drawn < piped.plan.microbatches:
        every = f"{piped.plan.microbatches:,}"
        note = (
            f"Drawn with {drawn} microbatches instead of {every}. The rest would repeat the middle, so the ends take a "
            "smaller share of a step."
        )
    label = f"What each of {piped.plan.pp} stages does in a step of {piped.plan}: forward, backward, waiting. {note}"
    factor = factor_of(piped.layout)
    spans = [
        replace(span, start_s=factor * span.start_s, end_s=factor * span.end_s)
        for span in timeline(replace(piped.layout, microbatches=drawn))
    ]
    return piped, Chart("pipeline", pipeline_figure(spans), label, note=note)


def _time_chart(shown: Sequence[Candidate], names: Sequence[str]) -> Chart:
    slowest = max(c.prediction.step_time_s for c in shown)
    factor, unit = (1e3, "ms") if slowest < 1 else (1.0, "s")
    times = [{part.name: part.value for part in shares_of_time(c)} for c in shown]
    parts = {part: [of_plan.get(part, 0.0) * factor for of_plan in times] for part in names}
    figure = stacked_figure([str(c.plan) for c in shown], parts, TIME_COLOURS, PART_NAMES, f"{unit} per step")
    return Chart("time", figure, " ".join(f"{c.plan}: {seconds(c.prediction.step_time_s)}." for c in shown))


def _held_chart(shown: Sequence[Candidate], holders: Mapping[str, str], room: float | None) -> Chart:
    """Chart the memory of the best plans, by category."""
    held = {holder: [c.prediction.memory.get(holder, 0.0) / _GIB for c in shown] for holder in holders}
    figure = stacked_figure([str(c.plan) for c in shown], held, holders, {}, "GiB", room)
    return Chart("held", figure, " ".join(f"{c.plan}: {size(c.prediction.memory_bytes)}." for c in shown))


def _scaling_chart(scaled: Sequence[ScaledPlan], best: Candidate) -> Chart:
    label = " ".join(f"{p.devices:,} devices: {units.digits(p.speedup or 0)} times as fast." for p in scaled)
    return Chart("scaling", scaling_figure(scaled, best.layout.machines.devices), label)


def _candidates(explanation: Explanation) -> list[Row]:
    rows = []
    for number, candidate in enumerate(explanation.found.best, 1):
        prediction, cost = candidate.prediction, explanation.cost(candidate)
        slower = prediction.step_time_s / explanation.winner.prediction.step_time_s - 1
        cells: list[Cell] = [
            seconds(prediction.step_time_s),
            f"+{percent(slower)}" if number > 1 else "",
            size(prediction.memory_bytes),
            units.rate(prediction.throughput),
            "" if prediction.mfu is None else percent(prediction.mfu),
            *([] if cost is None else [Shown(cost.value, units.digits(cost.value))]),
        ]
        rows.append(Row(str(candidate.plan), cells, candidate.why, loud=number == 1))
    return rows


def _heads(explanation: Explanation) -> list[str]:
    """Return the definition of each column in the table of plans.

    The second column has no definition.
    """
    priced = explanation.cost(explanation.winner) is not None
    return ["predicted_step", "", "device_memory", "predicted_throughput", "mfu", *(["cost"] if priced else [])]


def _devices(scaling: Sequence[ScaledPlan]) -> list[Row]:
    rows = [
        Row(
            f"{p.devices:,}",
            [seconds(p.best.prediction.step_time_s), units.ratio(p.speedup or 0.0), percent(p.efficiency or 0.0)],
            str(p.best.plan),
        )
        for p in scaling
        if p.best
    ]
    return [*(Row(f"{p.devices:,}", ["no plan fits", "", ""], p.why) for p in scaling if not p.best), *rows]


def _thousands(tokens_per_s: float) -> Shown:
    if tokens_per_s < 1e4:
        return units.rate(tokens_per_s, "tokens/s")
    return Shown(tokens_per_s, units.digits(tokens_per_s / 1e3), "k tokens/s")


PREDICTED_PARTS = {
    "compute": Part(PART_NAMES["compute"], "Forward and backward pass: matrix products and other kernels.", BLUE),
    "recompute": Part(
        PART_NAMES["recompute"], "Activations that the backward pass recomputes instead of keeping them (remat).", ICE
    ),
    "launch": Part(PART_NAMES["launch"], "Kernels that wait for the host to start them.", GREY),
    "tp": Part(PART_NAMES["tp"], "Sums and gathers between the ranks that shard a layer’s matrices.", VERMILLION),
    "cp": Part(PART_NAMES["cp"], "Keys and values between the ranks that shard a sequence.", OCHRE),
    "ep": Part(PART_NAMES["ep"], "Sending tokens to experts and back.", PURPLE),
    "fsdp": Part(PART_NAMES["fsdp"], "Gathering weights and scattering gradients, unless compute hides it.", AMBER),
    "pp": Part(
        PART_NAMES["pp"],
        "Sending activations between stages, while the next stage waits for them.",
        AZURE,
    ),
    "bubble": Part(PART_NAMES["bubble"], "Stages of the pipeline that wait for their neighbours.", PALE),
    "dp": Part(PART_NAMES["dp"], "Reducing gradients over the replicas, unless the backward pass hides it.", PINK),
    "optimizer": Part(PART_NAMES["optimizer"], "Updating the parameters.", LEAF),
    "other": Part(PART_NAMES["other"], "Overhead of every step.", SLATE),
}
TIME_COLOURS = {part: about.colour for part, about in PREDICTED_PARTS.items()}
DEFINITIONS: Mapping[str, Definition] = {
    **{f"part_{part}": about for part, about in PREDICTED_PARTS.items()},
    "predicted_step": Definition(
        "step time", "Time of one optimizer step over all ranks, predicted by the cost model and not measured."
    ),
    "predicted_throughput": Definition("throughput", "Samples per second = global batch / predicted step time."),
    "predicted_tokens": Definition("token throughput", "Tokens per second = throughput × tokens per sample."),
    "mfu": Definition(
        "MFU",
        "Model FLOPs utilisation (Chowdhery et al., 2022, arXiv:2204.02311): FLOPs of the model, without "
        "recomputation / peak FLOPs of all devices in the time of a step.",
    ),
    "device_memory": Definition("memory", "Predicted peak memory on the device of the fullest rank."),
    "cost": Definition("cost", "Given price of a device for an hour × devices × time."),
    "device_seconds": Definition(
        "device-seconds", "Devices × predicted step time: cost of a step, in units of the price of a device."
    ),
    "predicted_goodput": Definition(
        "goodput",
        "Useful step time / wall-clock time, predicted for random failures, without start-up and evaluations.",
    ),
    "gap": Definition(
        "optimality gap",
        "Fraction of the predicted step time by which a better plan may exist in the whole search space.",
    ),
    "pareto": Definition(
        "not beaten in both", "Among the plans found, no other plan is better in both the time and the other figure."
    ),
    "predicted_scaling": Definition(
        "strong scaling",
        "The same job with the same global batch on more devices of the same kind, with the best plan for each number "
        "of devices.",
    ),
    "predicted_speedup": Definition(
        "speedup", "Step time on the smallest number of devices that fits the job / step time on this number."
    ),
    "predicted_efficiency": Definition(
        "efficiency",
        "Speedup / increase of the number of devices. It exceeds 100 % if more devices have enough memory to avoid "
        "recomputation.",
    ),
    "gain": Definition(
        "gain", "Predicted throughput of the best plan with the change / throughput of the best plan without it − 1."
    ),
}
SPAN_COLOURS = {"forward": BLUE, "backward": LEAF, "weight": AMBER, "wait": PALE}
_HOLDER_COLOURS = (BLUE, AMBER, VERMILLION, LEAF, GREY, PINK, AZURE, ICE, PURPLE, PALE, OCHRE)


@dataclass(frozen=True)
class Point:
    """A plan in a chart of two metrics. Lower values are better for both metrics."""

    name: str
    about: str
    x: float
    y: float


def pareto_figure(
    points: Sequence[Point], x: str, *, room: float | None = None, log: bool = False, hours: bool = False
) -> Figure:
    """Plot step time over a second metric, with the Pareto front.

    The first point is the chosen plan. With `hours`, the y axis shows hours of training in place of step time.

    `room` is the upper limit of x, drawn as a line. The chart labels the points on the front, and points whose names
    are words.
    """
    factor, unit = (1.0, "h") if hours else (1e3, "ms") if max(p.y for p in points) < 1 else (1.0, "s")
    points = [replace(p, y=p.y * factor) for p in points]
    figure = Figure(Axis(x, grid=False), Axis("hours" if hours else f"{unit} per step"), height=330, legend=False)
    chosen, edge = points[0], pareto(points, lambda point: (point.x, point.y))
    if len(edge) > 1:
        at = [p.x for p in edge], [p.y for p in edge]
        figure.traces.append(Points("front", *at, GREEN, dash="dot", steps=True, hints=()))
    for name, shown, width, colour in (
        ("others", [p for p in points[1:] if p not in edge], 7, GREY),
        ("best", [p for p in edge if p is not chosen], 10, GREEN),
        ("chosen", [chosen], 17, VERMILLION),
    ):
        if shown:
            figure.traces.append(
                Points(
                    name,
                    [p.x for p in shown],
                    [p.y for p in shown],
                    colour,
                    width=0,
                    marks=width,
                    symbol="star" if name == "chosen" else "circle",
                    words=[p.name if p in edge or not p.name.isdecimal() else "" for p in shown],
                    side="right" if log else "left",
                    hints=[f"{_wrapped(p.about)}\n{digits(p.y)} {unit}, {digits(p.x)} {x}" for p in shown],
                )
            )
    if room is not None:
        figure.rules.append(Rule(room, f"{digits(room)} GiB each", PURPLE))
    xs, ys = [p.x for p in points] + ([room] if room else []), [p.y for p in points]
    if log:
        marks = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
        figure.y.log, figure.y.span = True, (min(ys) / 1.32, max(ys) * 1.32)
        figure.y.ticks = [(mark, f"{mark:g}") for mark in marks]
        figure.x.span = _padded(xs, 0.1, 0.3)
    else:
        figure.y.span, figure.x.span = _padded(ys, 0.12, 0.08), _padded(xs, 0.1, 0.08)
    return figure


def _padded(values: Sequence[float], before: float, after: float) -> tuple[float, float]:
    """Return the range of the values with a margin at both ends.

    The margins are fractions of the range. The chart shows positions rather than lengths, so the axis need not begin at
    0.
    """
    low, high = min(values), max(values)
    width = (high - low) or 0.2 * high or 1.0
    return max(0.0, low - before * width), high + after * width


def stacked_figure(
    plans: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    names: Mapping[str, str],
    what: str,
    room: float | None = None,
) -> Figure:
    """Draw a stacked bar for each plan, with the plan's text above the bar.

    `room` is the upper limit, drawn as a line.
    """
    rows = list(range(len(plans)))
    figure = Figure(
        Axis(what, from_zero=True),
        Axis(span=(len(plans) - 0.65, -0.7), ticks=(), grid=False),
        height=46 + 44 * len(plans),
        legend=False,
        stacked=True,
    )
    for part, values in parts.items():
        name = names.get(part, part)
        hints = [f"{name} {digits(value)} {what}" for value in values]
        figure.traces.append(Bars(name, list(values), rows, colours[part], thick=0.46, hints=hints))
    figure.notes = [Note(f"{row + 1}  {plan}", row - 0.42) for row, plan in enumerate(plans)]
    if room is not None:
        figure.rules.append(Rule(room, "", PURPLE))
    return figure


def holder_colours(holders: Sequence[str]) -> dict[str, str]:
    """Assign a colour to each category of memory."""
    return {holder: _HOLDER_COLOURS[i % len(_HOLDER_COLOURS)] for i, holder in enumerate(holders)}


def pipeline_figure(spans: Sequence[Span]) -> Figure:
    """Draw the work of each pipeline stage over time, one row per stage."""
    end = max(span.end_s for span in spans)
    factor, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    stages = sorted({span.stage for span in spans})
    ticks = stages if len(stages) <= 16 else stages[:: math.ceil(len(stages) / 16)]
    figure = Figure(
        Axis(f"{unit} since the step began", span=(0, end * factor)),
        Axis(span=(len(stages) - 0.5, -0.5), ticks=[(stage, f"stage {stage + 1}") for stage in ticks], grid=False),
        height=46 + max(22, min(34, 420 // len(stages))) * len(stages),
        legend=False,
    )
    for kind, colour in SPAN_COLOURS.items():
        own = [span for span in spans if span.what == kind]
        lengths, starts = [(s.end_s - s.start_s) * factor for s in own], [s.start_s * factor for s in own]
        hints = [
            f"{_span_words(span)}\nfrom {digits(start)} {unit}, for {digits(length)} {unit}"
            for span, start, length in zip(own, starts, lengths, strict=True)
        ]
        if own:
            y = [span.stage for span in own]
            figure.traces.append(Bars(kind, lengths, y, colour, starts=starts, thick=0.82, hints=hints))
    return figure


def scaling_figure(points: Sequence[ScaledPlan], chosen: int) -> Figure:
    """Plot the speedup over the number of devices, with the ideal, on log2 axes."""
    known = [p for p in points if p.best]
    ideal, speedups = [p.devices / known[0].devices for p in known], [p.speedup or 0.0 for p in known]
    at = [p.devices for p in known]
    top = max(*ideal, *speedups)
    marks = [2**n for n in range(math.ceil(math.log2(top)) + 1)]
    speed = f"times the speed of {known[0].devices:,}"
    figure = Figure(
        Axis("devices", log=True, ticks=[(n, f"{n:,}") for n in at], span=(at[0] / 1.15, at[-1] * 1.9)),
        Axis(speed, log=True, ticks=[(n, f"{n} ×") for n in marks], span=(0.76, top * 1.2)),
        height=330,
        legend=False,
    )
    hints = [
        f"{p.devices:,} devices\n{_wrapped(str(p.best.plan))}\n{seconds(p.best.prediction.step_time_s)} a step"
        for p in known
        if p.best
    ]
    figure.traces = [
        Points("ideal", at, ideal, GREY, dash="dash", hints=()),
        Points(
            "predicted",
            at,
            speedups,
            BLUE,
            width=2.5,
            marks=[15 if n == chosen else 9 for n in at],
            mark_colours=[VERMILLION if n == chosen else BLUE for n in at],
            words=[str(percent(p.efficiency or 0.0)) for p in known],
            side="below",
            hints=hints,
        ),
    ]
    return figure


def batches_figure(advice: BatchAdvice) -> Figure:
    """Plot throughput over the global batch, and mark the job's batch and the useful batch."""
    at = [point.global_batch for point in advice.points]
    special = {advice.now.global_batch: "now", advice.useful.global_batch: "useful"}
    if advice.keeps:
        special = {advice.now.global_batch: "now, and useful"}
    throughput = Points(
        "throughput",
        at,
        [point.throughput for point in advice.points],
        BLUE,
        width=2.5,
        marks=[13 if n in special else 8 for n in at],
        mark_colours=[VERMILLION if "useful" in special.get(n, "") else BLUE for n in at],
        words=[special.get(n, "") for n in at],
        side="below",
        hints=[
            f"{n:,} samples: {digits(p.throughput)} samples/s\n{_wrapped(str(p.best.plan))}"
            for n, p in zip(at, advice.points, strict=True)
        ],
    )
    return Figure(
        Axis("global batch, samples", log=True, ticks=[(n, f"{n:,}") for n in at]),
        Axis("samples per second", from_zero=True),
        traces=[throughput],
        legend=False,
    )


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 60))


def _span_words(span: Span) -> str:
    if span.what == "wait":
        return f"stage {span.stage + 1} waits"
    return f"stage {span.stage + 1}: {span.what} of microbatch {span.microbatch + 1}"


_HOUR_S = 3600.0


def write_choice_page(choice: ClusterChoice, command: str, file: Path) -> Path:
    """Write the page about a choice of machines.

    Raises:
        RunError: the file cannot be written.
    """
    facts = {
        "command": command,
        "paceline": version("paceline"),
        "prices": ", ".join(filter(None, (choice.offers.currency, choice.offers.as_of))) or "as listed",
    }
    return write_page(file, "choice.html.j2", definitions=DEFINITIONS, facts=facts, view=_choice_view(choice))


def _choice_view(choice: ClusterChoice) -> dict[str, Any]:
    """Return the variables of the template for a choice of machines."""
    first = choice.fastest or choice.front[0]
    options = [first, *(one for one in choice.options if one is not first)]
    points = [
        Point(str(i), f"{one.words}: {one.candidate.plan}", one.cost, one.bought.wall_s / _HOUR_S)
        for i, one in enumerate(options, 1)
    ]
    figure = pareto_figure(points, "cost of the whole training", log=True, hours=True)
    budget = [f"within {units.money(choice.budget)}"] if choice.budget is not None else []
    deadline = [f"in {span(choice.deadline_s)}"] if choice.deadline_s is not None else []
    return {
        "choice": choice,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "verdict": _verdict_of_choice(choice),
        "limits": [choice.amount.words, *budget, *deadline, f"± {percent(choice.error, 0)}"],
        "chart": Chart("choice", figure, f"Time over cost of {units.count(len(points), 'choice')} of machines."),
        # Pareto-optimal options, numbered as in the chart
        "rows": [(options.index(one) + 1, _option(choice, one)) for one in choice.front],
    }


def _verdict_of_choice(choice: ClusterChoice) -> str:
    fastest, cheapest = choice.fastest, choice.cheapest
    if fastest is None or cheapest is None:
        return f"{choice.nothing[0].upper()}{choice.nothing[1:]}."
    if fastest == cheapest:
        return f"The fastest and the cheapest: {_said(fastest)}."
    return f"The fastest: {_said(fastest)}. The cheapest: {_said(cheapest)}."


def _option(choice: ClusterChoice, option: Option) -> Row:
    mfu = option.candidate.prediction.mfu
    cells: list[Cell] = [
        span(option.bought.wall_s),
        units.money(option.cost),
        "" if mfu is None else percent(mfu),
        percent(option.bought.goodput, 1),
    ]
    return Row(option.words, cells, str(option.candidate.plan), loud=option in choice.within)


def _said(option: Option) -> str:
    return f"{option.words}, {span(option.bought.wall_s)} for {units.money(option.cost)}"
