"""Sparse gradients in the cost model.

Replicas sum and step on the rows that a batch looked up.
"""

from __future__ import annotations

from paceline.planning.cost.frameworks import PACELINE
from paceline.planning.cost.layout import Layout


def summed(layout: Layout, parameters: float) -> float:
    """Numbers whose all-reduce moves as much as the sum of a rank's gradients.

    Every rank gets the rows of all, as in an all-gather, which moves half of what an all-reduce does.
    """
    return parameters - _whole(layout) + layout.dp * _own(layout) / 2


def stepped(layout: Layout, parameters: float) -> float:
    """Numbers that an update reads and writes, of a rank's parameters."""
    return parameters - _whole(layout) + layout.dp * _own(layout)


def _whole(layout: Layout) -> float:
    return sum(table.rows * table.width for table in layout.trace.sparse) if _keeps_rows(layout) else 0.0


def _own(layout: Layout) -> float:
    samples = layout.samples * layout.microbatches
    return sum(table.touched(samples) for table in layout.trace.sparse) if _keeps_rows(layout) else 0.0


def _keeps_rows(layout: Layout) -> bool:
    """True where the engine does (`engine/sparse_tables.py`); an optimizer with a state steps on all rows."""
    if not layout.trace.sparse or layout.optimizer_bytes or not layout.machines.device.is_core:
        return False
    by_itself = layout.sync_every == 1 and not layout.servers and layout.framework == PACELINE
    return by_itself and layout.ranks == layout.dp
