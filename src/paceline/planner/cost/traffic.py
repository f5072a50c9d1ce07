"""Time of collectives: latency and bandwidth over the links of a group (NCCL's rings and trees)."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from paceline.planner.cost import constants
from paceline.planner.cost.layout import Layout


class LinkPath(NamedTuple):
    """Link path of a group's messages.

    Attributes:
        ranks: ranks of the group, on `hosts` hosts.
        bandwidth: achievable bytes per second that each rank sends in a ring.
        around_s: latency of once around the ring.
        tree_s: latency up and down a tree.
    """

    ranks: int
    hosts: int
    bandwidth: float
    around_s: float
    tree_s: float


def link_path(layout: Layout, axis: str) -> LinkPath:
    """Link path of the groups along an axis.

    A host's ranks of one group share all of its links to other hosts with the host's other groups.
    """
    ranks: int = getattr(layout, axis)
    apart, machines = layout.stride[axis], layout.machines
    inside = machines.device.inside
    if ranks == 1 or apart * ranks <= machines.per_host:
        steps = (ranks - 1) * inside.latency_s
        return LinkPath(ranks, 1, inside.bandwidth * constants.LINK_TOP_INSIDE, steps, 2 * steps)
    together = max(1, min(ranks, machines.per_host // apart))
    hosts = -(-ranks // together)
    bandwidth = machines.between.bandwidth * together * constants.LINK_TOP_BETWEEN
    if together > 1:
        bandwidth = min(bandwidth, inside.bandwidth * constants.LINK_TOP_INSIDE)
    around = hosts * machines.between.latency_s + (ranks - hosts) * inside.latency_s
    tree = 2 * (log2(hosts) * machines.between.latency_s + (together - 1) * inside.latency_s)
    return LinkPath(ranks, hosts, bandwidth, around, tree)


def all_reduce_s(nbytes: float, path: LinkPath) -> float:
    """Seconds of an all-reduce over a ring, or a tree of less latency.

    Each rank sends 2 (n − 1) / n of the bytes (Thakur et al., 2005).
    """
    if path.ranks < 2:
        return 0.0
    return (
        constants.COLLECTIVE_S
        + 2 * nbytes * (path.ranks - 1) / path.ranks / path.bandwidth
        + min(2 * path.around_s, path.tree_s)
    )


def gather_s(nbytes: float, path: LinkPath) -> float:
    """Seconds of an all-gather or a reduce-scatter of `nbytes` on each rank. Each rank sends (n − 1) / n of them."""
    if path.ranks < 2:
        return 0.0
    return constants.COLLECTIVE_S + nbytes * (path.ranks - 1) / path.ranks / path.bandwidth + path.around_s


def all_to_all_s(nbytes: float, path: LinkPath) -> float:
    """Seconds of an all-to-all. Each rank sends a part of its bytes to every other."""
    return gather_s(nbytes, path)


def send_s(nbytes: float, layout: Layout, axis: str = "pp") -> float:
    """Seconds of one message from a rank to its neighbour along an axis."""
    inside = layout.stride[axis] * getattr(layout, axis) <= layout.machines.per_host
    link = layout.machines.device.inside if inside else layout.machines.between
    top = constants.LINK_TOP_INSIDE if inside else constants.LINK_TOP_BETWEEN
    return constants.COLLECTIVE_S + link.latency_s + nbytes / (link.bandwidth * top)
