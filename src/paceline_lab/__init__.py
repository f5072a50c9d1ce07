"""Laboratory: benchmarks, comparisons with other systems, simulated scaling, fault injection, and configuration import.

The public API is the function `bench`. For the code, read `scaling/protocol.py` first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline_lab.scaling.protocol import bench

__all__ = ["bench"]


def __getattr__(name: str) -> Any:
    if name != "bench":
        raise AttributeError(f"module 'paceline_lab' has no attribute {name!r}")
    return importlib.import_module("paceline_lab.scaling.protocol").bench
