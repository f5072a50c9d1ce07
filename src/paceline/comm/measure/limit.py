"""Measured hardware limits of collectives: memory copies in a host, TCP streams between hosts."""

from __future__ import annotations

import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

from torch import Tensor

from paceline.cluster.machine import own_address
from paceline.comm.group import Group
from paceline.comm.links import timed
from paceline.comm.measure.calls import CollectiveSpeed
from paceline.comm.shm.segment import Handle, OwnedSegment, attach, create
from paceline.errors import ClusterError, SyncError

_STREAM_S = (0.4, 0.4, 0.2)  # to fill the path, to count, and for late hosts
_STRETCHES = 3  # of the counting window
_CHUNK = 2**18
_COPIES = 5  # per size
_PINGS_S, _PINGS = 0.3, 100  # at most
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Limit:
    """Upper limits of the hardware for the collectives of some ranks.

    Attributes:
        hosts: host index of each rank.
        copies: bytes per second at which a rank copies memory that another process of its host has just written. For
            each size of the copy, a pair of rates: if all ranks copy at once, and if one rank copies alone. None if not
            measured; `why_not` gives the reason.
        stream: bytes per second of the slowest TCP stream if each host sends to the next host in a ring. None on one
            host.
        latency_s: largest one-way time in seconds of one byte between two hosts over TCP. None on one host.
    """

    hosts: tuple[int, ...]
    copies: dict[int, tuple[float, float]] | None = None
    stream: float | None = None
    latency_s: float | None = None
    why_not: list[str] = field(default_factory=list)

    def least_s(self, collective: str, size_bytes: int) -> float | None:
        """Return a lower bound on a collective's time in seconds, from bandwidth alone.

        The bound is the longer of the times within a host and between hosts; None if neither was measured.

        With H hosts of R ranks each, each host's link must carry a multiple of the size in each direction. The factor
        is 2 (H - 1)/H for an all-reduce, (H - 1)/H for an all-gather and a reduce-scatter, R (H - 1)/H for an
        all-to-all, and 1 for a broadcast and a message (Patarasuk & Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002, applied
        to hosts instead of ranks).

        Within a host of n ranks, each rank must copy at least a multiple of the size. The factor is 1 for an
        all-reduce, a broadcast and a message, (n - 1)/n for an all-gather and an all-to-all, and (1 + 1/n)/2 for a
        reduce-scatter.
        """
        ranks, hosts = len(self.hosts), len(set(self.hosts))
        others, away = (ranks - 1) / ranks, (hosts - 1) / hosts
        largest = max(map(self.hosts.count, self.hosts))
        times_s = []
        if self.stream is not None:
            shares = {"all_reduce": 2 * away, "all_gather": away, "reduce_scatter": away, "all_to_all": largest * away}
            times_s.append(shares.get(collective, 1.0) * size_bytes / self.stream)
        if self.copies is not None and (hosts == 1 or collective != "send_receive"):
            together, alone = self.copies[min(self.copies, key=lambda measured: abs(measured - size_bytes))]
            shares = {"all_gather": others, "all_to_all": others, "reduce_scatter": (1 + 1 / ranks) / 2}
            rate = alone if collective == "send_receive" else together
            times_s.append(shares.get(collective, 1.0) * size_bytes / rate)
        return max(times_s, default=None)

    def share(self, speed: CollectiveSpeed) -> float | None:
        """Return the ratio of the lower bound to the measured time; None without a bound."""
        least_s = self.least_s(speed.collective, speed.size_bytes)
        return None if least_s is None else least_s / speed.time_s

    @classmethod
    def best(cls, limits: Sequence[Limit]) -> Limit:
        """Combine several measurements of the same ranks into the best values.

        Other work on the hosts can only slow a measurement.
        """
        known = [limit.copies for limit in limits if limit.copies is not None]
        copies = {size: (max(c[size][0] for c in known), max(c[size][1] for c in known)) for size in (known or [{}])[0]}
        return cls(
            limits[0].hosts,
            copies or None,
            max((limit.stream for limit in limits if limit.stream is not None), default=None),
            min((limit.latency_s for limit in limits if limit.latency_s is not None), default=None),
            limits[0].why_not,
        )


