"""Hosts that come back to a run: they are checked as at the start."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Self

from paceline.cluster.launch_engines import HostPlace
from paceline.elastic.hosts.gather import take
from paceline.elastic.hosts.hosts import Hosts
from paceline.elastic.hosts.link import AbsentLink, Link, Meeting
from paceline.elastic.hosts.messages import Elsewhere, Looked, Refused, ToHost, Welcome
from paceline.elastic.hosts.same_files import differences
from paceline.errors import ChannelError, LaunchError, PacelineError
from paceline.text import printable
from paceline.wire.connection import Connection, connect

_NOTED_S = 10.0  # for this process to see that a host is lost which is there again
_LOOKED_S = 120.0
_CALL_S = 1.0  # between calls of hosts that were lost, and the longest that one takes


class Returns:
    """Meeting place for hosts that were lost. As a context: it listens within.

    A host is refused that was not lost, has another name, version, clock or data than the lost one, fewer devices, or
    was lost too often; it is told why, and the run goes on.

    Args:
        place: of this host, which coordinates.
        meeting: where they come; it is closed at the end.
        revive: starts the host process of a host again; None where somebody else does.
        calls: whether hosts that are started again have to be told that this one coordinates.
    """

    def __init__(
        self,
        hosts: Hosts,
        place: HostPlace,
        meeting: Meeting,
        revive: Callable[[int], None] | None = None,
        *,
        calls: bool = False,
    ) -> None:
        self._hosts, self._place, self._meeting, self._revive = hosts, place, meeting, revive
        self._call_s = _CALL_S if calls else None
        self._expected: set[int] = set()
        self.left_out: dict[int, str] = {}  # hosts that may not come, and why
        self._back: queue.Queue[Link] = queue.Queue()
        self._closing = threading.Event()
        self._at_work: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-returns", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._hosts.returns = self
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.returns = None
        self._closing.set()
        self._meeting.came.put(None)
        if (connection := self._at_work) is not None:
            connection.end()
        self._thread.join()
        self._meeting.close()
        for link in self.back():  # too late: they are dismissed with the others
            self._hosts.replace(link)

    def expect(self, host: int) -> None:
        """A lost host may come back."""
        self.left_out.pop(host, None)
        self._expected.add(host)
        if self._revive is not None:
            with suppress(LaunchError):  # then it does not come back
                self._revive(host)

    @property
    def revives(self) -> bool:
        """True if a host that may come is started here."""
        return self._revive is not None

    def leave_out(self, host: int, why: str = "was lost too often within an hour, and is left out of the run.") -> None:
        """A host may not, for this reason."""
        self._expected.discard(host)
        self.left_out[host] = why

    def back(self) -> list[Link]:
        """Hosts that have come back since the last call, and wait for orders."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._back.get_nowait())
        return found

    def _run(self) -> None:
        while (connection := self._next()) is not None:
            self._at_work = connection
            try:
                if self._closing.is_set():
                    raise ChannelError("the run has ended")
                self._take(connection)
            except LaunchError as error:
                _say(f"a host that came during the run was sent away: {error}")
            except (OSError, PacelineError, SystemExit) as error:  # a signal came to it meanwhile
                connection.close()
                if not self._closing.is_set():
                    _say(f"a host that came back is lost again: {error}")

    def _next(self) -> Connection | None:
        """The next host that comes.

        Those that were lost are called meanwhile, where they have to be.
        """
        while True:
            try:
                return self._meeting.came.get(timeout=self._call_s)
            except queue.Empty:
                # those that may not come are told so here
                for number in sorted({*self._expected.copy(), *self.left_out.copy()}):
                    if (link := self._hosts.links[number - 1]).address:
                        self._call(link)

    def _call(self, link: Link) -> None:
        """Tell a lost host, should it have been started again, where the run goes on."""
        with suppress(OSError, PacelineError):  # it is not there
            where = link.address, self._place.port
            with closing(connect(where, self._hosts.key, ToHost, deadline_s=_CALL_S)) as connection:
                connection.send(self._elsewhere())
                connection.receive(_CALL_S)  # it hangs up

    def _elsewhere(self) -> Elsewhere:
        names = [host.name for host in self._hosts.cluster.hosts]
        return Elsewhere(self._place.run_name, *self._meeting.address, names)

    def _take(self, connection: Connection) -> None:
        """Take a host in, or send it away.

        Raises:
            LaunchError: it does not fit.
        """
        found: dict[int, Link] = {}
        take(self._place, connection, found)
        for link in found.values():
            if link.meets_again:  # too late: it comes again, without the ranks that it has kept
                link.send(self._elsewhere())
                link.connection.close()
                return
            if reason := self._unexpected(link) or self._other(link):
                _refuse(link, reason)
            link.send(Welcome([host.name for host in self._hosts.cluster.hosts]))
            for look in self._hosts.agreed:
                link.send(look)
                answer = link.answer(Looked, _LOOKED_S)
                if answer is None:
                    raise LaunchError(f"{link.who} is lost: {link.lost}")
                if reason := "; ".join(differences(look, link, answer)):
                    _refuse(link, reason)
            self._expected.discard(link.number)
            self._at_work = None
            self._back.put(link)

    def _unexpected(self, link: Link) -> str:
        """Reason why a host cannot have been lost; "" for one that was."""
        until = time.monotonic() + _NOTED_S
        while link.number not in self._expected:
            if link.number in self.left_out:
                return f"{link.who} {self.left_out[link.number]}"
            absent = isinstance(self._before(link), AbsentLink)  # the run may be about to start
            if (not absent and time.monotonic() > until) or self._closing.is_set():
                return f"two hosts have the number {link.number}: {self._before(link).name} is there."
            time.sleep(0.05)
        return ""

    def _other(self, link: Link) -> str:
        """Reason why a host is not the one that was lost; "" where it is."""
        before = self._before(link)
        if isinstance(before, AbsentLink):
            before = link
        if before.name not in (link.name, f"{link.name}-{link.number}"):
            return f"host {link.name} has come as number {link.number}, which is that of {before.name}."
        known = self._hosts.cluster.hosts[link.number]
        count, had = len(link.host.devices), len(known.devices)
        if self._hosts.cluster.emulate is None and count < had:
            return f"{link.who} has come back with {count} of its {had} devices."
        link.name, link.host = before.name, known
        return ""

    def _before(self, link: Link) -> Link:
        return self._hosts.links[link.number - 1]


def _refuse(link: Link, reason: str) -> None:
    link.send(Refused(reason))
    link.connection.close()
    raise LaunchError(reason)


def _say(text: str) -> None:
    print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)
