"""Table of a rank's memory by part, as predicted and as measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.cost.memory import PARTS, by_part
from paceline.planning.plan import Plan
from paceline.units import size

PREDICTED = "predicted_memory"  # field of the event `start`


@dataclass(frozen=True)
class MemoryTable:
    """Memory of one rank in bytes, by the parts in `planning.cost.memory.PARTS`.

    A part is missing if it is unknown.

    Attributes:
        measured: measured bytes.
        total: measured bytes of the whole rank; None if unknown.
        predicted: predicted bytes.
        of: title of the measured column.
    """

    measured: Mapping[str, float]
    total: float | None
    predicted: Mapping[str, float] = field(default_factory=dict)
    of: str = "measured peak"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the name, predicted size and measured size of each part, and the totals."""
        # the allocator of a device does not hold the runtime
        predicted = {p: v for p, v in self.predicted.items() if p != "runtime" or "activations" not in self.measured}
        found = [(part, predicted.get(part), self.measured.get(part)) for part in PARTS]
        found.append(("total", sum(predicted.values()) or None, self.total))
        return [(name, *map(_shown, values)) for name, *values in found if any(values)]  # type: ignore[misc]

    def lines(self) -> list[str]:
        """Return the table as lines of text."""
        return [f"{name:14}{before:>12}{now:>15}" for name, before, now in [("", "predicted", self.of), *self.rows()]]


def _shown(value: float | None) -> str:
    return "" if value is None else str(size(value))


def predicted_parts(job: Job, cluster: Cluster, plan: Plan) -> dict[str, int] | None:
    """Predict the bytes of the rank that needs the most memory, by part.

    The result is None if the plan cannot be predicted. The model is built and traced without memory.
    """
    from paceline.planning.prediction import modelled  # imports the cost model, which most runs do not need

    # the model is the user's code, and no run depends on a prediction
    with suppress(Exception):
        return {part: round(value) for part, value in by_part(modelled(job, cluster, plan).memory).items()}
    return None


def table_of(
    ranks: Mapping[int, Sequence[Mapping[str, Any]]],
    events: Iterable[Mapping[str, Any]],
    plan: Plan,
    predicted: Mapping[str, float] | None = None,
) -> MemoryTable | None:
    """Return the table of the rank with the largest peak.

    The result is None if no rank recorded its memory.

    Args:
        ranks: step records of each rank.
        predicted: predicted bytes by part; None uses the prediction that the run recorded for `plan`, if any.
    """
    tables = [table for steps in ranks.values() if (table := _of_rank(steps)) is not None]
    if not tables:
        return None
    if predicted is None:
        begun = (e.get(PREDICTED) for e in events if e.get("event") == "start" and e.get("plan") == str(plan))
        predicted = _numbers(next(begun, None))
    fullest = max(tables, key=lambda table: table.total or 0.0)
    return MemoryTable(fullest.measured, fullest.total, predicted)


def _of_rank(steps: Sequence[Mapping[str, Any]]) -> MemoryTable | None:
    uses = [step["use"] for step in steps if isinstance(step.get("use"), Mapping)]
    newest: Mapping[str, Any] = next((use for use in reversed(uses) if "weights_bytes" in use), {})
    measured = _numbers({part: newest.get(f"{part}_bytes") for part in PARTS})
    if not measured:
        return None
    return MemoryTable(measured, sum(measured.values()) if "activations" in measured else resident_peak(uses))


def resident_peak(uses: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the peak resident memory of a rank in bytes, corrected for shared pages.

    The correction is the latest difference between the resident and the proportional set size (RSS and PSS).
    """
    peaks = [use.get("peak_memory_bytes", use.get("memory_bytes", 0)) for use in uses]
    shared = next((use["memory_bytes"] - use["pss_bytes"] for use in reversed(uses) if "pss_bytes" in use), 0)
    return max(peaks) - shared if peaks else None


def _numbers(parts: object) -> dict[str, float]:
    found = parts if isinstance(parts, Mapping) else {}
    # another program may have written the record
    return {part: value for part in PARTS if isinstance(value := found.get(part), int | float) and 0 <= value < 2**63}
