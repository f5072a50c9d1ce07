"""Links between the coordinator and the agents: messages, heartbeats, and network measurements."""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.cluster.host import Link as NetworkLink
from paceline.elastic.hosts import messages
from paceline.errors import ChannelError, LaunchError, PacelineError
from paceline.wire.connection import Connection, connect
from paceline.wire.key import RunKey
from paceline.wire.listener import Listener

M = TypeVar("M", bound=Struct)
KERNEL_SILENT_S = 45  # seconds of silence after which the kernel ends the connection to another machine


class Peer:
    """Host process at the other end of a connection.

    Attributes:
        lost: reason why the peer is lost; None while the peer is connected.
    """

    lost: str | None = None
    _silence = ""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @property
    def silent(self) -> bool:
        """True if nothing has arrived from the peer for too long. The peer may still run behind a cut network."""
        return bool(self._silence)

    def send(self, message: Struct) -> None:
        """Send a message, unless the peer is lost."""
        if self.lost is None:
            try:
                self.connection.send(message)
            except (OSError, PacelineError) as error:
                self.lose(str(error))

    def take(self) -> Any:
        """Return the next message that has arrived, or None."""
        if self.lost is None:
            try:
                return self.connection.take()
            except (OSError, PacelineError) as error:
                self.lose(str(error))
        return None

    def lose(self, reason: str) -> None:
        """Mark the host as lost."""
        if self.lost is None:
            self.lost = self._silence or reason

    def fall_silent(self, silent_s: float) -> None:
        """Mark the host as silent, so that its next use marks the host as lost. Any thread may call this method."""
        self._silence = f"nothing has come from it for {silent_s:.2g} s"
        self.connection.end()


class Link(Peer):
    """Coordinator's view of an agent.

    Attributes:
        address: address at which other hosts can reach the agent.
        standby_port: port on which the agent listens in case it becomes the coordinator; 0 if it never does.
        probes_port: port on which the agent answers probes of other hosts; 0 if it answers none.
        meets_again: True if the agent has lost a previous coordinator.
        held: ranks that the agent has kept since the loss of the previous coordinator.
        shares_folder: True if the agent sees the coordinator's folder of the run.
        clock_ahead_s: clock of the agent minus clock of the coordinator, in seconds.
        is_known_lost: True if the run's record already contains the loss of this host.
        heard_at: arrival time of the agent's last message, by the monotonic clock.
    """

    is_known_lost = shares_folder = False
    held: messages.Held | None
    _watched: tuple[select.poll, int] | None = None

    def __init__(self, connection: Connection, number: int, name: str, address: str, host: Host) -> None:
        super().__init__(connection)
        self.number, self.name, self.address, self.host = number, name, address, host
        self.clock_ahead_s = 0.0
        self.standby_port = self.probes_port = 0
        self.meets_again, self.held = False, None
        self.heard_at = time.monotonic()
        connection.end_when_silent(KERNEL_SILENT_S)

    @property
    def who(self) -> str:
        """Name and number, for messages."""
        return f"host {self.name} (number {self.number})"

    def offer(self, parts: Iterator[Struct], until: float) -> bool:
        """Send messages as long as the network accepts them without waiting.

        Args:
            until: time at which to stop, by the monotonic clock.

        Returns:
            True if all messages were sent, or the host is lost.
        """
        try:
            while self.connection.flush() and time.monotonic() < until:
                if (message := next(parts, None)) is None:
                    return True
                self.connection.post(message)
        except PacelineError as error:
            self.lose(str(error))
        return self.lost is not None

    def receive(self, deadline_s: float) -> Any:
        """Return the next message. If no message arrives in time, mark the host as lost and return None."""
        if self.lost is None:
            try:
                message = self.connection.receive(deadline_s)
            except (OSError, PacelineError) as error:
                self.lose(str(error))
            else:
                self.heard_at = time.monotonic()
                return message
        return None

    def answer(self, kind: type[M], deadline_s: float) -> M | None:
        """Return the next message of a type, or None if the host is lost first.

        Raises:
            SystemExit: with exit code 130 or 143, if the host received SIGINT or SIGTERM during this call.
        """
        while (message := self.receive(deadline_s)) is not None:
            if isinstance(message, messages.Interrupted):
                raise SystemExit(128 + signal.Signals[message.signal])
            if isinstance(message, kind):
                return message
        return None

    def waiting(self) -> Iterator[Any]:
        """Yield the messages that have already arrived."""
        while (message := self.take()) is not None:
            self.heard_at = time.monotonic()
            yield message

    def lose(self, reason: str) -> None:
        """Mark the host as lost."""
        if self.lost is None:
            super().lose(reason)
            self.unwatch()
            self.connection.close()

    def watch(self, poll: select.poll) -> None:
        """Register the connection with `poll` until the host is lost."""
        if self.lost is None:
            self._watched = poll, self.connection.fileno()
            poll.register(self._watched[1], select.POLLIN)

    def unwatch(self) -> None:
        """Unregister the connection from `poll`."""
        if self._watched is not None:
            poll, descriptor = self._watched
            poll.unregister(descriptor)
            self._watched = None


