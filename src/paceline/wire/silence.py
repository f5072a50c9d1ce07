"""Detection of silent TCP peers.

The kernel of a peer acknowledges packets even if the peer's process is busy.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

_INFO_BYTES = 104  # size of Linux's struct tcp_info, see tcp(7)
_PROBES = 3
# offsets of fields in struct tcp_info
_RETRANSMITS, _BACKOFF, _RTO, _UNACKED, _LAST_DATA_RECV, _LAST_ACK_RECV = 2, 4, 8, 24, 52, 56
# constants of sock_diag(7) and netlink(7)
_SOCK_DIAG, _BY_FAMILY, _DUMP, _INET_DIAG_INFO, _ESTABLISHED = 4, 20, 0x301, 2, 1 << 1
_HEADER, _REQUEST, _SOCKET = struct.Struct("=IHHII"), struct.Struct("=BBBxI48x"), struct.Struct("=4xHH16s16s32x")
_SIOCGSKNS, _CLONE_NEWNET = 0x894C, 0x40000000
_ANSWER_S = 1.0  # longest wait in seconds for an answer of the kernel


def end_when_silent(link: socket.socket, silent_s: int) -> None:
    """Make the kernel end a TCP connection whose peer is silent for `silent_s` seconds.

    On an idle connection, the kernel sends keepalive probes. While data is unacknowledged, the kernel stops its
    retransmissions after this time.
    """
    between_s = max(1, silent_s // (1 + _PROBES))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_s)


def is_unacknowledged(link: socket.socket, for_s: float) -> bool:
    """Return True if two retransmissions were not acknowledged for `for_s` seconds.

    TCP retransmits at growing intervals. The first retransmission is sent after at least 0.2 s, depending on the
    round-trip time. The second follows after twice this time.
    """
    retransmits, _, heard_s = _known(link)
    return retransmits >= 2 and heard_s > for_s


def patience_s(link: socket.socket) -> float:
    """Return the retransmission timeout in seconds, which TCP derives from the round trips so far.

    The timeout is at least 0.2 s, and longer if queues in the network fill from time to time.
    """
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    [after_us] = struct.unpack_from("I", info, _RTO)
    return float(after_us) / 1e6 / (1 << info[_BACKOFF])


def unanswered(link: socket.socket) -> tuple[bool, int, float]:
    """Return what is known about packets that the other end's kernel has not acknowledged.

    The result has three parts: True if an unacknowledged packet was retransmitted, the number of unacknowledged
    packets, and the seconds since the last acknowledgement.

    A connection that sends often retransmits late, because Linux delays the retransmission with each new packet (tail
    loss probes).
    """
    retransmits, packets, heard_s = _known(link)
    return retransmits > 0, packets, heard_s


def _known(link: socket.socket) -> tuple[int, int, float]:
    """Return retransmissions, unacknowledged packets, and the seconds since the last acknowledgement."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    [packets], [heard_ms] = struct.unpack_from("I", info, _UNACKED), struct.unpack_from("I", info, _LAST_ACK_RECV)
    return info[_RETRANSMITS], packets, heard_ms / 1000


def is_heard(link: socket.socket, within_s: float) -> bool:
    """Return True if any TCP connection has recently received data from the peer's host.

    On a full link, small messages are delayed while bulk data still arrives. The result is False if the kernel does not
    report its connections.
    """
    found: list[float] = []

    def look() -> None:
        with suppress(OSError):  # raised, for example, if the connection was reset and no longer has a peer
            address = ipaddress.ip_address(link.getpeername()[0].partition("%")[0])
            _enter_namespace_of(link)
            found.extend(_silences(address))

    # a separate thread is used, because it enters the network namespace of the connection
    thread = threading.Thread(target=look, name="paceline-hearing")
    thread.start()
    thread.join()
    return any(silent_s <= within_s for silent_s in found)


def _enter_namespace_of(link: socket.socket) -> None:
    """Enter the network namespace of a connection, which may belong to an emulated host."""
    try:
        namespace = fcntl.ioctl(link, _SIOCGSKNS)
    except OSError:  # this process has no permission, so it has not created other namespaces
        return
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(namespace)


def _silences(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Iterator[float]:
    """Yield, for each TCP connection to an address, the seconds since the last received data."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _ESTABLISHED)
            kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, family, 0) + request)
            for message in _answers(kernel):
                *_, there = _SOCKET.unpack_from(message)
                other = ipaddress.ip_address(there[:4] if family == socket.AF_INET else there)
                if (getattr(other, "ipv4_mapped", None) or other) == address:
                    yield from _silence_of(message)


def _answers(kernel: socket.socket) -> Iterator[bytes]:
    """Yield the kernel's answer for each socket."""
    while True:
        data = kernel.recv(2**16)
        while data:
            length, kind, *_ = _HEADER.unpack_from(data)
            if kind != _BY_FAMILY:  # the list is complete, or an error occurred
                return
            yield data[_HEADER.size : length]
            data = data[(length + 3) & ~3 :]


def _silence_of(message: bytes) -> Iterator[float]:
    """Yield the seconds since the last received data, according to the `tcp_info` in a message."""
    at = _SOCKET.size
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INET_DIAG_INFO and length >= 4 + _LAST_ACK_RECV + 4:
            data_ms, ack_ms = (
                struct.unpack_from("I", message, at + 4 + o)[0] for o in (_LAST_DATA_RECV, _LAST_ACK_RECV)
            )
            yield min(data_ms, ack_ms) / 1000
        at += max(4, (length + 3) & ~3)
