"""Published curves of scaling, predicted as `paceline bench simulate` does: how far off, and how often inside?

    python benchmarks/scale_published.py [--points] [--json]

Every curve of `benchmark/simulated/published_curves.yaml` is predicted with its own plans and machines; what published
curves lose beyond the planner is taken from the curves of all *other* sources. Of every curve: the measured and
predicted efficiency at its most devices, relative to its fewest; the error, with and without that loss; and whether the
measured one is inside of the 80 % interval.

The cost model's constants were fitted on a tenth of the rows of the tables that most of these curves are from
(`published_fit.py`); `benchmarks/published.py` scores step times with constants that no row of a table was used for.

Figures: `mean_error`, `median_error`, `worst_error` of the efficiency at the most devices; `planner_mean_error`,
`planner_median_error`: the same of the planner alone; `coverage_80`: part of the curves inside of the interval there,
and of all points (`coverage_80_points`); `mean_width`: of the interval, high / low - 1; `step_coverage_80`: part of all
step times inside of theirs; `curves`, `points`; `error_of_` with the name of each curve.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from measure import environment_line, parser_of
from paceline.planning.machines import Adjustment
from paceline_lab.simulated.measured_here import HIGH, LOW, HeldAgainst, ScaleError, held_against


@dataclass(frozen=True)
class Scored:
    """A published curve's point, and what was predicted of it.

    Attributes:
        planner: efficiency by the planner alone.
        low, middle, high: with the loss of other sources' curves.
        step_inside: True if the step time is inside of its interval.
    """

    held: HeldAgainst
    at: int
    planner: float
    low: float
    middle: float
    high: float
    step_inside: bool

    @property
    def measured(self) -> float:
        """Measured efficiency."""
        return self.held.efficiency[self.at]

    @property
    def error(self) -> float:
        """Relative error of the efficiency, with its sign."""
        return self.middle / self.measured - 1

    @property
    def inside(self) -> bool:
        """True if the measured efficiency is inside of the interval."""
        return self.low <= self.measured <= self.high


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, compare, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--points", action="store_true", help="print every point, not only the most devices")
    options = parser.parse_args(arguments)
    scored = score(held_against())
    _print(scored if options.points else at_most_devices(scored))
    found = figures(scored)
    print()
    for name, value in found.items():
        if not name.startswith("error_of_"):
            print(f"  {name} {value:.4g}")
    if options.json:
        print(json.dumps({"figures": found, "environment": {"machine": environment_line()}}))
    return 0


def score(curves: Sequence[HeldAgainst]) -> list[Scored]:
    """All points but the first of every curve, by what the curves of other sources lose."""
    scored = []
    for held in curves:
        error = ScaleError.of([one for one in curves if one.curve.source != held.curve.source])
        for at in range(1, len(held.rows)):
            grown, planner = math.sqrt(held.doublings(at)), held.predicted[at]
            low, middle, high = (planner * math.exp(error.quantile(level) * grown) for level in (LOW, 0.5, HIGH))
            inside = _step_inside(held, at, error.quantile(0.5) * grown)
            scored.append(Scored(held, at, planner, low, middle, high, inside))
    return scored


def at_most_devices(scored: Sequence[Scored]) -> list[Scored]:
    """The last point of every curve."""
    return [one for one in scored if one.at == len(one.held.rows) - 1]


def figures(scored: Sequence[Scored]) -> dict[str, float]:
    """Figures over all curves, and the error of each."""
    last = at_most_devices(scored)
    errors = [abs(one.error) for one in last]
    planner = [abs(one.planner / one.measured - 1) for one in last]
    return {
        "mean_error": float(np.mean(errors)),
        "median_error": float(np.median(errors)),
        "worst_error": max(errors),
        "planner_mean_error": float(np.mean(planner)),
        "planner_median_error": float(np.median(planner)),
        "coverage_80": float(np.mean([one.inside for one in last])),
        "coverage_80_points": float(np.mean([one.inside for one in scored])),
        "mean_width": float(np.mean([one.high / one.low - 1 for one in last])),
        "step_coverage_80": float(np.mean([one.step_inside for one in scored])),
        "curves": len(last),
        "points": len(scored),
        **{f"error_of_{one.held.curve.id}": one.error for one in last},
    }


def _step_inside(held: HeldAgainst, at: int, loss: float) -> bool:
    seconds = held.predicted_s[at] * math.exp(-loss)
    return held.seconds[at] in Adjustment().interval(held.rows[at].layout, seconds)


def _print(scored: Sequence[Scored]) -> None:
    print(f"{'curve':52} {'devices':>16} {'measured':>9} {'planner':>8} {'predicted':>9} {'error':>7}  80 % interval")
    for one in scored:
        devices = f"{one.held.curve.devices[0]:,} to {one.held.curve.devices[one.at]:,}"
        mark = "inside" if one.inside else "OUTSIDE"
        print(
            f"{one.held.curve.title[:52]:52} {devices:>16} {one.measured:9.1%} {one.planner:8.1%} {one.middle:9.1%} "
            f"{one.error:+7.1%}  {one.low:.0%} to {one.high:.0%}, {mark}"
        )


if __name__ == "__main__":
    sys.exit(main())
