"""Serving processes on this machine for the examples, each a `paceline serve`, and connections to them by name."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import paceline_server as remote


@contextmanager
def serving(names: Sequence[str], what: Sequence[str]) -> Iterator[None]:
    """Start a process for each name that serves these import paths, and connect to it."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name in names:
            command = [sys.executable, "-m", "paceline", "serve", *what, "--listen", str(Path(folder) / name)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for name in names:
            stack.enter_context(remote.connect(name, Path(folder) / name))
        yield
