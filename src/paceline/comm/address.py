"""The address of this host that other ranks reach, the only one paceline listens on."""

from __future__ import annotations

import os
import socket

from paceline.rank_environment import MASTER_ADDR, MASTER_PORT, HostEntry, named_address


def own_address() -> str:
    """PACELINE_ADDRESS, else the address that reaches the rendezvous (MASTER_ADDR), else loopback."""
    if named := named_address():
        return named
    master = os.environ.get(MASTER_ADDR)
    if master is None:
        return "127.0.0.1"
    where = (master, int(os.environ.get(MASTER_PORT, "1")))
    family = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def own_interface() -> str | None:
    """The network interface that has the address; None where it cannot be told."""
    import psutil

    own = own_address()
    return next(
        (name for name, has in psutil.net_if_addrs().items() if any(a.address.partition("%")[0] == own for a in has)),
        None,
    )


def own_host() -> str:
    """The name of this host in errors and reports; an emulated host has its own."""
    host = HostEntry.from_env()
    return host.name if host else socket.gethostname()


def host_identity() -> str:
    """An identity that is equal for processes with the same kernel and network namespace.

    An emulated host has a namespace of its own.
    """
    namespace = "/proc/self/ns/net"
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    return f"{os.stat(namespace).st_ino if os.path.exists(namespace) else 0}@{boot}@{socket.gethostname()}"


def _first_line(file: str) -> str:
    try:
        with open(file) as lines:
            return lines.readline().strip()
    except OSError:
        return ""
