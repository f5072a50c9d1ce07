"""What the benchmarks share: options, the lines that end them, and paceline's own loop, step by step."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Generator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from paceline.cluster.discover import discover, environment

if TYPE_CHECKING:
    from paceline.run.loop import Loop


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with a script's text as its help, and `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def print_figures(figures: Mapping[str, float | None]) -> None:
    """Print figures and environment as one line of JSON."""
    print(json.dumps({"figures": dict(figures), "environment": environment()}))


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
