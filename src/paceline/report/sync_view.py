"""Replicas on a run's page: their rule, bytes sent, and effects of compression."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from paceline import units
from paceline.planning.plan import Plan
from paceline.report import charts
from paceline.report.page import Chart, Row
from paceline.report.run_record import RunRecord
from paceline.units import Shown

DOMINATES = 0.5  # of a step, from where communication is what a user should look at first


class SyncView:
    """The replicas of a run as the template shows them.

    `comm_share`: of a step, that communication takes; None where no step is timed.
    """

    def __init__(self, record: RunRecord, plan: Plan, comm_share: float | None) -> None:
        self.record, self.plan, self.comm_share = record, plan, comm_share
        self.sent = {rank: per_step(steps, "wire_bytes") for rank, steps in record.ranks.items()}
        self.saved = {rank: per_step(steps, "saved_bytes") for rank, steps in record.ranks.items()}
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
        found = []
        if sent := _largest(self.sent):
            found.append(Row("wire", [units.size(sent)]))
        if (saved := _largest(self.saved)) is not None and self.errors:
            found.append(Row("saved", [units.size(saved)]))
            median = statistics.median(error for _, error in self.errors)
            found.append(Row("compression_error", [units.number(median)]))
        return found

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
        rank = max(
            (rank for rank, sent in self.sent.items() if sent), key=lambda rank: _mean(self.sent[rank]), default=None
        )
        if rank is None or not _mean(self.sent[rank]):
            return
        steps = [step for step, _, _ in self.sent[rank]]
        sent = [bytes_ / 1024 for _, _, bytes_ in self.sent[rank]]
        series = [charts.Line("sent", steps, sent, charts.VERMILLION)]
        if self.errors:
            whole = [a + saved / 1024 for a, (_, _, saved) in zip(sent, self.saved[rank], strict=True)]
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


# step of a reading, steps since the one before, what a counter grew by per step meanwhile
Growth = list[tuple[int, int, float]]


def per_step(steps: list[dict[str, Any]], counter: str) -> Growth:
    """Growth of a counter per step between its readings."""
    found: Growth = []
    before = 0
    for step in steps:
        if counter in step.get("use", {}) and step["step"] > before:
            passed = step["step"] - before
            found.append((step["step"], passed, step["use"][counter] / passed))
            before = step["step"]
    return found


def _mean(growth: Growth) -> float:
    return sum(passed * each for _, passed, each in growth) / sum(passed for _, passed, _ in growth)


def _largest(of_ranks: dict[int, Growth]) -> float | None:
    return max((_mean(growth) for growth in of_ranks.values() if growth), default=None)


def _links_of(event: dict[str, Any]) -> Iterator[tuple[str, dict[str, int]]]:
    links = event.get("links")
    if event["event"] == "links" and isinstance(links, dict):
        yield from links.items()
