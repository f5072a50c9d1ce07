"""The hosts of this run, as the coordinating host process holds them."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from paceline.channel.key import RunKey
from paceline.cluster.cluster import Cluster, Host
from paceline.cluster.cluster import Link as NetworkLink
from paceline.engine.status import StatusBoard
from paceline.errors import LaunchError
from paceline.launch.host.link import Link
from paceline.launch.host.messages import CHUNK_BYTES, Dismiss, Echo, Interrupted, Look, Probe
from paceline.launch.host.remote import RemoteRanks, RunFolder
from paceline.launch.signals import StopSignals

M = TypeVar("M", bound=Struct)
_MEASURE_S = 0.4  # for all links together
_PINGS = 5
_PROBE_S = 10.0  # the longest that an answer may take


class Hosts:
    """All hosts of the run, this one first.

    Attributes:
        cluster: what they have.
        address: where the others reach this one.
        key: of the run.
        agreed: code and data that were found to be the same on all.
    """

    def __init__(self, cluster: Cluster, address: str, links: Sequence[Link], key: RunKey) -> None:
        self.cluster, self.address, self.key = cluster, address, key
        self.links = sorted(links, key=lambda link: link.number)
        self.agreed: list[Look] = []

    def address_of(self, number: int) -> str:
        """Address at which the other hosts reach host `number`."""
        return self.links[number - 1].address if number else self.address

    def ask(self, question: Struct, kind: type[M], deadline_s: float) -> list[tuple[Link, M]]:
        """Answers of all other hosts to one question.

        Raises:
            LaunchError: a host does not answer in time.
            SystemExit: 130 or 143, when SIGINT or SIGTERM came to one of them meanwhile.
        """
        for link in self.links:
            link.send(question)
        return [(link, _answer(link, kind, deadline_s)) for link in self.links]

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
        return RemoteRanks(links, board, scratch, folder, signals, poll)

    def dismiss(self, code: int) -> None:
        """Have all end with this exit code."""
        for link in self.links:
            link.send(Dismiss(code))
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


def _answer(link: Link, kind: type[M], deadline_s: float) -> M:
    while (message := link.receive(deadline_s)) is not None:
        if isinstance(message, Interrupted):
            raise SystemExit(128 + signal.Signals[message.signal])
        if isinstance(message, kind):
            return message
    raise LaunchError(f"{link.who} is lost: {link.lost}")


def measured_cluster(own: Host, links: Sequence[Link]) -> Cluster:
    """This host and the others, with the measured links between them."""
    network, hosts = _measured(links), [own, *(link.host for link in links)]
    return Cluster(
        name="this run's hosts",
        hosts=tuple(h.model_copy(update={"links": (*h.links, *network.get(i, ()))}) for i, h in enumerate(hosts)),
    )


def _measured(links: Sequence[Link]) -> dict[int, list[NetworkLink]]:
    """Bandwidth and latency between this host and each of the others, by host number."""
    found: dict[int, list[NetworkLink]] = {}
    for link in links:
        if (latency_s := _round_trip_s(link)) is not None and (rate := _bits_per_s(link, _MEASURE_S / len(links))):
            measured = {"bandwidth_gbps": round(rate / 1e9, 3), "latency_ms": round(latency_s * 500, 4)}
            name = f"channel:{link.number}"
            found.setdefault(0, []).append(NetworkLink(name=name, kind="measured", **measured))
            found[link.number] = [NetworkLink(name="channel:0", kind="measured", **measured)]
    return found


def _round_trip_s(link: Link) -> float | None:
    times = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        link.send(Probe(b""))
        if not isinstance(link.receive(_PROBE_S), Echo):
            return None
        times.append(time.perf_counter() - started)
    return min(times)


def _bits_per_s(link: Link, budget_s: float) -> float | None:
    """Rate of bulk data to a host, in bits/s."""
    started, count, rate = time.perf_counter(), 1, 0.0
    while time.perf_counter() - started < budget_s / 2:
        begun = time.perf_counter()
        for _ in range(count):
            link.send(Probe(bytes(CHUNK_BYTES)))
        for _ in range(count):
            if not isinstance(link.receive(_PROBE_S), Echo):
                return None
        rate = max(rate, 8 * count * CHUNK_BYTES / (time.perf_counter() - begun))
        count = min(2 * count, 64)
    return rate
