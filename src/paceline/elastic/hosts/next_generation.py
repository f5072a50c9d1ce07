"""Generation that the ranks of hosts begin as soon as these have met anew.

What the new coordinator has to read and import before it runs the command keeps no rank waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from paceline.cluster.identity import interface_of
from paceline.elastic.hosts.agent_attempt import AgentAttempt
from paceline.elastic.hosts.hosts import Hosts
from paceline.elastic.hosts.link import Link
from paceline.elastic.hosts.messages import Announce
from paceline.elastic.membership import Membership
from paceline.elastic.place import RankPlace
from paceline.elastic.rendezvous import rendezvous
from paceline.elastic.run_lock import RunLock
from paceline.generation import Generation


class NextGeneration:
    """Generation that ranks which hosts have kept begin without the lost coordinator.

    Attributes:
        lock: of the run directory.
        generation: of the whole replicas that are left; of nobody, where too few hosts are.
        places: of all ranks of the run.
        rendezvous: where the ranks meet.

    Args:
        kept: the attempt on this host, which coordinates.
        has_ended: as of `RunLock`.

    Raises:
        RunError: somebody else trains in the run directory.
    """

    def __init__(
        self, hosts: Hosts, run: Path, kept: AgentAttempt, say: Callable[[str], object], has_ended: Callable[[], bool]
    ) -> None:
        self.places = _places(hosts, kept)
        with ExitStack() as made:
            # whoever has it decides
            self.lock = made.enter_context(RunLock(run, say, succeeds=True, has_ended=has_ended))
            # it is at this host, and not within it: hosts that were lost may come back
            meet_at = [_own_place(hosts), *self.places]
            self.rendezvous = made.enter_context(rendezvous(meet_at, kept.scratch, kept.begin.port or None))
            held = [kept.held(), *(link.held for link in hosts.links if link.held)]
            members = set() if hosts.too_few else whole_replicas(kept, hosts.links)
            self.generation = Generation(max(host.newest for host in held) + 1, tuple(sorted(members)))
            number, ranks = self.generation.number, list(self.generation.members)
            message = Announce(number, ranks, number, ranks, self.rendezvous.store)
            for link in hosts.links:
                if link.held:
                    link.send(message)
            kept.announce(message)
            self._made = made.pop_all()

    def close(self) -> None:
        """Give the run directory and the rendezvous back."""
        self._made.close()


def whole_replicas(kept: AgentAttempt, links: Sequence[Link]) -> set[int]:
    """Ranks on this host and those that live, and whose replica does."""
    ranks = {rank for held in (kept.held(), *(link.held for link in links)) if held for rank in held.entered}
    return Membership(len(kept.begin.places), replica_size=kept.begin.replica_ranks).whole(ranks)


def _places(hosts: Hosts, kept: AgentAttempt) -> list[RankPlace]:
    names, own = kept.begin.places, _own_place(hosts)
    numbers = {host.name: number for number, host in enumerate(hosts.cluster.hosts)}
    return [
        replace(
            own,
            local_rank=names[:rank].count(name),
            local_size=names.count(name),
            address=hosts.address_of(numbers[name]),
            number=numbers[name],
            host_name=name,
        )
        for rank, name in enumerate(names)
    ]


def _own_place(hosts: Hosts) -> RankPlace:
    return RankPlace(0, 1, hosts.address, interface_of(hosts.address) or "lo")
