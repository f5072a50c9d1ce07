"""TensorBoard as a tracker. Runs of `paceline train` have its events already, in their directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.run.tensorboard import TensorBoard
from paceline.run.trackers.tracker import Status, TrackedRun


class ToTensorBoard:
    """Writes events into `folder`, or into one of the run."""

    id = ""

    def __init__(self, run: TrackedRun, folder: str | Path = "") -> None:
        self._board = TensorBoard(Path(folder) if folder else run.folder / "tensorboard")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._board.scalars(step, dict(values))

    def close(self, status: Status) -> None:
        """See `Tracker`."""
        self._board.close()
