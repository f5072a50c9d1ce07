"""Silence of a TCP peer's kernel, which even a busy process's answers."""

from __future__ import annotations

import socket
import struct

_INFO_BYTES = 104  # of Linux's struct tcp_info, see tcp(7)
_PROBES = 3
_RETRANSMITS, _LAST_ACK_RECV = 2, 56  # offsets in it


def end_when_silent(link: socket.socket, silent_s: int) -> None:
    """Have the kernel end a TCP connection whose peer is silent for so long.

    It asks when nothing else is under way; what is under way it repeats no longer than that.
    """
    between_s = max(1, silent_s // (1 + _PROBES))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_s)


def is_unacknowledged(link: socket.socket, for_s: float, retransmissions: int = 2) -> bool:
    """True if so many retransmissions got no acknowledgement, for that many seconds.

    TCP alone would try ever more rarely. The first retransmission comes after 0.2 s or more, as the round trip is, and
    the second after twice that.
    """
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    heard_ms: int = struct.unpack_from("I", info, _LAST_ACK_RECV)[0]
    return info[_RETRANSMITS] >= retransmissions and heard_ms > 1000 * for_s
