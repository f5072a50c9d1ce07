"""Time that replicas spend with parameter servers."""

from __future__ import annotations

from paceline.planner.cost.layout import Layout


def served_s(layout: Layout, one_way_s: float, work_s: float, apply_s: float) -> float:
    """Seconds that a step waits for servers, beside its own work.

    All replicas push and get back as many bytes; a server's link carries those of all of them, divided by the servers.
    Where servers own the parameters nobody waits for others, but for a server that has more to do than one step lasts.

    Args:
        one_way_s: of one replica's gradients to a server that has nothing else to do.
        work_s: compute of a step.
        apply_s: of an optimizer step on all parameters.
    """
    load = layout.dp / layout.servers
    if not layout.served:
        return 2 * max(1.0, load) * one_way_s / layout.sync_every
    alone_s = 2 * one_way_s + apply_s
    return max(alone_s, load * alone_s - work_s)
