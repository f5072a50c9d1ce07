"""Attempt that goes on under another launcher, after the coordinating host was lost."""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from paceline.cluster.identity import interface_of
from paceline.files import write_whole
from paceline.launch.attempt import Attempt, Setting
from paceline.launch.failure import oom_kills
from paceline.launch.host.hosts import Hosts
from paceline.launch.host.remote import RemoteRanks, RunFolder
from paceline.launch.host.served import ServedAttempt
from paceline.launch.place import RankPlace
from paceline.launch.recovery import Recovery
from paceline.launch.rendezvous import rendezvous
from paceline.launch.signals import StopSignals
from paceline.training.recovery.member import store_file


class AdoptedAttempt(Attempt):
    """The ranks that hosts have kept since the coordinator was lost.

    They meet in a new epoch, at a store of this host's. Others have ended, and are replaced once their host is there.
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
        self.hosts, self.served = hosts, hosts.takeover.attempt
        places = _places(hosts, self.served)
        super().__init__(replace(setting, places=places, number=self.served.begin.attempt), signals, on_tick, on_event)

    def __enter__(self) -> Self:
        served, setting = self.served, self.setting
        self._oom_kills = oom_kills()
        with self._made:
            self._made.callback(served.end)
            self.folder, self.board, self.starter = served.scratch, served.board, served.starter
            folder, numbers = setting.folder or RunFolder(served.scratch), {place.number for place in setting.places}
            remote = self.hosts.remote(numbers, self.board, self.folder, folder, self.signals, self.poll)
            self.remote = self._made.enter_context(remote)
            self._made.callback(self._close_ranks)
            # it is at this host, and not within it: hosts that were lost may come back
            meet_at = [_own_place(self.hosts), *setting.places]
            self._rendezvous = self._made.enter_context(rendezvous(meet_at, self.folder, setting.port))
            write_whole(store_file(self.folder), self._rendezvous.store)
            self.remote.adopt(setting.begin(served.begin.places), self._rendezvous.store)
            self._take(self.remote)
            self._made = self._made.pop_all()
        return self

    def _take(self, remote: RemoteRanks) -> None:
        """Take the ranks over, and begin an epoch after all that any host knows."""
        held = [self.served.held(), *(link.held for link in remote.links if link.held)]
        here = {rank.number: rank for rank in self.served.ranks}
        self.served.ranks.clear()
        for number in range(self.setting.ranks):
            self.ranks.append(here.get(number) or remote.ranks.get(number) or self._start(number, None))
        for rank in here.values():
            if rank.code is None:
                self.poll.register(rank.pidfd, select.POLLIN)
        newest = max(host.newest for host in held)
        self.recovery = Recovery(self, newest + 1, {number for host in held for number in host.entered})
        for link in remote.links:
            if link.held is None and link.lost is None:  # it had just come back
                self.recovery.start_once_ready(link.number)


def _places(hosts: Hosts, served: ServedAttempt) -> list[RankPlace]:
    """Place of each rank."""
    names, own = served.begin.places, _own_place(hosts)
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
