"""Serving processes for tests."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked import python
from paceline_server.modules.host import connect

THINGS = Path(__file__).parent / "served_things.py"
NAMES = (
    *("Tower", "table", "linear", "dropout_net", "Nested", "Faulty", "Counter", "double", "squares", "not_a_module"),
)
DEADLINE_S = 30.0


def path_of(name: str) -> str:
    return f"{THINGS}:{name}"


@contextmanager
def serving(grace_s: float = 30.0, *, kill: bool = False) -> Iterator[Path]:
    """The socket of a process that serves everything in `served_things.py`.

    Args:
        kill: end it by SIGKILL, as what it runs may hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "served"
        code = (
            "import threading\n"
            "from pathlib import Path\n"
            "from paceline_server.modules.serve import serve\n"
            "from paceline.run.process import stop_signals\n"
            "stop = threading.Event()\n"
            "with stop_signals(lambda _: stop.set()):\n"
            f"    with serve({[path_of(name) for name in NAMES]!r}, Path({str(socket)!r}), grace_s={grace_s!r}):\n"
            "        stop.wait()\n"
        )
        process = python(code)
        try:
            with connect("started", socket, deadline_s=DEADLINE_S):
                pass
            yield socket
        finally:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
