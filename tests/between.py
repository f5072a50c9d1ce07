"""Man in the middle of a test: a TCP proxy between two ranks that can change what passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

import paceline.comm.tcp.mesh as mesh_module
from paceline.comm.rendezvous import tell_all
from paceline.comm.tcp import TcpProcessGroup

# number of the connection, True for bytes from the rank that connects, bytes that passed so far, bytes -> bytes
Change = Callable[[int, bool, int, bytes], bytes]
HANDSHAKE_BYTES = 4000  # both ways; TLS and the greetings are over


@dataclass
class Between:
    """What connects two ranks, and what it has seen of each connection.

    Attributes:
        seen: the bytes of each connection, from the rank that connects and from the other.
    """

    target: tuple[str, int]
    change: Change
    seen: list[dict[bool, bytearray]] = field(default_factory=list)
    ends: list[dict[bool, socket.socket]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        """Where the rank connects to."""
        port: int = self.listener.getsockname()[1]
        return port

    def close(self) -> None:
        """End all connections and threads."""
        _shut(self.listener)
        self._threads[0].join()
        self.listener.close()
        for end in (end for ends in self.ends for end in ends.values()):
            _shut(end)
        for thread in self._threads[1:]:
            thread.join()
        for end in (end for ends in self.ends for end in ends.values()):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, 10)
            except OSError:  # the rank has ended: nor is there anybody here
                near.close()
                self.listener.close()
                return
            number = len(self.ends)
            self.seen.append({True: bytearray(), False: bytearray()})
            self.ends.append({True: far, False: near})
            for outward, source, sink in ((True, near, far), (False, far, near)):
                thread = threading.Thread(target=self._pass_on, args=(number, outward, source, sink))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, number: int, outward: bool, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(None)
        seen = self.seen[number][outward]
        try:
            while data := source.recv(2**16):
                changed = self.change(number, outward, len(seen), data)
                seen += data
                sink.sendall(changed)
        except OSError:
            pass
        _shut(source)
        _shut(sink)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def group_through(change: Change) -> Iterator[tuple[TcpProcessGroup, Between | None]]:
    """A new group of two ranks whose rank 1 reaches rank 0 through a proxy, which rank 1 gets."""
    proxies: list[Between] = []

    def tell_of_the_proxy(store: Store, what: str, *arguments: Any) -> list[Any]:
        told = tell_all(store, what, *arguments)
        if what == "place" and dist.get_rank() == 1:
            proxies.append(Between((told[0]["address"], told[0]["port"]), change))
            told[0]["port"] = proxies[0].port
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_module, "tell_all", tell_of_the_proxy)
        group = dist.new_group(backend="tcp")
    assert isinstance(group, TcpProcessGroup)
    try:
        yield group, proxies[0] if proxies else None
    finally:
        dist.destroy_process_group(group)
        for proxy in proxies:
            proxy.close()
