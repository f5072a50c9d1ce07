"""A tracker: a line of a CSV file for every number."""

from __future__ import annotations

import csv
from collections.abc import Mapping

from paceline.run.trackers import Status, TrackedRun, TrackerInfo

INFO = TrackerInfo("csv_tracker:CsvTracker")


class CsvTracker:
    """Appends step, name and value to `file`; paceline makes one for the first rank only."""

    id = ""  # where it logs to, runs have no identity

    def __init__(self, run: TrackedRun, file: str) -> None:
        self.stream = open(file, "a", newline="", buffering=1)  # noqa: SIM115 - until `close`
        self.table = csv.writer(self.stream)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        self.table.writerows([step, name, value] for name, value in values.items())

    def close(self, status: Status) -> None:
        """End the file."""
        self.stream.close()
