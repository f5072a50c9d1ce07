"""The public names of the packages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import paceline
import paceline_lab
import paceline_server

PACKAGES = [paceline, paceline_lab, paceline_server]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_the_name_of_a_public_function(package: ModuleType) -> None:
    folders = {path.name for path in Path(str(package.__file__)).parent.iterdir() if path.is_dir()}
    assert folders.isdisjoint(package.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_leads_to_something_that_can_be_called(package: ModuleType) -> None:
    assert [name for name in package.__all__ if not callable(getattr(package, name))] == []
