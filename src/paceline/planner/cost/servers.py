"""Time that replicas spend with parameter servers."""

from __future__ import annotations

from paceline.planner.cost.layout import Layout


def exchanged(layout: Layout, parameters: float) -> tuple[float, float]:
    """Numbers that a replica pushes in a step, and gets back.

    Servers that own the parameters take only rows of sparse tables that its samples look up, and send those that all
    replicas have changed. Elsewhere tables have dense gradients.

    Args:
        parameters: numbers of the gradients.
    """
    tables = layout.trace.sparse if layout.served else ()
    dense = parameters - sum(table.rows * table.width for table in tables)
    samples = layout.samples * layout.microbatches
    own, everyones = (sum(table.touched(n * samples) for table in tables) for n in (1, layout.dp))
    return dense + own, dense + everyones


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
    alone_s = up_s + down_s + apply_s
    return max(alone_s, load * alone_s - work_s)
