"""A browser for the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, opened


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium with a fresh profile; for tests that are marked `needs_chromium`."""
    folder: Path = tmp_path_factory.mktemp("chromium")
    with opened(folder) as tab:
        yield tab
