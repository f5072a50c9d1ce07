"""Departures of hosts that have received SIGTERM.

SIGTERM to one host of a run is a notice that a scheduler or a cloud will take the host away. The host leaves after a
step, so that no step is aborted, and the other hosts continue. A scheduler that ends the whole run sends SIGTERM to all
hosts at about the same time, so notices are gathered for a second. If all hosts have a notice, or the remaining hosts
cannot continue, the run saves a checkpoint and ends.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Set

from paceline.elastic.membership import Membership
from paceline.elastic.ranks import Ranks
from paceline.text import printable

_GATHER_S = 1.0  # from the first notice to the decision
_END_TOGETHER = ("mpi", "ray", "sky")  # launch engines that end all hosts when the command on one host fails
_FIRST_ENDS_ALL = ("ssh",)  # launch engines that end all hosts when the command on host 0 fails


class Departures:
    """Hosts with a notice, which leave after a step. This host leaves last.

    Attributes:
        leaving: numbers of the hosts that are leaving.
        released: leaving hosts whose ranks have left.
    """

    def __init__(self, ranks: Ranks, membership: Membership) -> None:
        self.ranks, self.membership = ranks, membership
        self.leaving: set[int] = set()
        self.released: set[int] = set()
        self._ends = False

    def heed(self) -> None:
        """Let hosts with a notice leave, or record SIGTERM to end the run."""
        remote, signals = self.ranks.remote, self.ranks.signals
        if remote is None or self._ends:
            return
        notices = remote.hosts.notices
        if signals.first == "SIGTERM":
            signals.first = None
            notices.setdefault(0, time.monotonic())
        there = {0, *(link.number for link in remote.links if link.lost is None)} - self.released
        for host in notices.keys() - there - self.leaving:  # lost before it could leave
            del notices[host]
        if signals.first or not (new := notices.keys() - self.leaving):
            return
        if why := self._obstacle(there - notices.keys()):
            if remote.hosts.engine:  # SIGTERM to the command of emulated hosts always ends the run
                self._say(f"{self._named(new)} received SIGTERM, and the run ends, because {why}")
            self._ends, signals.first = True, "SIGTERM"
            self.leaving &= self.released
            self.membership.pausing = False
            self.membership.departing.clear()
        elif min(notices[host] for host in new) + _GATHER_S < time.monotonic():
            for host in sorted(new):
                self._say(f"{self._named({host})} received SIGTERM and leaves after a step; the others go on")
            self.leaving |= new
            self.membership.departing.update(*map(self.ranks.on_host, new - {0}))

    def step(self) -> list[int]:
        """Release hosts whose ranks have left, and return the released hosts that are now gone."""
        remote, membership = self.ranks.remote, self.membership
        assert remote is not None
        left = []
        for host in sorted(self.leaving - {0}):
            ranks, is_lost = self.ranks.on_host(host), remote.link_to(host).lost is not None
            if is_lost and host in self.released:
                left.append(host)
            if is_lost:  # a host that is lost before its ranks have left is handled like any other loss
                self.leaving.discard(host)
                self.released.discard(host)
                remote.hosts.notices.pop(host, None)
                membership.departing -= ranks
            elif host not in self.released and not ranks & {*membership.current.members, *membership.newest.members}:
                self.released.add(host)
                remote.release(host, 128 + signal.SIGTERM)
        membership.pausing = self.leaving == {0}
        return left

    @property
    def hands_over(self) -> bool:
        """True once this host can leave, because all ranks wait after a step."""
        membership = self.membership
        return membership.pausing and membership.wanted is None and not membership.current.members

    def hand_over(self) -> None:
        """End the ranks of this host, and let another host coordinate the others.

        Raises:
            SystemExit: with exit code 143.
        """
        assert self.ranks.remote is not None
        here = self.ranks.on_host(0)
        for rank in here:
            self.ranks[rank].kill()
        self.ranks.wait_for_ends(here, _GATHER_S)
        self.ranks.remote.hand_over()
        self._say("this host has left the run; another host coordinates it")
        raise SystemExit(128 + signal.SIGTERM)

    def _obstacle(self, stay: Set[int]) -> str | None:
        """Return why the run cannot continue with only the hosts in `stay`, or None."""
        ranks, remote = self.ranks, self.ranks.remote
        assert remote is not None
        hosts, board = remote.hosts, ranks.board.read()
        gone = hosts.notices.keys() | self.released
        have_state = {rank.number for rank in ranks if rank.code is None and board[rank.number].generation >= 0}
        if not stay:
            return "no other host remains"
        if hosts.there - len(gone) < hosts.least:
            return f"it needs at least {hosts.least} hosts"
        if hosts.engine in _END_TOGETHER or (0 in gone and hosts.engine in _FIRST_ENDS_ALL):
            return "its launcher ends all hosts together"
        if not self.membership.whole(have_state.difference(*map(ranks.on_host, gone))):
            return "no complete replica remains"
        if 0 in gone and not remote.may_hand_over(stay):
            return "no other host can coordinate it"
        return None

    def _named(self, hosts: Set[int]) -> str:
        assert self.ranks.remote is not None
        names = self.ranks.remote.hosts.cluster.hosts
        return ", ".join(f"host {names[host].name} (number {host})" for host in sorted(hosts))

    @staticmethod
    def _say(text: str) -> None:
        print(printable(f"paceline: {text}"), file=sys.stderr, flush=True)
