"""TensorBoard reads what we write, and a place that cannot be written is an error of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import RunError
from paceline.run.trackers.services import TensorBoard


def test_tensorboard_reads_every_scalar_with_its_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "tensorboard")
    board.scalars(1, {"train/loss": 2.5, "train/lr": 0.1})
    board.scalars(2, {"train/loss": 1.25})
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "train/lr"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.5), (2, 1.25)]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/tensorboard/events\.out\S+ cannot be written: Not a directory"):
        TensorBoard(tmp_path / "file" / "tensorboard")
