"""The page of `paceline plan`: what was chosen and why, in pictures and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from paceline import units
from paceline.planning.cost.estimate import timeline
from paceline.planning.cost.layout import PART_NAMES, PARTS
from paceline.planning.explain.batch_advice import BatchAdvice
from paceline.planning.explain.explain import Explanation, shares_of_time
from paceline.planning.explain.what_if import ScaledPlan
from paceline.planning.machines import factor_of
from paceline.planning.search.result import Candidate
from paceline.report import plan_charts as charts
from paceline.report.page import Card, Cell, Chart, Row, write_page
from paceline.units import Shown, percent, seconds, size

_BARS = 8  # plans whose step and memory are drawn part by part
_ROUNDS = 3  # microbatches drawn for each stage of a pipeline
_LISTED = 10  # plans that stand in the table; the rest can be opened
_MATTERS = 0.3  # of the memory; where all plans take less, it limits none
_GIB = 2**30


def write_plan_page(
    explanation: Explanation, scaling: Sequence[ScaledPlan], advice: BatchAdvice | None, command: str, file: Path
) -> Path:
    """Write the page about a plan.

    Raises:
        RunError: the file cannot be written.
    """
    found, view = explanation.found, PlanView(explanation, scaling, advice)
    considered = f"{found.considered:,} considered, {found.evaluated:,} predicted"
    facts = {
        "cluster": explanation.cluster.describe(),
        "command": command,
        "paceline": version("paceline"),
        "plans": f"{considered}, {found.pruned:,} set aside by a bound",
        "searched in": str(seconds(found.seconds)),
        "speeds": "measured on these machines" if explanation.measured else "of the catalogue",
    }
    on_cores = view.best.layout.machines.device.is_core
    return write_page(file, "plan.html.j2", facts=facts, on_cores=on_cores, view=view, colours=view.colours)


class PlanView:
    """An explanation as the template shows it."""

    def __init__(self, explanation: Explanation, scaling: Sequence[ScaledPlan], advice: BatchAdvice | None) -> None:
        self.explanation, self.scaled, self.advice = explanation, [p for p in scaling if p.prediction], advice
        self.not_scaled = [point for point in scaling if point.prediction is None]
        self.job, self.found, self.best = explanation.job, explanation.found, explanation.winner
        self.created = time.strftime("%Y-%m-%d %H:%M")
        self.colours = {f"part_{part}": colour for part, colour in charts.TIME_COLOURS.items()} | self.holders
        self.gap = percent(self.found.gap)

    # The headline

    @property
    def verdict(self) -> str:
        """The plan's speed in one sentence."""
        device, ranks = self.best.layout.machines.device, self.best.plan.ranks
        devices = f"{ranks:,} × {device.name}" if ranks > 1 else f"one {device.name}"
        if device.is_core:
            devices = f"{ranks:,} cores" if ranks > 1 else "one rank"
        return (
            f"{seconds(self.best.prediction.step_time_s)} a step on {devices}, as predicted, ± "
            f"{percent(self.best.interval.relative, 0)} (80 %, by {self.best.interval.rests_on})."
        )

    @property
    def badges(self) -> list[str]:
        """Badges of the job: parameters, tokens, global batch, precision."""
        tokens = [f"{self.explanation.tokens:,} tokens a sample"] if self.explanation.tokens > 1 else []
        parameters = f"{units.large(self.best.layout.trace.parameters)} parameters"
        return [parameters, *tokens, f"global batch {self.job.global_batch:,}", self.best.plan.precision_for(self.job)]

    @property
    def cards(self) -> list[Card]:
        """The winner's figures."""
        prediction, cost = self.best.prediction, self.explanation.cost(self.best)
        cards = [Card("predicted_step", seconds(prediction.step_time_s), f"{self.best.plan.ranks:,} ranks")]
        rate = units.rate(prediction.throughput)
        if self.explanation.tokens > 1:
            cards.append(
                Card("predicted_tokens", _thousands(prediction.throughput * self.explanation.tokens), str(rate))
            )
        else:
            cards.append(Card("predicted_throughput", rate))
        if prediction.mfu is not None:
            cards.append(Card("mfu", percent(prediction.mfu)))
        cards.append(
            Card(
                "device_memory",
                size(prediction.memory_bytes),
                f"of {size(self.explanation.capacity_bytes)} on each device",
            )
        )
        if cost is not None:
            cards.append(Card("cost", Shown(cost.value, units.digits(cost.value)), cost.of))
        return cards

    @property
    def limit(self) -> str:
        """The parts of the step, as a full sentence."""
        return self.explanation.limit[0].upper() + self.explanation.limit[1:]

    # The pictures

    @property
    def memory_chart(self) -> Chart:
        """Time against memory."""
        points = [
            charts.Point(str(i), str(c.plan), c.prediction.memory_bytes / _GIB, c.prediction.step_time_s)
            for i, c in self._numbered
        ]
        figure = charts.pareto(points, "GiB on the fullest device", room=self.room)
        return Chart(
            "pareto-memory",
            figure,
            f"Step time over memory of {len(points)} plans; the chosen one: {self._said(self.best)}.",
        )

    @property
    def cost_chart(self) -> Chart:
        """Time against cost, for this cluster's plans and for fewer and more devices."""
        priced = self.explanation.cluster.price_per_hour
        cost = self.explanation.cost(self.best)
        of = cost.of if cost else "a step"
        per_second = cost.value / (self.best.prediction.step_time_s * self.best.plan.ranks) if cost and priced else 1.0

        def at(candidate: Candidate | ScaledPlan) -> float:
            assert candidate.plan is not None
            assert candidate.prediction is not None
            return candidate.prediction.step_time_s * candidate.plan.ranks * per_second

        points = [charts.Point(str(i), str(c.plan), at(c), c.prediction.step_time_s) for i, c in self._numbered]
        for point in self.scaled:
            if point.devices != self.best.layout.machines.devices and point.prediction is not None:
                name = units.count(point.devices, "device")
                points.append(charts.Point(name, f"{name}: {point.plan}", at(point), point.prediction.step_time_s))
        figure = charts.pareto(
            points, f"cost of {of}" if priced else "device-seconds per step", log=len(self.scaled) > 1
        )
        return Chart(
            "pareto-cost",
            figure,
            f"Step time over the cost of {of}, for {len(points)} plans, on fewer and more devices as well.",
        )

    @cached_property
    def pipeline(self) -> tuple[Candidate, Chart] | None:
        """The timeline of the best plan that has a pipeline; None where none has."""
        piped = next((candidate for candidate in self.found.best if candidate.plan.pp > 1), None)
        if piped is None:
            return None
        drawn = min(piped.plan.microbatches, _ROUNDS * piped.plan.pp)
        note = ""
        if drawn < piped.plan.microbatches:
            every = f"{piped.plan.microbatches:,}"
            note = (
                f"Drawn with {drawn} microbatches; with all {every} the middle goes on in the same way, and the "
                "ends weigh less."
            )
        label = (
            f"What each of {piped.plan.pp} stages does in a step of {piped.plan}: forward, backward, waiting. {note}"
        )
        factor = factor_of(piped.layout)
        spans = [
            replace(span, start_s=factor * span.start_s, end_s=factor * span.end_s)
            for span in timeline(replace(piped.layout, microbatches=drawn))
        ]
        figure = charts.pipeline(spans)
        return piped, Chart("pipeline", figure, label, note=note)

    @property
    def spans(self) -> list[tuple[str, str]]:
        """The activities of pipeline stages as text, with their colours."""
        named = {"weight": "gradients of weights", "wait": "waiting"}
        return [(named.get(kind, kind), colour) for kind, colour in charts.SPAN_COLOURS.items()]

    @property
    def time_chart(self) -> Chart:
        """The step of the best plans, part by part."""
        shown = self.found.best[:_BARS]
        slowest = max(c.prediction.step_time_s for c in shown)
        factor, unit = (1e3, "ms") if slowest < 1 else (1.0, "s")
        times = [{part.name: part.value for part in shares_of_time(c)} for c in shown]
        parts = {part: [of_plan.get(part, 0.0) * factor for of_plan in times] for part in self.parts}
        figure = charts.stacked(
            [str(c.plan) for c in shown], parts, charts.TIME_COLOURS, PART_NAMES, f"{unit} per step"
        )
        return Chart("time", figure, " ".join(f"{c.plan}: {seconds(c.prediction.step_time_s)}." for c in shown))

    @property
    def held_chart(self) -> Chart:
        """The memory of the best plans, by what holds it."""
        shown = self.found.best[:_BARS]
        held = {holder: [c.prediction.memory.get(holder, 0.0) / _GIB for c in shown] for holder in self.holders}
        figure = charts.stacked([str(c.plan) for c in shown], held, self.holders, {}, "GiB", self.room)
        return Chart("held", figure, " ".join(f"{c.plan}: {size(c.prediction.memory_bytes)}." for c in shown))

    @property
    def room(self) -> float | None:
        """Memory of a device in GiB; None if all plans leave most of it free."""
        room, most = self.explanation.capacity_bytes, max(c.prediction.memory_bytes for c in self.found.best)
        return room / _GIB if most > _MATTERS * room else None

    @property
    def parts(self) -> list[str]:
        """The parts of a step that any of the shown plans spends time in."""
        there = {part.name for c in self.found.best[:_BARS] for part in shares_of_time(c)}
        return [part for part in PARTS if part in there]

    @cached_property
    def holders(self) -> dict[str, str]:
        """The users of memory in any of the shown plans, with their colours."""
        names = dict.fromkeys(
            name for c in self.found.best[:_BARS] for name, size in c.prediction.memory.items() if size > 0
        )
        return charts.holder_colours(list(names))

    @property
    def scaling_chart(self) -> Chart | None:
        """Speedup over devices; None where only one number of them can be predicted."""
        if len(self.scaled) < 2:
            return None
        label = " ".join(f"{p.devices:,} devices: {units.digits(p.speedup or 0)} times as fast." for p in self.scaled)
        return Chart("scaling", charts.scaling(self.scaled, self.best.layout.machines.devices), label)

    @property
    def batch_chart(self) -> Chart | None:
        """Throughput over the global batch, where that was asked for."""
        return Chart("batches", charts.batches(self.advice), " ".join(self.advice.lines)) if self.advice else None

    @property
    def _numbered(self) -> list[tuple[int, Candidate]]:
        return list(enumerate(self.found.best, 1))

    def _said(self, candidate: Candidate) -> str:
        return f"{seconds(candidate.prediction.step_time_s)}, {size(candidate.prediction.memory_bytes)}"

    # The tables

    @property
    def tables(self) -> list[list[tuple[int, Row]]]:
        """The best plans, and the others; a number with each."""
        rows = list(enumerate(self.candidates, 1))
        return [part for part in (rows[:_LISTED], rows[_LISTED:]) if part]

    @property
    def candidates(self) -> list[Row]:
        """All plans that were found, the best first."""
        rows = []
        for number, candidate in self._numbered:
            prediction, cost = candidate.prediction, self.explanation.cost(candidate)
            slower = prediction.step_time_s / self.best.prediction.step_time_s - 1
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

    @property
    def heads(self) -> list[str]:
        """Definitions' names for the columns of `candidates`; the second has none."""
        priced = self.explanation.cost(self.best) is not None
        return ["predicted_step", "", "device_memory", "predicted_throughput", "mfu", *(["cost"] if priced else [])]

    @property
    def devices(self) -> list[Row]:
        """The best plan for each number of devices."""
        rows = [
            Row(
                f"{p.devices:,}",
                [seconds(p.prediction.step_time_s), units.ratio(p.speedup), percent(p.efficiency)],
                str(p.plan),
            )
            for p in self.scaled
            if p.prediction is not None and p.speedup is not None and p.efficiency is not None
        ]
        return [*(Row(f"{p.devices:,}", ["no plan fits", "", ""], p.why) for p in self.not_scaled), *rows]

    @property
    def changes(self) -> list[Row]:
        """Changes that would help, the most effective first."""
        return [
            Row(row.what, [row.words or "not predicted"], row.about, loud=row.words.startswith("+"))
            for row in self.explanation.helps
        ]

    @property
    def failures(self) -> list[Row]:
        """Ways to go on after a failure; none where no rate was given."""
        outlook = self.explanation.failures
        return [Row(name, [percent(share, 2)], about) for name, share, about in outlook.rows] if outlook else []


def _thousands(tokens_per_s: float) -> Shown:
    if tokens_per_s < 1e4:
        return units.rate(tokens_per_s, "tokens/s")
    return Shown(tokens_per_s, units.digits(tokens_per_s / 1e3), "k tokens/s")
