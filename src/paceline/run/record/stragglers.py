"""Spread of ranks' compute times in a recorded run."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from paceline.errors import RunError
from paceline.run.record.run import WARM_UP_STEPS, Run

_FEWEST = 10  # steps of which a spread says something


def step_time_sigma(run: Run) -> float:
    """Standard deviation of a rank's compute time between steps, relative to its mean.

    The root mean square over the ranks, the first steps left out. Compute is timed before ranks wait for each other, so
    it has no other rank's delay in it.

    Raises:
        RunError: no rank has enough steps.
    """
    return math.sqrt(fmean(stdev(ratios) ** 2 for ratios in step_time_ratios(run)))


def step_time_ratios(run: Run) -> list[list[float]]:
    """Compute times of each rank's steps after the first ones, relative to their mean.

    Raises:
        RunError: no rank has enough steps.
    """
    found = []
    for rank in range(run.plan.ranks):
        times = [step["compute_s"] for step in run.steps(rank)[WARM_UP_STEPS:] if step.get("compute_s", 0.0) > 0]
        if len(times) >= _FEWEST:
            mean = fmean(times)
            found.append([time / mean for time in times])
    if not found:
        raise RunError(
            f"{run.path}: no rank has {_FEWEST} steps with compute times after the first {WARM_UP_STEPS}; give a "
            "number to --straggler-sigma instead"
        )
    return found
