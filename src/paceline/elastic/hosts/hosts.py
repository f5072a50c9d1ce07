"""The hosts of this run, as the coordinating host process holds them."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from paceline.cluster.cluster import Cluster
from paceline.cluster.network import inside
from paceline.elastic.hosts.link import AbsentLink, Link
from paceline.elastic.hosts.messages import Dismiss, Look, Past
from paceline.elastic.hosts.remote import RemoteRanks, RunFolder
from paceline.elastic.signals import StopSignals
from paceline.errors import LaunchError
from paceline.wire.connection import Connection
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener
from paceline.wire.status import StatusBoard

if TYPE_CHECKING:
    from paceline.elastic.hosts.link import Meeting
    from paceline.elastic.hosts.returns import Returns
    from paceline.elastic.hosts.takeover import Takeover

M = TypeVar("M", bound=Struct)
WAIT = "PACELINE_HOSTS_WAIT_S"  # the longest wait for a host, at the start and when it is lost
_WAIT_S = 300.0


def hosts_wait_s() -> float:
    """The longest wait for hosts to come, in seconds.

    Raises:
        LaunchError: `PACELINE_HOSTS_WAIT_S` is no number.
    """
    text = os.environ.get(WAIT, "")
    try:
        return float(text) if text else _WAIT_S
    except ValueError:
        raise LaunchError(f"{WAIT}={text} is not a number of seconds") from None


class Hosts:
    """All hosts of the run, this one first.

    Attributes:
        cluster: what they have.
        address: where the others reach this one.
        key: of the run.
        agreed: code and data that were found to be the same on all.
        takeover: the run to continue, where the coordinator before was lost.
        past: losses until now, as of when they were last told.
        returns: where hosts come back that were lost; None where they cannot.
        least: number of hosts that the run does not go on without; 0 for any.
        meeting: where they have come to this one, and others may.

    Args:
        namespace: network namespace of that address, where this host is an emulated one.
    """

    takeover: Takeover | None = None
    returns: Returns | None = None

    def __init__(
        self, cluster: Cluster, address: str, links: Sequence[Link], key: RunKey, namespace: str | None = None
    ) -> None:
        self.cluster, self.address, self.key, self._namespace = cluster, address, key, namespace
        self.links = sorted(links, key=lambda link: link.number)
        self.agreed: list[Look] = []
        self.least = 0
        self.meeting: Meeting | None = None
        self.past = Past()

    @property
    def absent(self) -> list[Link]:
        """Hosts that have not come yet, and may during the run."""
        return [link for link in self.links if isinstance(link, AbsentLink)]

    @property
    def there(self) -> int:
        """Number of hosts that take part, this one included."""
        return 1 + sum(link.lost is None for link in self.links)

    @property
    def too_few(self) -> bool:
        """True while nobody goes on."""
        return self.there < self.least

    def address_of(self, number: int) -> str:
        """Address at which the other hosts reach host `number`."""
        return self.links[number - 1].address if number else self.address

    def ask(self, question: Struct, kind: type[M], deadline_s: float) -> list[tuple[Link, M]]:
        """Answers of all other hosts that are there to one question.

        Raises:
            LaunchError: a host does not answer in time.
            SystemExit: 130 or 143, when SIGINT or SIGTERM came to one of them meanwhile.
        """
        links = [link for link in self.links if link.lost is None]
        for link in links:
            link.send(question)
        answers = [(link, link.answer(kind, deadline_s)) for link in links]
        for link, answer in answers:
            if answer is None:
                raise LaunchError(f"{link.who} is lost: {link.lost}")
        return [(link, answer) for link, answer in answers if answer is not None]

    def remote(
        self,
        numbers: set[int],
        board: StatusBoard,
        scratch: Path,
        folder: RunFolder,
        signals: StopSignals,
        poll: select.poll,
    ) -> RemoteRanks:
        """The ranks that an attempt has on the hosts of these numbers."""
        links = [link for link in self.links if link.number in numbers]
        return RemoteRanks(links, board, scratch, folder, signals, poll, self)

    def listener(
        self,
        messages: Any,
        port: int = 0,
        on_connection: Callable[[Connection], object] = lambda _: None,
        on_message: Callable[[Connection, Any], None] | None = None,
    ) -> Listener:
        """A listener at this host's address; at any port, with 0."""

        def made() -> Listener:
            return Listener((self.address, port), self.key, messages, on_connection, on_message=on_message)

        return made() if self._namespace is None else inside(self._namespace, made)

    def add(self, link: Link) -> None:
        """Have another host, behind all others."""
        self.links.append(link)
        self.cluster = self.cluster.model_copy(update={"hosts": (*self.cluster.hosts, link.host)})

    def replace(self, link: Link) -> None:
        """Have a host that came back in the place of the lost one."""
        self.links[link.number - 1] = link

    def dismiss(self, code: int) -> None:
        """Have all end with this exit code. No more may come."""
        if self.meeting is not None:
            self.meeting.close()
        for link in self.links:
            link.send(Dismiss(code))
            if link.lost is None:
                link.connection.close()


_current: list[Hosts] = []


def current_hosts() -> Hosts | None:
    """The hosts that this process coordinates; None where it is alone."""
    return _current[-1] if _current else None


@contextmanager
def coordinating(hosts: Hosts) -> Iterator[Hosts]:
    """Within it, these are the `current_hosts`."""
    _current.append(hosts)
    try:
        yield hosts
    finally:
        _current.remove(hosts)
