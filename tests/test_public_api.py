"""The names of `paceline` itself."""

from __future__ import annotations

from pathlib import Path

import paceline


def test_no_folder_has_the_name_of_a_public_function() -> None:
    folders = {path.name for path in Path(paceline.__file__).parent.iterdir() if path.is_dir()}
    assert folders.isdisjoint(paceline.__all__)


def test_every_public_name_leads_to_something_that_can_be_called() -> None:
    assert [name for name in paceline.__all__ if not callable(getattr(paceline, name))] == []
