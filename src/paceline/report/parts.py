"""Parts of a typical step, and the time lost compared with one device."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from paceline.engine.meter import PARTS
from paceline.report.words import listed
from paceline.run.record.run import timed
from paceline.units import percent

NAMES = {
    "data": "waiting for data",
    "compute": "compute that became slower",
    "bubble": "waiting in the pipeline",
    "comm": "exposed communication",
    "imbalance": "waiting for the slowest rank",
    "optimizer": "the optimizer",
    "checkpoint": "checkpoints",
}
_WORTH_NAMING = 0.05  # of what is lost


def typical_parts(lines: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return the seconds of each part in a rank's median step without warm-up, or None."""
    counted = timed(lines)
    if not counted:
        return None
    parts_s = [{part: s.get(f"{part}_s", 0.0) for part in PARTS} for s in counted]
    return typical(parts_s, [s["step_s"] for s in counted])


def where_it_goes(one: Mapping[str, float], many: Mapping[str, float], devices: int) -> str | None:
    """Describe the step time beyond the ideal, by part; None if nothing is lost.

    Args:
        one, many: seconds of each part of a step, on one device and on several.
    """
    lost_s = excess_of(one, many, devices)
    total_s = sum(lost_s.values())
    gross_s = {part: lost for part, lost in lost_s.items() if lost > 0}
    if total_s <= 0 or not gross_s:
        return None
    whole_s = sum(gross_s.values())
    largest = sorted(gross_s, key=lambda part: -gross_s[part])
    shares = {part: gross_s[part] / whole_s for part in largest}
    named = [f"{percent(share, 0)} {NAMES[part]}" for part, share in shares.items() if share > _WORTH_NAMING]
    step_ms, ideal_ms = sum(many.values()) * 1e3, sum(one.values()) * 1e3 / devices
    where = f"A step takes {step_ms:.3g} ms where 1/{devices} of one device's is {ideal_ms:.3g} ms; of what is lost, "
    return f"{where}{listed(named)}."


def excess_of(one: Mapping[str, float], many: Mapping[str, float], devices: int) -> dict[str, float]:
    """Seconds of each part on several devices beyond its fraction of one device's."""
    return {part: many[part] - one[part] / devices for part in many}


def typical(parts_s: Sequence[dict[str, float]], whole_s: Sequence[float]) -> dict[str, float]:
    """Typical parts of the median step, scaled to sum to it.

    They are means over the middle half of the steps; medians of parts would not sum to the median.
    """
    order = sorted(range(len(whole_s)), key=lambda i: whole_s[i])
    quarter = len(order) // 4
    middle = order[quarter : len(order) - quarter]
    means = {part: fmean(parts_s[i][part] for i in middle) for part in parts_s[0]}
    scale = statistics.median(whole_s) / (sum(means.values()) or 1.0)
    return {part: mean * scale for part, mean in means.items()}
