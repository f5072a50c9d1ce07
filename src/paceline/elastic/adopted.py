"""Attempt that goes on under another launcher, after the coordinating host was lost."""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from paceline.elastic.attempt import Attempt, Setting
from paceline.elastic.failure import oom_kills
from paceline.elastic.hosts.hosts import Hosts
from paceline.elastic.hosts.remote import RemoteRanks, RunFolder
from paceline.elastic.recovery import Recovery
from paceline.elastic.signals import StopSignals


class AdoptedAttempt(Attempt):
    """The ranks that hosts have kept since the coordinator was lost.

    They have begun a generation (`NextGeneration`). Others have ended, and are replaced once their host is there.
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
        assert hosts.takeover.next_generation is not None
        self.hosts, self.kept, self.next_generation = hosts, hosts.takeover.attempt, hosts.takeover.next_generation
        places = self.next_generation.places
        super().__init__(replace(setting, places=places, number=self.kept.begin.attempt), signals, on_tick, on_event)

    def __enter__(self) -> Self:
        kept, setting = self.kept, self.setting
        self._oom_kills = oom_kills()
        with self._made:
            self._made.callback(kept.end)
            self.folder, self.board, self.starter = kept.scratch, kept.board, kept.starter
            folder, numbers = setting.folder or RunFolder(kept.scratch), {place.number for place in setting.places}
            remote = self.hosts.remote(numbers, self.board, self.folder, folder, self.signals, self.poll)
            self.remote = self._made.enter_context(remote)
            self._made.callback(self._close_ranks)
            self._rendezvous = self.next_generation.rendezvous
            self.remote.adopt(setting.begin(kept.begin.places))
            self._take(self.remote)
            self._made = self._made.pop_all()
        return self

    def _take(self, remote: RemoteRanks) -> None:
        """Take the ranks over."""
        here = {rank.number: rank for rank in self.kept.ranks}
        self.kept.ranks.clear()
        for number in range(self.setting.ranks):
            self.ranks.append(here.get(number) or remote.ranks.get(number) or self._start(number, None))
        for rank in here.values():
            if rank.code is None:
                self.poll.register(rank.pidfd, select.POLLIN)
        self.recovery = Recovery(self, self.next_generation.generation)
        for link in remote.links:
            if link.held is None and link.lost is None:  # it had just come back
                self.recovery.start_once_ready(link.number)
