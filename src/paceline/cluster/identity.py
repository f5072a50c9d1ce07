"""Identity of this host, and its network interfaces."""

from __future__ import annotations

import os
import socket


def host_identity() -> str:
    """An identity that is equal for processes with the same kernel and network namespace.

    An emulated host has a namespace of its own.
    """
    namespace = "/proc/self/ns/net"
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    return f"{os.stat(namespace).st_ino if os.path.exists(namespace) else 0}@{boot}@{socket.gethostname()}"


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


def _first_line(file: str) -> str:
    try:
        with open(file) as lines:
            return lines.readline().strip()
    except OSError:
        return ""
