"""What the benchmarks share: the line that says where a figure was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from paceline.cluster.discover import discover


def environment_line() -> str:
    """Machine, versions and load, in one line."""
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    return f"{discover().describe()}; Python {platform.python_version()}, torch {version('torch')}; load average {load}"
