"""Measurement of the network between the hosts of a run, for `cluster.yaml`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from msgspec import Struct

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.cluster.host import Link as NetworkLink
from paceline.elastic.hosts.link import Link
from paceline.elastic.hosts.messages import CHUNK_BYTES, Answering, Echo, Listen, Measure, Measured, Probe, Speed
from paceline.errors import PacelineError
from paceline.wire.connection import connect
from paceline.wire.key import own_key
from paceline.wire.listener import Listener

MEASURE = "PACELINE_MEASURE"  # "off": no link is measured
_ALL_S, _PAIR_S = 0.4, 0.1  # for the links of host 0 together; for any other
_PINGS = 5
_PROBE_S = 10.0  # the longest that an answer may take
_EVERY_PAIR = 8  # hosts; of more, host 0 with each, and each with the next
Found = dict[int, list[NetworkLink]]


def measured_cluster(own: Host, links: Sequence[Link], *, measures: bool = True) -> Cluster:
    """This host and the others, with the measured links between them."""
    found: Found = {}
    if measures and os.environ.get(MEASURE) != "off":
        _measure_own(links, found)
        if len(links) > 1:
            _measure_others(links, found)
    hosts = [own, *(link.host for link in links)]
    return Cluster(
        name="this run's hosts",
        hosts=tuple(h.model_copy(update={"links": (*h.links, *found.get(i, ()))}) for i, h in enumerate(hosts)),
    )


class Measuring:
    """Part of an agent in the measurement. It listens only while others measure."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def answer(self, message: Listen | Measure) -> Answering | Measured:
        """Do what host 0 asks for."""
        if isinstance(message, Measure):
            return Measured([speed for to in message.targets if (speed := self._speed_to(*to)) is not None])
        self.close()
        if not message.address:
            return Answering(0)
        try:
            self._listener = Listener(
                (message.address, 0), own_key(), Probe, lambda _: None, on_message=lambda peer, _: peer.post(Echo())
            )
        except PacelineError:
            return Answering(0)
        assert isinstance(self._listener.address, tuple)
        return Answering(self._listener.address[1])

    def close(self) -> None:
        """Answer nobody any more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _speed_to(self, number: int, address: str, port: int) -> Speed | None:
        try:
            with closing(connect((address, port), own_key(), Echo, deadline_s=_PROBE_S)) as connection:
                return _speed(number, connection.send, lambda: isinstance(connection.receive(_PROBE_S), Echo), _PAIR_S)
        except (OSError, PacelineError):
            return None


def _measure_own(links: Sequence[Link], found: Found) -> None:
    """Measure between this host and each other one."""
    for link in links:
        if speed := _speed(link.number, link.send, partial(_echoed, link), _ALL_S / len(links)):
            _note(found, 0, speed)


def _echoed(link: Link) -> bool:
    return link.answer(Echo, _PROBE_S) is not None


def _measure_others(links: Sequence[Link], found: Found) -> None:
    """Have the other hosts measure among themselves, one after the other."""
    ports: dict[int, int] = {}
    for link in links:
        link.send(Listen(link.address))
        if (answer := link.answer(Answering, _PROBE_S)) is not None and answer.port:
            ports[link.number] = answer.port
    for link in links:
        to = [other for other in links if other.number in ports and _is_measured(link, other, len(links) + 1)]
        if to:
            link.send(Measure([(other.number, other.address, ports[other.number]) for other in to]))
            answer_of = link.answer(Measured, 2 * _PROBE_S * len(to))
            for speed in answer_of.speeds if answer_of else ():
                _note(found, link.number, speed)
    for link in links:
        link.send(Listen(""))
        link.answer(Answering, _PROBE_S)


def _is_measured(link: Link, other: Link, hosts: int) -> bool:
    """True if one agent measures to another."""
    return other.number == link.number + 1 or (hosts <= _EVERY_PAIR and other.number > link.number)


def _note(found: Found, number: int, speed: Speed) -> None:
    """Add the link to both of its hosts."""
    gbps, latency_ms = max(0.001, round(speed.bits_per_s / 1e9, 3)), max(0.0001, round(speed.round_trip_s * 500, 4))
    for here, there in ((number, speed.number), (speed.number, number)):
        found.setdefault(here, []).append(
            NetworkLink(name=f"channel:{there}", kind="measured", bandwidth_gbps=gbps, latency_ms=latency_ms)
        )


def _speed(number: int, send: Callable[[Struct], None], echoed: Callable[[], bool], budget_s: float) -> Speed | None:
    """Round trip, and rate of bulk data; None where the host does not echo."""
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        send(Probe(b""))
        if not echoed():
            return None
        times.append(time.perf_counter() - began)
    until, count, rate = time.perf_counter() + budget_s / 2, 1, 0.0
    while not rate or time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(count):
            send(Probe(bytes(CHUNK_BYTES)))
        if not all(echoed() for _ in range(count)):
            return None
        rate = max(rate, 8 * count * CHUNK_BYTES / (time.perf_counter() - began))
        count = min(2 * count, 64)
    return Speed(number, min(times), rate)
