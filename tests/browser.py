"""A real browser for tests.

Headless Chromium, which opens a page from its file and tells all that happened while it did.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from leaks import of_session

_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # these start processes of their own accord, which would outlive the tab that they were started beside
    "--disable-features=SpareRendererForSitePerProcess,OptimizationGuideOnDeviceModel,OptimizationGuideModelExecution,"
    "OnDeviceModelPerformanceParams",
    "--hide-scrollbars",
)


class Browser:
    """One tab. Everything that it prints to the console or asks a network for is kept."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(
        self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> None:
        """Open a page from its file or address, at this width of the window, in the light or the dark theme.

        Without `scripts` the browser runs none of the page.
        """
        self.resize(width, height)
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
        self.driver.get("about:blank")  # what the browser's own first page asks for is not the page's
        self.driver.get_log("performance")
        self.driver.get(page if isinstance(page, str) else page.resolve().as_uri())

    def hints(self, css: str) -> list[str]:
        """The texts that the pointer shows within the elements that a CSS selector finds."""
        script = "return [...document.querySelectorAll(arguments[0] + ' title')].map((title) => title.textContent)"
        found: list[str] = self.run(script, css)
        return found

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page this many CSS pixels; a window of Chromium is never as narrow as a telephone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def all(self, css: str) -> list[WebElement]:
        """The elements that a CSS selector finds."""
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        """The only element that a CSS selector finds."""
        [element] = self.all(css)
        return element

    def hover(self, element: WebElement) -> None:
        """Scroll to the element and put the pointer on it."""
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        ActionChains(self.driver).move_to_element(element).perform()

    def run(self, script: str, *arguments: object) -> Any:
        """What the JavaScript `return`s."""
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        """What the page wrote to the console as a warning or an error.

        Scripts that failed, things that its policy refused.
        """
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses the page asked for, without the page itself and what lies inside it."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]

    def screenshot(self, file: Path) -> None:
        """A picture of the whole page."""
        height = self.run("return document.documentElement.scrollHeight")
        self.resize(self.run("return window.innerWidth"), height)
        self.driver.get_screenshot_as_file(str(file))


@contextmanager
def opened(folder: Path) -> Iterator[Chrome]:
    """Chromium with profile and temporary files in `folder`; every process of its own ends with it."""
    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (*_ARGUMENTS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    own = {"TMPDIR": str(folder), "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    driver = Chrome(options, Service(shutil.which("chromedriver"), env={**os.environ, **own}))
    try:
        driver.get("about:blank")
        with tab(driver):  # from here on nothing is started but what a tab needs
            pass
        yield driver
    finally:
        driver.quit()


@contextmanager
def tab(driver: Chrome) -> Iterator[Browser]:
    """A new tab, which knows nothing of those before; closed afterwards, and its process with it."""
    before = driver.current_window_handle
    driver.switch_to.new_window("tab")
    driver.get_log("browser")
    yield Browser(driver)
    driver.close()
    driver.switch_to.window(before)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Headless Chromium with a fresh profile, for all tests of this process."""
    with opened(tmp_path_factory.mktemp("chromium")) as driver:
        of_session.add(driver.service.process.pid)
        yield driver


@pytest.fixture
def browser(chromium: Chrome) -> Iterator[Browser]:
    """A tab of its own; for tests that are marked `needs_chromium`."""
    with tab(chromium) as opened_tab:
        yield opened_tab