class AbsentLink(Link):
    """Placeholder for the link to a host that has not connected yet."""

    is_known_lost = True

    def __init__(self, number: int, name: str, host: Host) -> None:
        self.number, self.name, self.address, self.host = number, name, "", host
        self.clock_ahead_s, self.standby_port, self.probes_port, self.heard_at = 0.0, 0, 0, time.monotonic()
        self.meets_again, self.held, self.lost = False, None, "it has not come yet"


class Meeting:
    """Listener for hosts, on the coordinator or a host that may become the coordinator.

    The port stays open as long as the host process runs. A closed port therefore shows that the process has ended.

    Attributes:
        came: queue of new connections. A None in the queue wakes the thread that waits for connections.
    """

    def __init__(self, address: str, port: int, key: RunKey) -> None:
        self.came: queue.Queue[Connection | None] = queue.Queue()
        self._listener = Listener((address, port), key, messages.FromHost, self.came.put)

    @property
    def address(self) -> tuple[str, int]:
        """Address and port of the listener."""
        assert isinstance(self._listener.address, tuple)
        return self._listener.address

    @property
    def unauthenticated(self) -> int:
        """Number of connections that failed authentication."""
        return self._listener.unauthenticated

    def direct(self, elsewhere: messages.Elsewhere) -> None:
        """Send the address where the run continues to hosts that connect.

        Hosts that have lost their coordinator are exempt, because they may choose this host as the coordinator.
        """
        for _ in range(self.came.qsize()):
            if (connection := self.came.get()) is None:
                continue
            try:
                message = connection.take()
                if message is None or (isinstance(message, messages.Joining) and message.again):
                    if message is not None:
                        connection.give_back(message)
                    self.came.put(connection)
                    continue
                connection.post(elsewhere)
            except ChannelError:  # the host has disconnected
                pass
            connection.close()

    def close(self) -> None:
        """Stop listening, and close new connections."""
        self._listener.close()
        while not self.came.empty():
            if (connection := self.came.get()) is not None:
                connection.close()


SILENCE = "PACELINE_SILENCE_S"  # seconds of silence after which a host counts as lost
_SILENCE_S = 2.0
_ROUNDS = 8, 32  # minimum and maximum number of heartbeats per host within the limit of silence
_BEATS = 512  # heartbeats of all hosts within the limit of silence, to limit the load of the coordinator
_UNACKNOWLEDGED = 0.1  # fraction of the limit after which a host counts as lost if its kernel acknowledges nothing
_LOST_BEATS = 3  # number of missed heartbeats before a cut link counts, because this machine may have been suspended


class Beat(Struct, tag=True, frozen=True):
    """Heartbeat of a host, with the number of the host. The coordinator answers with its own heartbeat."""

    host: int


OpensListener = Callable[[type[Struct], Callable[[Connection, Beat], None]], Listener]


