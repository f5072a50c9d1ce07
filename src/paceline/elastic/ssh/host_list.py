"""Hosts of the option `--hosts`: names with commas between, or a file."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.launch_engines.engine import MOST_HOSTS
from paceline.errors import LaunchError
from paceline.files import read_text

# No name begins with "-": ssh would take it for an option.
_ENTRY = re.compile(
    r"(?P<name>(?:[A-Za-z0-9_][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\]))(?::(?P<devices>\d{1,6}))?"
)


@dataclass(frozen=True)
class NamedHost:
    """A host as it was named.

    Attributes:
        name: as ssh takes it, perhaps with a user.
        devices: number to use there; None for all.
    """

    name: str
    devices: int | None = None

    @property
    def is_here(self) -> bool:
        """True if the name is this machine's own: it needs no ssh."""
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", own, own.partition(".")[0]}


def read_hosts(text: str) -> list[NamedHost]:
    """Hosts of the option's value, a list or the path of a file.

    Raises:
        LaunchError: an entry is no host, a host is named twice, there is none, or the file cannot be read.
    """
    if Path(text).is_file() or "/" in text:
        where, entries = text, _lines(Path(text))
    else:
        where, entries = "--hosts", [entry.strip() for entry in text.split(",")]
    hosts = [_host(entry, where) for entry in entries]
    names = [host.name for host in hosts]
    if twice := {name for name in names if names.count(name) > 1}:
        name = min(twice)
        raise LaunchError(f"{where} names {name} twice. For two of its devices, say {name}:2.")
    if sum(host.is_here for host in hosts) > 1:
        raise LaunchError(
            f"{where} names this machine twice: {', '.join(host.name for host in hosts if host.is_here)}."
        )
    return hosts


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.partition("#")[0].strip() for line in read_text(path).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: the list of hosts cannot be read: {error}") from error
    if not (hosts := [line for line in lines if line]):
        raise LaunchError(f"{path}: names no host. Write one on each line, as in b or b:2 (two of its devices).")
    return hosts


def _host(entry: str, where: str) -> NamedHost:
    found = _ENTRY.fullmatch(entry)
    devices = int(found["devices"]) if found and found["devices"] else None
    if found is None or devices == 0 or (devices or 0) > MOST_HOSTS:
        raise LaunchError(
            f'{where}: "{entry[:80]}" is no host. Write NAME, USER@NAME or [ADDRESS], and :N behind it for N of its '
            "devices, as in a,b:2."
        )
    return NamedHost(found["name"], devices)