def measure_limit(group: Group, sizes: Sequence[int]) -> Limit:
    """Measure copies of `sizes` bytes, and the streams between hosts if there are several.

    Every rank must call this function, and gets the same result.

    Raises:
        SyncError: the hosts cannot reach each other over TCP.
    """
    copies, why_not = (
        _copies(group, sizes) if group.device.type == "cpu" else (None, "copies between GPUs are not measured")
    )
    stream, latency_s = _between_hosts(group) if group.spans_hosts else (None, None)
    return Limit(group.hosts, copies, stream, latency_s, [why_not] if why_not else [])


# Within a host


def _copies(group: Group, sizes: Sequence[int]) -> tuple[dict[int, tuple[float, float]] | None, str | None]:
    """Measure two copy rates per size, or return None and the reason.

    The first rate, in bytes per second, is the slowest rank's rate if all ranks copy at once. The second rate is the
    rate of one rank alone.
    """
    largest = max(sizes)
    own, reason = None, None
    try:
        own = create(largest, "limit")
    except ClusterError as error:
        reason = str(error)
    with ExitStack() as made:
        if own is not None:
            own.segment.bytes.fill_(1)
            made.callback(own.close_descriptor)
        theirs, reasons = _neighbours(group, own, reason)
        if theirs is None or own is None:
            return None, next(reason for reason in reasons if reason)
        mine, written = theirs.clone(), own.segment.bytes
        found = {}
        for size in sizes:
            together, alone = (
                size / _copy_s(group, mine[:size], theirs[:size], written[:size], only=only)
                for only in (None, group.hosts.index(0))
            )
            found[size] = (together, alone)
        return found, None


def _neighbours(group: Group, own: OwnedSegment | None, reason: str | None) -> tuple[Tensor | None, list[str | None]]:
    """Map the memory of the next rank on this host; return failures by rank.

    If one rank fails, all ranks get None instead of the memory.
    """
    handles = group.gather_json(own and asdict(own.handle))
    on_host = [rank for rank, host in enumerate(group.hosts) if host == group.hosts[group.rank]]
    neighbour = handles[on_host[(on_host.index(group.rank) + 1) % len(on_host)]]
    theirs = None
    try:
        theirs = attach(Handle(**neighbour)).bytes if neighbour else None
    except ClusterError as error:
        reason = str(error)
    reasons = group.gather_json(reason)
    return (None if any(reasons) else theirs), reasons


def _copy_s(group: Group, mine: Tensor, theirs: Tensor, written: Tensor, *, only: int | None) -> float:
    """Measure the time in seconds to copy memory that another process has just written."""

    def copy() -> None:
        if only in (None, group.rank):
            mine.copy_(theirs)

    times_s = []
    for value in range(_COPIES):
        written.fill_(value)  # otherwise the memory would still be in the cache of the core that copied it before
        times_s.append(timed(group, copy, 1))
    return statistics.median(times_s)


# Between hosts


def _between_hosts(group: Group) -> tuple[float, float]:
    """Measure the slowest stream in bytes per second, and the largest latency in seconds."""
    leaders = [group.hosts.index(host) for host in dict.fromkeys(group.hosts)]
    rates, latencies_s = [0.0] * group.size, [0.0] * group.size
    with _ring(group, leaders) as links:
        for leader in leaders:
            group.barrier()  # one link after the other, because a process that also answers would be slow
            if links is not None:
                onward, back = links
                if group.rank == leader:
                    latencies_s[leader] = _ping_s(onward)
                elif group.rank == leaders[(leaders.index(leader) + 1) % len(leaders)]:
                    _echo(back)
        group.barrier()
        if links is not None:
            rates[group.rank] = _stream(*links)
    rows = group.gather_json([rates[group.rank], latencies_s[group.rank]])
    return min(rows[leader][0] for leader in leaders), max(rows[leader][1] for leader in leaders)


