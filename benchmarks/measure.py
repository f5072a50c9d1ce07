"""What the benchmarks share: the line that says where a figure was measured, and paceline's own loop, step by step."""

from __future__ import annotations

import os
import platform
from collections.abc import Generator
from importlib.metadata import version

from paceline.cluster.discover import discover
from paceline.run.loop import Loop


def environment_line() -> str:
    """Machine, versions and load, in one line."""
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    return f"{discover().describe()}; Python {platform.python_version()}, torch {version('torch')}; load average {load}"


def our_steps(loop: Loop) -> Generator[float, None, None]:
    """What `paceline train` does at every step, with its record, stop rule and status; yields the loss."""
    while True:
        for batch in loop.engine.loader:
            for info in loop.advance(batch):
                loop.after_step(info)
                yield info.result.loss
