"""Silence of a TCP peer's kernel, which even a busy process's answers."""

from __future__ import annotations

import socket
import struct

_INFO_BYTES = 104  # of Linux's struct tcp_info, see tcp(7)
_PROBES = 3
_RETRANSMITS, _UNACKED, _LAST_ACK_RECV = 2, 24, 56  # offsets in it


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


def is_unacknowledged(link: socket.socket, for_s: float) -> bool:
    """True if two retransmissions got no acknowledgement, for that many seconds.

    TCP alone would try ever more rarely. The first retransmission comes after 0.2 s or more, as the round trip is, and
    the second after twice that.
    """
    retransmits, _, heard_s = _known(link)
    return retransmits >= 2 and heard_s > for_s


def unanswered(link: socket.socket) -> tuple[bool, int, float]:
    """Packets that the other end's kernel has left unanswered.

    True if one was sent again; their number; seconds since the last acknowledgement.

    A connection that sends often sends again late: Linux puts that off with each packet (tail loss probes).
    """
    retransmits, packets, heard_s = _known(link)
    return retransmits > 0, packets, heard_s


def _known(link: socket.socket) -> tuple[int, int, float]:
    """Retransmissions, packets not acknowledged, and seconds since the last acknowledgement."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    [packets], [heard_ms] = struct.unpack_from("I", info, _UNACKED), struct.unpack_from("I", info, _LAST_ACK_RECV)
    return info[_RETRANSMITS], packets, heard_ms / 1000