@contextmanager
def _ring(group: Group, leaders: Sequence[int]) -> Iterator[tuple[socket.socket, socket.socket] | None]:
    """Connect the first rank of each host to the next host, in a ring.

    The context yields None on ranks that are not the first of their host.
    """
    with ExitStack() as made:
        listener = None
        if group.rank in leaders:
            listener = made.enter_context(socket.create_server((own_address(), 0)))
            listener.settimeout(group.deadline_s)
        token = secrets.token_hex(_TOKEN_BYTES)  # the token of rank 0 counts; only the ranks of this group know it
        offers = group.gather_json([listener and listener.getsockname()[:2], token])
        if listener is None:
            yield None
            return
        (address, port), _ = offers[leaders[(leaders.index(group.rank) + 1) % len(leaders)]]
        try:
            onward = made.enter_context(socket.create_connection((address, port), timeout=group.deadline_s))
            onward.sendall(bytes.fromhex(offers[0][1]))
            back = made.enter_context(_accepted(listener, bytes.fromhex(offers[0][1]), group.deadline_s))
        except OSError as error:
            raise SyncError(
                "ranks.no_connection",
                "rank {rank} cannot open a TCP connection from {source} to {address}: {error}. Every host must be "
                "able to reach the other hosts on all ports. PACELINE_ADDRESS sets the address of a host that the "
                "other hosts should use.",
                rank=group.rank,
                source=listener.getsockname()[0],
                address=address,
                error=error,
            ) from error
        for connection in (onward, back):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield onward, back


def _accepted(listener: socket.socket, token: bytes, deadline_s: float) -> socket.socket:
    """Accept the connection that sends the token; reject unauthenticated peers."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(deadline_s)
        if secrets.compare_digest(_exactly(connection, len(token)), token):
            return connection
        connection.close()


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Receive `count` bytes; fewer if the other side has closed the connection."""
    found = b""
    while len(found) < count and (more := connection.recv(count - len(found))):
        found += more
    return found


def _ping_s(connection: socket.socket) -> float:
    """Measure half of the median round-trip time of a byte, in seconds."""
    times_s: list[float] = []
    until = time.perf_counter() + _PINGS_S
    while len(times_s) < 3 or (len(times_s) < _PINGS and time.perf_counter() < until):
        started = time.perf_counter()
        connection.sendall(b"?")
        _exactly(connection, 1)
        times_s.append(time.perf_counter() - started)
    connection.sendall(b".")
    return statistics.median(times_s) / 2


def _echo(connection: socket.socket) -> None:
    while _exactly(connection, 1) == b"?":
        connection.sendall(b"!")


def _stream(onward: socket.socket, back: socket.socket) -> float:
    """Send to the next host as fast as possible, and measure the receive rate.

    The result is the highest number of bytes per second from the previous host in any interval.
    """
    fill_s, stretch_s, margin_s = _STREAM_S
    sender = threading.Thread(
        target=_send_for, args=(onward, fill_s + _STRETCHES * stretch_s + margin_s), name="stream"
    )
    sender.start()
    _received(back, fill_s)
    rates = [_received(back, stretch_s) for _ in range(_STRETCHES)]
    room = bytearray(_CHUNK)
    while back.recv_into(room):  # reads until the end, so that the sender never blocks
        pass
    sender.join()
    return max(rates)


def _received(connection: socket.socket, seconds: float) -> float:
    """Measure the received bytes per second."""
    room, count, began = bytearray(_CHUNK), 0, time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        count += connection.recv_into(room)
    return count / (now - began)


def _send_for(connection: socket.socket, seconds: float) -> None:
    data = memoryview(bytes(_CHUNK))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
