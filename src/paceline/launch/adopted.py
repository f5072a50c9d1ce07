"""Attempt that goes on under another launcher, after the coordinating host was lost."""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from paceline.cluster.identity import interface_of
from paceline.epoch import Epoch
from paceline.files import write_whole
from paceline.launch.attempt import Attempt, Setting
from paceline.launch.failure import oom_kills
from paceline.launch.host.hosts import Hosts
from paceline.launch.host.remote import RemoteRank, RemoteRanks, RunFolder
from paceline.launch.host.served import ServedAttempt
from paceline.launch.host.takeover import Takeover
from paceline.launch.place import RankPlace
from paceline.launch.recovery import Recovery
from paceline.launch.rendezvous import rendezvous
from paceline.launch.signals import StopSignals
from paceline.training.recovery.member import store_file


class AdoptedAttempt(Attempt):
    """The ranks that hosts have kept since the coordinator was lost.

    They meet in a new epoch, at a store of this host's. Those of the lost host are lost.
    """

    def __init__(
        self,
        setting: Setting,
        signals: StopSignals,
        on_tick: Callable[[], None] | None,
        on_event: Callable[[str, dict[str, Any]], None] | None,
        hosts: Hosts,
    ) -> None:
        assert hosts.takeover is not None
        assert hosts.takeover.attempt is not None
        self.hosts, self.takeover, self.served = hosts, hosts.takeover, hosts.takeover.attempt
        places = _places(hosts, hosts.takeover, self.served)
        super().__init__(replace(setting, places=places, number=self.served.begin.attempt), signals, on_tick, on_event)

    def __enter__(self) -> Self:
        served, setting = self.served, self.setting
        self._oom_kills = oom_kills()
        with self._made:
            self._made.callback(served.end)
            self.folder, self.board, self.starter = served.scratch, served.board, served.starter
            folder = setting.folder or RunFolder(served.scratch)
            adopted = self.hosts.adopted(self.board, self.folder, folder, self.signals, self.poll)
            self.remote = self._made.enter_context(adopted)
            self._made.callback(self._close_ranks)
            self._rendezvous = self._made.enter_context(rendezvous(setting.places, self.folder, setting.port))
            write_whole(store_file(self.folder), self._rendezvous.store)
            self.remote.adopt(self._rendezvous.store)
            newest, entered = self._take(self.remote)
            self.recovery = Recovery(self, Epoch(newest + 1, entered))
            self._made = self._made.pop_all()
        return self

    def _take(self, remote: RemoteRanks) -> tuple[int, tuple[int, ...]]:
        """Take the ranks over.

        Returns:
            The newest epoch that any host knows, and the ranks that have a state to go on from.
        """
        held = [self.served.held(), *(link.held for link in remote.links if link.held)]
        here = {rank.number: rank for rank in self.served.ranks if rank.code is None}
        for number in range(self.setting.ranks):
            self.ranks.append(here.get(number) or remote.ranks.get(number) or self._lost(number, remote))
        for rank in here.values():
            self.poll.register(rank.pidfd, select.POLLIN)
        self.served.ranks[:] = [rank for rank in self.served.ranks if rank.number not in here]
        entered = sorted(number for host in held for number, _, epoch in host.ranks if epoch >= 0)
        return max(host.newest for host in held), tuple(entered)

    def _lost(self, number: int, remote: RemoteRanks) -> RemoteRank:
        rank = RemoteRank(number, self.takeover.link, self.folder / f"rank-{number}.error")
        remote.ranks[number] = rank
        return rank


def _places(hosts: Hosts, takeover: Takeover, served: ServedAttempt) -> list[RankPlace]:
    """Place of each rank; lost ones have this host's, under their own host's name."""
    own = RankPlace(0, 1, hosts.address, interface_of(hosts.address) or "lo", host_name=takeover.link.name)
    places = [own] * served.begin.ranks
    entries = [(0, hosts.cluster.hosts[0].name, hosts.address, served.held())]
    entries += [(link.number, link.name, link.address, link.held) for link in hosts.links if link.held]
    for host, name, address, held in entries:
        for local, (number, _, _) in enumerate(held.ranks):
            places[number] = replace(
                own, local_rank=local, local_size=len(held.ranks), address=address, number=host, host_name=name
            )
    return places
