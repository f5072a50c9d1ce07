"""Measured links between a group's ranks, and all-reduce times predicted from the measurements.

The predictions use the alpha-beta model (Thakur, Rabenseifner & Gropp, 2005, "Optimization of Collective Communication
Operations in MPICH"). A message of m bytes over an idle link takes latency + m / bandwidth. The two directions of a
link between hosts are independent. The time for arithmetic is ignored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import torch

from paceline.comm.group import Group
from paceline.device import synchronize

# bytes; 256 KiB take 84 ms at 25 Mbit/s; larger messages go only to fast hosts
_SMALL, _WARM, _LARGE, _LARGER = 2**10, 2**16, 2**18, 2**21
_FAST_S = 0.03  # a large message that is faster than this is repeated with a larger one
_BUDGET_S, _MOST = 0.04, 20  # time for the repetitions of a small call
_MEMORY_BYTES = 2**20


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of a link between two processes: latency in seconds, bandwidth in bytes per second."""

    latency_s: float
    bandwidth: float

    def message_s(self, nbytes: float) -> float:
        """Predict the time in seconds until a message of `nbytes` bytes has arrived."""
        return self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True)
class GroupLinks:
    """Speeds of the links between the ranks of a group.

    Attributes:
        hosts: host index of each rank.
        between: speed of messages between two hosts.
        inside: speed of messages between processes of one host.
        memory: speed within a host: `latency_s` is the time of a barrier of the host's ranks, and `bandwidth` is the
            bandwidth of a sum in memory.
        step_s: latency of messages if all ranks send around a ring at once. If ranks share cores, this latency is
            higher than the latency between two ranks.
        flat_step_s: latency of one of the 2 (n - 1) steps of the transport's own all-reduce.
    """

    hosts: tuple[int, ...]
    between: LinkSpeed
    inside: LinkSpeed
    memory: LinkSpeed
    step_s: float
    flat_step_s: float

    def all_reduce_s(self, algorithm: str, nbytes: int) -> float:
        """Predict the seconds of an all-reduce with `flat`, `ring` or `hierarchical`."""
        return {"flat": self.flat_s, "ring": self.ring_s, "hierarchical": self.hierarchical_s}[algorithm](nbytes)

    def flat_s(self, nbytes: int) -> float:
        """Predict the seconds of the transport's own all-reduce, a ring in rank order.

        Several of the ring's messages may cross the same link at once.
        """
        n = len(self.hosts)
        part, crossing = nbytes / n, _most_crossings(self.hosts)
        slowest = max(crossing * part / self.between.bandwidth, part / self._inside.bandwidth)
        return 2 * (n - 1) * (self.flat_step_s + slowest)

    def ring_s(self, nbytes: int) -> float:
        """Predict the seconds of a ring that crosses each link once.

        On n ranks, the ring takes 2 (n - 1) steps. Each step sends one n-th of the tensor at the speed of the slowest
        link.
        """
        n = len(self.hosts)
        return 2 * (n - 1) * (self.step_s + nbytes / n / min(self.between.bandwidth, self._inside.bandwidth))

    def hierarchical_s(self, nbytes: int) -> float:
        """Predict the seconds of the hierarchical all-reduce.

        The all-reduce has two barriers in each host, and a ring over the hosts. The ring overlaps with the sums in
        memory, so only the slower of the two counts.
        """
        h = len(set(self.hosts))
        travel = 2 * (h - 1) * nbytes / h / self.between.bandwidth
        return 2 * self.memory.latency_s + 2 * (h - 1) * self.step_s + max(travel, nbytes / self.memory.bandwidth)

    @property
    def _inside(self) -> LinkSpeed:
        """Speed of the link inside a host; infinite if no two ranks share a host."""
        return self.inside if len(set(self.hosts)) < len(self.hosts) else LinkSpeed(0.0, inf)


def _most_crossings(hosts: Sequence[int]) -> int:
    """Maximum number of messages that leave one host in a ring in rank order."""
    leaving = [a for a, b in pairwise((*hosts, hosts[0])) if a != b]
    return max((leaving.count(host) for host in set(leaving)), default=0)


def ranks_by_host(group: Group) -> list[int]:
    """Return all ranks, ordered by host."""
    return sorted(range(group.size), key=lambda r: group.hosts[r]) if group.spans_hosts else list(range(group.size))


def measure_links(group: Group) -> GroupLinks:
    """Measure the links of a group that spans hosts.

    Every rank must call this function, and gets the same result.
    """
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
    """Measure the latency between two ranks, and the bandwidth while all of `ranks` send."""
    latency_s = _latency_s(group, pair)
    timed(group, _messages(group, ranks, _WARM))  # a shaped link allows an initial burst, which is faster than the link
    nbytes, time_s = _LARGE, _quickest_s(group, _messages(group, ranks, _LARGE))
    if time_s < _FAST_S:
        nbytes, time_s = _LARGER, _quickest_s(group, _messages(group, ranks, _LARGER))
    return LinkSpeed(latency_s, nbytes / max(time_s, 1e-9))


def _quickest_s(group: Group, call: Callable[[], None]) -> float:
    """Measure a call twice and return the shorter time, which other work slowed less."""
    return min(timed(group, call) for _ in range(2))


def _messages(group: Group, ranks: Sequence[int], nbytes: int) -> Callable[[], None]:
    """Return a call that sends a message around the ring of `ranks`.

    Other ranks exchange no messages.
    """
    if group.rank not in ranks or len(ranks) == 1:
        return lambda: None
    place = ranks.index(group.rank)
    following, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8, device=group.device) for _ in range(2))
    return lambda: group.exchange([(following, sent)], [(before, received)])


def _memory(group: Group) -> LinkSpeed:
    host = group.host
    small, large = torch.zeros(_SMALL // 4, device=group.device), host.empty(_MEMORY_BYTES // 4, torch.float32)
    meeting_s = _small_s(group, lambda: host.all_reduce(small))
    timed(group, lambda: host.all_reduce(large))  # the first use of the memory is slower
    large_s = timed(group, lambda: host.all_reduce(large))
    host.release(large)
    return LinkSpeed(meeting_s, _MEMORY_BYTES / max(large_s, 1e-9))


def _small_s(group: Group, call: Callable[[], None]) -> float:
    """Measure the median time of a short call, after a call that opens the connections."""
    timed(group, call)
    once_s = timed(group, call)
    repeats = min(int(_BUDGET_S / max(once_s, 1e-9)), _MOST)
    return timed(group, call, repeats) if repeats > 1 else once_s


def timed(group: Group, call: Callable[[], object], repeats: int = 1) -> float:
    """Measure the slowest rank's median seconds of `repeats` calls, equal on every rank.

    All ranks begin together.
    """
    return timed_with_cpu(group, call, repeats)[0]


def timed_with_cpu(group: Group, call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Measure the seconds of calls, like `timed`, and the mean CPU seconds of a call."""
    times_s = []
    group.barrier()
    cpu_s = time.process_time()
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        synchronize(group.device)
        times_s.append(time.perf_counter() - started)
    cpu_s = (time.process_time() - cpu_s) / repeats
    own = torch.zeros((2, group.size), dtype=torch.float64, device=group.device)
    own[:, group.rank] = torch.tensor([statistics.median(times_s), cpu_s], dtype=torch.float64)
    group.all_reduce(own)
    return float(own[0].max()), float(own[1].mean())
