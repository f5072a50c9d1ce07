"""The names of `paceline` itself."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import paceline

FOLDER = "remote"  # its functions are public, too


def test_no_folder_has_the_name_of_a_public_function() -> None:
    folders = {path.name for path in Path(paceline.__file__).parent.iterdir() if path.is_dir()}
    assert folders.isdisjoint(set(paceline.__all__) - {FOLDER})


def test_every_public_name_leads_to_something_that_can_be_called() -> None:
    names = [f"{FOLDER}.{name}" for name in paceline.remote.__all__] + [n for n in paceline.__all__ if n != FOLDER]
    assert [name for name in names if not callable(attrgetter(name)(paceline))] == []
