"""A browser for the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome

from browser import Browser, opened, tab


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Headless Chromium with a fresh profile."""
    with opened(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def browser(chromium: Chrome) -> Iterator[Browser]:
    """A tab of its own; for tests that are marked `needs_chromium`."""
    with tab(chromium) as browser:
        yield browser
