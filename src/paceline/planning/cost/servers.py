"""Time that replicas spend with parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from paceline.planning.cost.layout import Layout

_INNER = ("fsdp", "tp", "pp", "cp", "ep")  # axes of a worker's ranks
_HOLD_PARTS = ("fsdp", "tp", "pp")


def exchanged(layout: Layout, parameters: float) -> tuple[float, float]:
    """Numbers that a replica pushes in a step, and gets back.

    Servers that own the parameters take only rows of sparse tables that its samples look up, and send those that all
    replicas have changed. Elsewhere, with a period, and where a replica has several ranks, tables are dense. Of these
    ranks the first pushes for all.

    Args:
        parameters: numbers of a rank's gradients.
    """
    if layout.served:
        parameters *= prod(getattr(layout, axis) for axis in _HOLD_PARTS)
    tables = layout.trace.sparse if layout.served and layout.sync_every == 1 and not _divided(layout) else ()
    dense = parameters - sum(table.rows * table.width for table in tables)
    samples = layout.samples * layout.microbatches
    own, everyones = (sum(table.touched(n * samples) for table in tables) for n in (1, layout.dp))
    return dense + own, dense + everyones


def joined_s(layout: Layout, parameters: float, send_s: Callable[[float, str], float]) -> float:
    """Seconds in which a worker's first rank gets gradients of the others, or sends parameters.

    Args:
        parameters: numbers of a rank's gradients.
        send_s: seconds of a message of so many bytes along an axis.
    """
    axes = _divided(layout)
    if not layout.served or not axes:
        return 0.0
    others = prod(getattr(layout, axis) for axis in axes) - 1
    return send_s(others * parameters * layout.gradient_bytes, axes[0])


def _divided(layout: Layout) -> list[str]:
    """Axes of a replica's ranks, the farthest first."""
    return sorted((axis for axis in _INNER if getattr(layout, axis) > 1), key=lambda axis: -layout.stride[axis])


def served_s(layout: Layout, up_s: float, down_s: float, work_s: float, apply_s: float) -> float:
    """Seconds that a step waits for servers, beside its own work.

    What replicas push may be coded, and what they get back is not. A server's link carries that of all replicas,
    divided by the servers. Where servers own the parameters nobody waits for others, but for a server that has more to
    do than one step lasts.

    Args:
        up_s, down_s: of one replica's gradients to a server that has nothing else to do, and back.
        work_s: compute of a step.
        apply_s: of an optimizer step on all parameters.
    """
    load = layout.dp / layout.servers
    if not layout.served:
        return max(1.0, load) * (up_s + down_s) / layout.sync_every
    alone_s = (up_s + down_s + apply_s) / layout.sync_every
    return max(alone_s, load * alone_s - work_s)
