"""Predicted memory of a row, in the parts that the row's measurement counts."""

from __future__ import annotations

import math
import re

from paceline.planning.cost.memory import memory
from paceline.planning.tables.layouts import Row


def memory_ratio(row: Row) -> float:
    """Return the measured memory of a row, relative to the prediction of the same parts."""
    return (row.memory_gib or math.nan) * 2**30 / counted_bytes(row)


def counted_bytes(row: Row) -> float:
    """Return the predicted bytes of what the row's `memory_gib` counts.

    Some tables state activations alone. torch's peak of allocated memory includes neither memory that is lost to
    fragmentation nor the context of the device, and torchtitan prints the peak of reserved memory, without the context.
    Other rows state the memory of the device.
    """
    about = f"{row.cells.get('notes', '')} {row.cells.get('derived_fields', '')}"
    held = memory(row.layout, first=bool(re.search(r"of (rank 0|the first stage)", about)))
    if re.search("activation memory", about, re.IGNORECASE):
        return held["activations"] + held["logits"]
    without: tuple[str, ...] = ()
    if re.search(r"memory is torch's|max[-_]allocated", about):
        without = ("runtime", "fragments")
    elif "torchtitan" in row.cells.get("framework", ""):
        without = ("runtime",)
    return sum(size for name, size in held.items() if name not in without)
