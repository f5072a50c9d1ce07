"""Time of collectives: latency and bandwidth over the links of a group (NCCL's rings and trees)."""

from __future__ import annotations

from collections.abc import Callable
from math import log2, prod
from typing import NamedTuple

from paceline.planning.cost import constants
from paceline.planning.cost.layout import Layout


class LinkPath(NamedTuple):
    """Link path of a group's messages.

    Attributes:
        ranks: ranks of the group, on `hosts` hosts, `together` on each.
        bandwidth: achievable bytes per second that each rank sends in a ring.
        around_s: latency of once around the ring.
        tree_s: latency up and down a tree.
        inside, between: achievable bytes per second from one rank to others of its host, and to other hosts, where each
            sends to all.
    """

    ranks: int
    hosts: int
    bandwidth: float
    around_s: float
    tree_s: float
    together: int = 1
    inside: float = 1e12
    between: float = 1e12


def link_path(layout: Layout, axis: str) -> LinkPath:
    """Link path of the groups along an axis.

    A host's ranks of one group share all of its links to other hosts with the host's other groups.
    """
    return group_path(layout, getattr(layout, axis), layout.stride[axis])


def expert_path(layout: Layout) -> LinkPath:
    """Link path of the ranks that a layer's experts are divided among.

    Experts that are divided among ranks of other axes have the nearest ranks of a stage.
    """
    return group_path(layout, layout.expert_ranks, 1) if layout.expert_ranks else link_path(layout, "ep")


def group_path(layout: Layout, ranks: int, apart: int) -> LinkPath:
    """Link path of groups of so many ranks, which are so far apart."""
    machines = layout.machines
    inside = machines.device.inside
    within = inside.bandwidth * constants.LINK_TOP_INSIDE * _of_torus(layout, ranks)
    if ranks == 1 or apart * ranks <= machines.per_host:
        steps = (ranks - 1) * inside.latency_s
        return LinkPath(ranks, 1, within, steps, 2 * steps, ranks, _to_all(layout, ranks, within), within)
    together = max(1, min(ranks, machines.per_host // apart))
    hosts = -(-ranks // together)
    own = machines.between.bandwidth * constants.LINK_TOP_BETWEEN
    if hosts > machines.oversubscribed_beyond:
        own /= machines.oversubscription
    bandwidth = own * together
    if together > 1:
        bandwidth = min(bandwidth, within)
    around = hosts * machines.between.latency_s + (ranks - hosts) * inside.latency_s
    tree = 2 * (log2(hosts) * machines.between.latency_s + (together - 1) * inside.latency_s)
    return LinkPath(ranks, hosts, bandwidth, around, tree, together, _to_all(layout, together, within), own)


def _of_torus(layout: Layout, ranks: int) -> float:
    """Part of a device's links that a group uses.

    On a torus small groups lie along one dimension; of a mesh between pairs, a group has only its own links.
    """
    device, torus = layout.machines.device, layout.machines.device.torus
    if device.mesh and 1 < ranks < device.per_host:
        return (ranks - 1) / (device.per_host - 1)
    if not torus or ranks >= layout.machines.per_host:
        return 1.0
    return min(1.0, (1 if ranks <= constants.TORUS_SIDE else 2) / torus)


def _to_all(layout: Layout, ranks: int, within: float) -> float:
    """Bytes per second of a rank that sends to all others of its host.

    Half of the data crosses the middle of a torus: a side of s links carries 8 / s of a link for each rank.
    """
    torus = layout.machines.device.torus
    if not torus or ranks < 2:
        return within
    side = max(float(ranks) ** (1 / torus), 2.0)
    links: float = min(8 / side, 2.0 * torus)
    return within / (2 * torus) * links


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


def gather_s(nbytes: float, path: LinkPath, parts: float = 1.0) -> float:
    """Seconds of an all-gather or a reduce-scatter of `nbytes` on each rank. Each rank sends (n − 1) / n of them.

    NCCL's rings have a step for each rank; from many hosts on its PAT has a logarithm of them (NCCL 2.23).

    Args:
        parts: number of collectives in which the bytes go.
    """
    if path.ranks < 2:
        return 0.0
    latency = min(path.around_s, path.tree_s)
    return parts * (constants.COLLECTIVE_S + latency) + nbytes * (path.ranks - 1) / path.ranks / path.bandwidth


def all_to_all_s(nbytes: float, path: LinkPath, copies: float = 1.0, node_limit: int = 0) -> float:
    """Seconds of an all-to-all, on the slower of both levels of links.

    Args:
        nbytes: what a rank has for all ranks together.
        copies: experts that a token goes to.
        node_limit: hosts that these are on, at most, each of which gets a token once; 0: each expert gets its own copy.
    """
    if path.ranks < 2:
        return 0.0
    inside_s = nbytes * (path.ranks - 1) / path.ranks / path.inside
    outside_s = 0.0
    if path.hosts > 1:
        crossing = 1 - path.together / path.ranks
        if node_limit and copies > 1:
            reached = path.hosts * (1 - (1 - 1 / path.hosts) ** copies)
            crossing *= min(reached, node_limit) / copies
        outside_s = nbytes * crossing / path.between
    latency = constants.COLLECTIVE_S + min(path.around_s, path.tree_s)
    return latency + max(inside_s, outside_s)


def send_s(nbytes: float, layout: Layout, axis: str = "pp") -> float:
    """Seconds of one message from a rank to its neighbour along an axis."""
    inside = layout.stride[axis] * getattr(layout, axis) <= layout.machines.per_host
    link = layout.machines.device.inside if inside else layout.machines.between
    top = constants.LINK_TOP_INSIDE if inside else constants.LINK_TOP_BETWEEN
    return constants.COLLECTIVE_S + link.latency_s + nbytes / (link.bandwidth * top)


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
