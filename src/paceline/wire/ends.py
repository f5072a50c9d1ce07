"""Ends of a connection: their names, and who is at the other one."""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.wire.key import RunKey

_PEER = struct.Struct("3i")  # process, user and group, of SO_PEERCRED


def has_key(link: socket.socket, key: RunKey) -> bool:
    """True if the other end has proved, by TLS, that it holds this key."""
    return isinstance(link, ssl.SSLSocket) and link.getpeercert(binary_form=True) == key.certificate_der


def user_of_peer(link: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel tells it."""
    _, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A path of a Unix socket in any folder; the kernel takes 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def name_of(where: tuple[str, int] | Path) -> str:
    """A place as messages name it."""
    return str(where) if isinstance(where, Path) else f"{where[0]}:{where[1]}"
