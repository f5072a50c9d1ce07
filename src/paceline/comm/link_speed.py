"""Predicted times of all-reduce algorithms from link latency and bandwidth: the alpha-beta model.

Formulas after Thakur, Rabenseifner & Gropp, 2005, "Optimization of Collective Communication Operations in MPICH". A
message of m bytes over an idle link takes latency + m / bandwidth; a link between hosts carries each direction by
itself; the arithmetic is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of a link between two processes: latency in seconds, bandwidth in bytes per second."""

    latency_s: float
    bandwidth: float

    def message_s(self, nbytes: float) -> float:
        """Seconds until a message of `nbytes` has arrived."""
        return self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True)
class GroupLinks:
    """The ways between the ranks of a group.

    Attributes:
        hosts: the host of each rank.
        between: messages from host to host.
        inside: messages between processes of one host.
        memory: meetings of all ranks of a host: `latency_s` for one, and the bytes of a sum in the host's memory per
            second.
        step_s: latency of messages that all ranks send around a ring at once, which ranks that share cores do more
            slowly than two alone.
        flat_step_s: latency of one of the 2 (n - 1) steps of the transport's own all-reduce.
    """

    hosts: tuple[int, ...]
    between: LinkSpeed
    inside: LinkSpeed
    memory: LinkSpeed
    step_s: float
    flat_step_s: float

    def flat_s(self, nbytes: int) -> float:
        """Seconds of the transport's own all-reduce: a ring in the order of the ranks.

        Several of its messages may cross the same link at once.
        """
        n = len(self.hosts)
        part, crossing = nbytes / n, _most_crossings(self.hosts)
        slowest = max(crossing * part / self.between.bandwidth, part / self._inside.bandwidth)
        return 2 * (n - 1) * (self.flat_step_s + slowest)

    def ring_s(self, nbytes: int) -> float:
        """Seconds of a ring that crosses each link once.

        It takes 2 (n - 1) steps of one n-th of the tensor, as slow as the slowest link.
        """
        n = len(self.hosts)
        return 2 * (n - 1) * (self.step_s + nbytes / n / min(self.between.bandwidth, self._inside.bandwidth))

    def hierarchical_s(self, nbytes: int) -> float:
        """Seconds of the hierarchical all-reduce over h hosts.

        It has two meetings in each host, and a ring over the hosts that hides the sums in memory unless these are
        slower.
        """
        h = len(set(self.hosts))
        travel = 2 * (h - 1) * nbytes / h / self.between.bandwidth
        return 2 * self.memory.latency_s + 2 * (h - 1) * self.step_s + max(travel, nbytes / self.memory.bandwidth)

    @property
    def _inside(self) -> LinkSpeed:
        """The link inside a host; infinitely fast if no two ranks share one."""
        return self.inside if len(set(self.hosts)) < len(self.hosts) else LinkSpeed(0.0, inf)


def _most_crossings(hosts: Sequence[int]) -> int:
    """Messages that leave one host in a ring in rank order, at most."""
    leaving = [a for a, b in pairwise((*hosts, hosts[0])) if a != b]
    return max((leaving.count(host) for host in set(leaving)), default=0)
