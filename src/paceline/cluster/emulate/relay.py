"""Delay on the links of emulated hosts: a user-space switch that holds every packet.

It works where there is no `netem`, and takes the place of the bridge. Large pieces of TCP pass in one, as through a
network card that cuts them itself, so that it keeps up with 1 Gbit/s; what a link is too slow for, its queue drops, as
everywhere.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from paceline.cluster.emulate.namespace import inside
from paceline.cluster.emulate.network import Wire

_ALL_PROTOCOLS = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
# bytes: more than any link's queue holds, for the queue, not the socket, is to drop what is too much
_BUFFER = 64 * 2**20
_HEADER = 10  # bytes of virtio's header before a frame: which checksum is still to be made, and where to cut
_LARGEST = 2**17
_BATCH = 64  # frames taken from one port before the others have their turn


class _DelayedBytes(NamedTuple):
    due: float
    source: int
    target: int
    frame: bytes


class Relay(threading.Thread):
    """A thread that carries packets between ports of the bridge's namespace until the process ends.

    `cut` holds the numbers of the hosts whose packets it drops, both ways.
    """

    def __init__(self, bridge: str, links: Sequence[Wire], delay_s: float) -> None:
        """Open the ports, which must exist and belong to no bridge.

        Packets are carried from `start` on.
        """
        super().__init__(name="relay", daemon=True)
        self.cut: set[int] = set()
        self._delay_s = delay_s
        self._by_address = {bytes.fromhex(link.mac.replace(":", "")): number for number, link in enumerate(links)}
        self._ports = inside(bridge, lambda: [_port(link.host) for link in links])
        self._numbers = {port: number for number, port in enumerate(self._ports)}
        self._held: deque[_DelayedBytes] = deque()

    def run(self) -> None:
        """Carry packets in order of arrival, each held equally long."""
        while True:
            wait_s = max(0.0, self._held[0].due - time.monotonic()) if self._held else None
            ready, _, _ = select.select(self._ports, [], [], wait_s)
            for port in ready:
                self._take(port)
            while self._held and self._held[0].due <= time.monotonic():
                self._pass_on(self._held.popleft())

    def _take(self, port: socket.socket) -> None:
        for _ in range(_BATCH):
            try:
                frame = port.recv(_LARGEST)
            except OSError:  # none is left, or the link is just being removed
                return
            target = self._by_address.get(frame[_HEADER : _HEADER + 6])
            if target is not None:
                self._held.append(_DelayedBytes(time.monotonic() + self._delay_s, self._numbers[port], target, frame))

    def _pass_on(self, held: _DelayedBytes) -> None:
        if self.cut.isdisjoint((held.source, held.target)):
            try:
                self._ports[held.target].send(held.frame)
            except OSError:  # the queue of the link is full
                return


def _port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # of no protocol, so nothing comes before it is bound
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    try:
        port.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER)
        port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
    except PermissionError:  # in a user namespace: what the system allows has to do
        port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    port.setblocking(False)
    port.bind((name, _ALL_PROTOCOLS))
    return port