class Pulses:
    """Coordinator's side of the heartbeats. A host is monitored from its first heartbeat on.

    Args:
        listen: function that opens a listener for messages of a type, and calls a function for each message.
        on_silence: called once per silence, in another thread, with the number of the host and the seconds of silence.
        hosts: number of hosts, from which the interval between heartbeats is derived.
    """

    def __init__(self, listen: OpensListener, on_silence: Callable[[int, float], None], hosts: int = 2) -> None:
        self.limit_s, self._rounds = silence_limit_s(), rounds_of(hosts)
        self._on_silence = on_silence
        self._beaten: set[int] = set()  # hosts that have sent a heartbeat since the last round
        self._silent_rounds: dict[int, int] = {}
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = listen(Beat, self._take)
        self._thread = threading.Thread(target=self._watch, name="paceline-pulses", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port on which heartbeats arrive."""
        return self._listener.port

    def forget(self, host: int) -> None:
        """Stop monitoring a host until its next heartbeat."""
        with self._lock:
            self._beaten.discard(host)
            self._silent_rounds.pop(host, None)
            self._connections.pop(host, None)

    def close(self) -> None:
        """Stop the listener and the monitoring."""
        self._closing.set()
        self._thread.join()
        self._listener.close()

    def _take(self, connection: Connection, beat: Beat) -> None:
        with self._lock:
            self._beaten.add(beat.host)
            self._silent_rounds.setdefault(beat.host, 0)
            self._connections[beat.host] = connection
        connection.post(Beat(0))

    def _watch(self) -> None:
        round_s = self.limit_s / self._rounds
        while not self._closing.wait(round_s):
            with self._lock:
                for host, rounds in self._silent_rounds.items():
                    self._silent_rounds[host] = 0 if host in self._beaten else rounds + 1
                self._beaten.clear()
                silent = {host: rounds for host, rounds in self._silent_rounds.items() if rounds}
            for host, rounds in silent.items():
                if self._is_unreachable(host, rounds) or rounds >= self._rounds:
                    self.forget(host)
                    self._on_silence(host, rounds * round_s)

    def _is_unreachable(self, host: int, rounds: int) -> bool:
        """Send another heartbeat; return True if the host's kernel acknowledges nothing.

        Args:
            rounds: number of rounds without a heartbeat from the host.
        """
        if (connection := self._connections.get(host)) is None:
            return False
        with suppress(PacelineError):
            connection.post(Beat(0))
        return rounds >= _LOST_BEATS and _is_cut(connection, self.limit_s)


class Pulse:
    """Agent's side of the heartbeats.

    Args:
        where: address and port of the coordinator's `Pulses`.
        limit_s: longest allowed silence in seconds.
        on_silence: called once, in another thread, with the seconds of silence since the last heartbeat.
        hosts: number of hosts, from which the interval between heartbeats is derived.
    """

    def __init__(
        self,
        where: tuple[str, int],
        key: RunKey | None,
        host: int,
        limit_s: float,
        on_silence: Callable[[float], None],
        hosts: int = 2,
    ) -> None:
        self.limit_s, self._round_s = limit_s, limit_s / rounds_of(hosts)
        self._where, self._key, self._beat, self._on_silence = where, key, Beat(host), on_silence
        self._closing = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closing.set()
        if (connection := self._connection) is not None:
            connection.end()
        self._thread.join()

    def _run(self) -> None:
        heard, silent_s, round_s = False, 0.0, self._round_s
        while not self._closing.is_set() and silent_s < self.limit_s and not self._is_unreachable(silent_s):
            began, most_s = time.monotonic(), round_s if self._connection else self.limit_s
            self._send()
            self._closing.wait(max(0.0, round_s - (time.monotonic() - began)))
            answered = self._is_answered()
            took_s = time.monotonic() - began
            heard = heard or answered
            # a longer round means that this process itself was suspended
            silent_s = 0.0 if answered or not heard else silent_s + max(round_s, min(took_s, most_s))
        if self._connection is not None:
            self._connection.close()
        if not self._closing.is_set():
            self._on_silence(silent_s)

    def _is_unreachable(self, silent_s: float) -> bool:
        if self._connection is None or silent_s < _LOST_BEATS * self._round_s:
            return False
        return _is_cut(self._connection, self.limit_s)

    def _send(self) -> None:
        with suppress(PacelineError):  # the next round opens a new connection if this connection is lost
            if self._connection is None:
                # on a busy machine, a handshake can take longer than a round
                self._connection = connect(self._where, self._key, Beat, deadline_s=self.limit_s)
            self._connection.post(self._beat)

    def _is_answered(self) -> bool:
        """Return True if the coordinator has sent anything since the last call.

        One check per round is cheaper than waking up for each answer.
        """
        if self._connection is None:
            return False
        answered = False
        try:
            while self._connection.take() is not None:
                answered = True
        except PacelineError:
            with suppress(OSError):
                self._connection.close()
            self._connection = None
        return answered


def _is_cut(connection: Connection, limit_s: float) -> bool:
    """Return True if the other host's kernel has acknowledged none of several heartbeats."""
    return connection.is_unanswered(_UNACKNOWLEDGED * limit_s, _LOST_BEATS)


def rounds_of(hosts: int) -> int:
    """Return the number of heartbeats per host within the limit of silence."""
    fewest, most = _ROUNDS
    return max(fewest, min(most, _BEATS // hosts))


def silence_limit_s() -> float:
    """Return the seconds of silence after which a host counts as lost."""
    text = os.environ.get(SILENCE, "")
    try:
        limit_s = float(text) if text else _SILENCE_S
    except ValueError:
        limit_s = 0.0
    if not 0.2 <= limit_s <= 3600:
        raise LaunchError(
            "hosts.silence_invalid",
            "{variable}={text} is not a number of seconds from 0.2 to 3600",
            variable=SILENCE,
            text=text,
        )
    return limit_s


MEASURE = "PACELINE_MEASURE"  # with the value "off", no link is measured
_ALL_S, _PAIR_S = 0.4, 0.1  # seconds for all links of host 0 together, and for each other link
_PINGS = 5
_PROBE_S = 10.0  # longest wait in seconds for an answer
# number of hosts up to which every pair is measured; with more hosts, all links of host 0 and the link from each host
# to the next
_EVERY_PAIR = 8
Found = dict[int, list[NetworkLink]]


def measured_cluster(own: Host, links: Sequence[Link], *, measures: bool = True) -> Cluster:
    """Measure the links between all hosts; return the cluster of these hosts and links."""
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


def answer_probes(address: str, key: RunKey | None) -> Listener | None:
    """Answer probes of other hosts at an address. Return the listener, or None if it cannot listen."""

    def echo(peer: Connection, _: messages.Probe) -> None:
        peer.post(messages.Echo())

    try:
        return Listener((address, 0), key, messages.Probe, lambda _: None, on_message=echo)
    except PacelineError:
        return None


def speeds_to(targets: Sequence[tuple[int, str, int]], key: RunKey | None) -> messages.Measured:
    """Measure the links to other hosts, given as (number, address, port). Skip hosts that do not answer."""
    return messages.Measured([speed for to in targets if (speed := _speed_to(*to, key)) is not None])


def _speed_to(number: int, address: str, port: int, key: RunKey | None) -> messages.Speed | None:
    try:
        with closing(connect((address, port), key, messages.Echo, deadline_s=_PROBE_S)) as connection:
            return _speed(
                number, connection.send, lambda: isinstance(connection.receive(_PROBE_S), messages.Echo), _PAIR_S
            )
    except (OSError, PacelineError):
        return None


def _measure_own(links: Sequence[Link], found: Found) -> None:
    for link in links:
        if speed := _speed(link.number, link.send, partial(_echoed, link), _ALL_S / len(links)):
            _note(found, 0, speed)


def _echoed(link: Link) -> bool:
    return link.answer(messages.Echo, _PROBE_S) is not None


def _measure_others(links: Sequence[Link], found: Found) -> None:
    """Let the other hosts measure their links to one another, one host at a time."""
    for link in links:
        to = [other for other in links if other.probes_port and is_measured(link, other, len(links) + 1)]
        if to:
            link.send(messages.Measure([(other.number, other.address, other.probes_port) for other in to]))
            answer = link.answer(messages.Measured, 2 * _PROBE_S * len(to))
            for speed in answer.speeds if answer else ():
                _note(found, link.number, speed)


def is_measured(link: Link, other: Link, hosts: int) -> bool:
    """Return True if one agent should measure the link to another agent."""
    return other.number == link.number + 1 or (hosts <= _EVERY_PAIR and other.number > link.number)


def _note(found: Found, number: int, speed: messages.Speed) -> None:
    gbps, latency_ms = max(0.001, round(speed.bits_per_s / 1e9, 3)), max(0.0001, round(speed.round_trip_s * 500, 4))
    for here, there in ((number, speed.number), (speed.number, number)):
        found.setdefault(here, []).append(
            NetworkLink(name=f"channel:{there}", kind="measured", bandwidth_gbps=gbps, latency_ms=latency_ms)
        )


def _speed(
    number: int, send: Callable[[Struct], None], echoed: Callable[[], bool], budget_s: float
) -> messages.Speed | None:
    """Measure the round-trip time and the bulk rate of a link.

    The result is None if the host does not answer.
    """
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        send(messages.Probe(b""))
        if not echoed():
            return None
        times.append(time.perf_counter() - began)
    until, count, rate = time.perf_counter() + budget_s / 2, 1, 0.0
    while not rate or time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(count):
            send(messages.Probe(bytes(messages.CHUNK_BYTES)))
        if not all(echoed() for _ in range(count)):
            return None
        rate = max(rate, 8 * count * messages.CHUNK_BYTES / (time.perf_counter() - began))
        count = min(2 * count, 64)
    return messages.Speed(number, min(times), rate)
