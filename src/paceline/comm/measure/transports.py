"""Latency and bandwidth of the links between a group's ranks, measured in under a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.comm.group import Group
from paceline.comm.link_speed import GroupLinks, LinkSpeed
from paceline.comm.measure.speed import timed

# bytes; 256 KiB take 84 ms at 25 Mbit/s, and more is sent only to fast hosts
_SMALL, _WARM, _LARGE, _LARGER = 2**10, 2**16, 2**18, 2**21
_FAST_S = 0.03  # a large message that takes less is repeated with a larger one
_BUDGET_S, _MOST = 0.04, 20  # for the repetitions of a small call
_MEMORY_BYTES = 2**20


def ranks_by_host(group: Group) -> list[int]:
    """The ranks ordered so that those of a host are neighbours."""
    return sorted(range(group.size), key=lambda r: group.hosts[r]) if group.spans_hosts else list(range(group.size))


def measure_links(group: Group) -> GroupLinks:
    """Measure the links of a group that spans hosts. Every rank calls this and gets the same."""
    firsts = [group.hosts.index(host) for host in dict.fromkeys(group.hosts)]
    on_hosts = [[r for r, h in enumerate(group.hosts) if h == group.hosts[first]] for first in firsts]
    fullest = max(on_hosts, key=len)
    together = next(ranks for ranks in on_hosts if group.rank in ranks)
    small = torch.zeros(_SMALL // 4, device=group.device)
    flat_s = _small_s(group, lambda: group.all_reduce(small))
    return GroupLinks(
        hosts=group.hosts,
        between=_speed(group, firsts[:2], firsts),
        inside=_speed(group, fullest[:2], together),
        memory=_memory(group),
        step_s=_latency_s(group, ranks_by_host(group)),
        flat_step_s=flat_s / (2 * (group.size - 1)),
    )


def _latency_s(group: Group, ranks: Sequence[int]) -> float:
    return _small_s(group, _messages(group, ranks, _SMALL))


def _speed(group: Group, pair: Sequence[int], ranks: Sequence[int]) -> LinkSpeed:
    """Latency between two ranks, and bandwidth with `ranks` all sending to the next at once."""
    latency_s = _latency_s(group, pair)
    timed(group, _messages(group, ranks, _WARM))  # what a shaped link lets through at once does not tell its rate
    nbytes, time_s = _LARGE, _quickest_s(group, _messages(group, ranks, _LARGE))
    if time_s < _FAST_S:
        nbytes, time_s = _LARGER, _quickest_s(group, _messages(group, ranks, _LARGER))
    return LinkSpeed(latency_s, nbytes / max(time_s, 1e-9))


def _quickest_s(group: Group, call: Callable[[], None]) -> float:
    """The shorter of two times, as other work on the hosts only slows a message."""
    return min(timed(group, call) for _ in range(2))


def _messages(group: Group, ranks: Sequence[int], nbytes: int) -> Callable[[], None]:
    """Messages to the next and from the one before of some ranks. The others only wait for what these measured."""
    if group.rank not in ranks or len(ranks) == 1:
        return lambda: None
    place = ranks.index(group.rank)
    following, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8, device=group.device) for _ in range(2))
    return lambda: group.exchange([(following, sent)], [(before, received)])


def _memory(group: Group) -> LinkSpeed:
    """Sums over the ranks of a host."""
    host = group.host
    small, large = torch.zeros(_SMALL // 4, device=group.device), host.empty(_MEMORY_BYTES // 4, torch.float32)
    meeting_s = _small_s(group, lambda: host.all_reduce(small))
    timed(group, lambda: host.all_reduce(large))  # untouched memory
    large_s = timed(group, lambda: host.all_reduce(large))
    host.release(large)
    return LinkSpeed(meeting_s, _MEMORY_BYTES / max(large_s, 1e-9))


def _small_s(group: Group, call: Callable[[], None]) -> float:
    """The median time of a call that takes little, after one that makes connections."""
    timed(group, call)
    once_s = timed(group, call)
    repeats = min(int(_BUDGET_S / max(once_s, 1e-9)), _MOST)
    return timed(group, call, repeats) if repeats > 1 else once_s
