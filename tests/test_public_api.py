"""The names of `paceline` itself. Some of them are also folders, which the import system binds to the same names."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.errors import JobError


def test_train_is_a_verb_also_after_the_folder_of_its_name_was_imported(tmp_path: Path) -> None:
    import paceline.training.loop

    for _ in range(2):  # the first call imports the folder
        with pytest.raises(JobError, match="no such file"):
            paceline.train(tmp_path / "absent.yaml")
    assert callable(paceline.training.loop.run_rank)  # type: ignore[attr-defined]  # and the folder is still there under the name


def test_every_public_name_leads_to_something_that_can_be_called() -> None:
    assert [name for name in paceline.__all__ if not callable(getattr(paceline, name))] == []
