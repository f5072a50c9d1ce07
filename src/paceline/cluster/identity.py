"""Identity of this host, and its network interfaces."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_identity() -> str:
    """An identity that is equal for processes with the same kernel and network namespace.

    An emulated host has a namespace of its own.
    """
    namespace = "/proc/self/ns/net"
    return f"{os.stat(namespace).st_ino if os.path.exists(namespace) else 0}@{boot_id()}@{socket.gethostname()}"


def boot_id() -> str:
    """Boot id of this kernel; the host's name where the kernel has none.

    Names alone do not do: hosts may share one, and containers of one host have names of their own.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def interface_of(address: str) -> str | None:
    """Network interface of this host that has an address; None where it cannot be told."""
    import psutil

    return next(
        (
            name
            for name, has in psutil.net_if_addrs().items()
            if any(a.address.partition("%")[0] == address for a in has)
        ),
        None,
    )
