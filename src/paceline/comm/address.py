"""The address of this host that other ranks reach, the only one paceline listens on."""

from __future__ import annotations

import os
import socket

from paceline.cluster.machine import host_identity as host_identity
from paceline.cluster.machine import interface_of
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
    return interface_of(own_address())


def own_host() -> str:
    """The name of this host in errors and reports; an emulated host has its own."""
    host = HostEntry.from_env()
    return host.name if host else socket.gethostname()
