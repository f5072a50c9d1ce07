"""The null model, to be beaten.

One share of the peak, fitted to the very rows it is scored on, and the formula of the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from paceline.planning.cost.compute import peak_flops
from published_rows import Row


def null_seconds(rows: Sequence[Row]) -> list[float]:
    """Of rows that have a measured time: FLOPs over the peak, times 1 + (pp − 1) / (chunks · microbatches).

    FLOPs include those of recomputation. The constant is the one with the least mean relative error: a weighted median.
    """
    bare = [_bare_s(row) for row in rows]
    ratios = sorted(
        (row.seconds / each, each / row.seconds) for row, each in zip(rows, bare, strict=True) if row.seconds
    )
    half = sum(weight for _, weight in ratios) / 2
    summed = accumulate(weight for _, weight in ratios)
    constant = next((ratio for (ratio, _), until in zip(ratios, summed, strict=True) if until >= half), 1.0)
    return [constant * each for each in bare]


def _bare_s(row: Row) -> float:
    layout = row.layout
    passes = 4 if layout.remat == "block" else 3
    flops = passes * layout.trace.flops * layout.global_batch / layout.ranks
    bubble = 1 + (layout.pp - 1) / (layout.chunks * layout.microbatches)
    return flops / peak_flops(layout.machines.device, layout.products or layout.precision) * bubble
