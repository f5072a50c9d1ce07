"""A tracker: a line of a CSV file for every step."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.training.trackers import TrackerInfo

if TYPE_CHECKING:
    from paceline.engine.engine import StepResult

INFO = TrackerInfo("csv_tracker:track")


def track(file: str) -> Callable[[StepResult], None]:
    """Write step, loss and gradient norm into `file`; paceline calls this on the first rank only."""
    stream = open(file, "w", newline="", buffering=1)  # noqa: SIM115 - until the process ends
    table = csv.writer(stream)
    table.writerow(["step", "loss", "grad_norm"])
    return lambda result: table.writerow([result.step, result.loss, result.grad_norm])
