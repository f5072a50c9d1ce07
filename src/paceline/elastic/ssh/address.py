"""Addresses of hosts by their names in ssh, and the command line of ssh."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Sequence

from paceline.cluster.launch_engines.engine import COORDINATOR
from paceline.elastic.ssh.host_list import NamedHost
from paceline.errors import LaunchError

_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # no question: nobody could answer it
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=10"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "ForwardAgent=no"),
    *("-o", "ForwardX11=no"),
    *("-o", "ControlPath=none"),  # a connection of its own, which ends with this process
)
_ANSWER_S = 15.0


def ssh() -> list[str]:
    """The command line of ssh, up to its host."""
    return [*ssh_program(), *_OPTIONS]


def ssh_program() -> list[str]:
    """The program and its first arguments; PACELINE_SSH names another than `ssh`."""
    return shlex.split(os.environ.get("PACELINE_SSH") or "ssh")


def coordinator_of(hosts: Sequence[NamedHost]) -> str:
    """Address of host 0 as the other hosts may reach it.

    Raises:
        LaunchError: it cannot be found out.
    """
    if os.environ.get(COORDINATOR) or len(hosts) == 1:
        return "localhost"  # the variable has precedence; alone, nobody asks
    if not hosts[0].is_here:
        return host_name(hosts[0].name)
    other = host_name(hosts[1].name)
    try:
        with socket.socket(_family(other), socket.SOCK_DGRAM) as asked:
            asked.connect((other, 9))  # nothing is sent: the kernel says the address that it would send from
            return str(asked.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"this machine is host 0, but its address towards {hosts[1].name} ({other}) cannot be found out: "
            f"{error.strerror or error}. Name it with {COORDINATOR}=ADDRESS."
        ) from error


def host_name(name: str) -> str:
    """Name or address that ssh connects to for a host, by its configuration."""
    try:
        done = subprocess.run(
            [*ssh(), "-G", "--", name], capture_output=True, text=True, timeout=_ANSWER_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise no_ssh(error) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"ssh did not say where host {name} is: {error}") from error
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value
    raise LaunchError(f"ssh does not know host {name}: {done.stderr.strip() or 'no host name'}")


def no_ssh(error: FileNotFoundError) -> LaunchError:
    """Error for a machine without ssh."""
    return LaunchError(f"--hosts needs the program {error.filename}, which is not there (package openssh-client).")


def _family(name: str) -> socket.AddressFamily:
    return socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0][0]
