"""Hosts that are reached by ssh: their list, their addresses, and one of them."""

from __future__ import annotations

import ctypes
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.cluster.launch_engines import COORDINATOR, MOST_HOSTS
from paceline.errors import LaunchError
from paceline.files import read_text
from paceline.rank_environment import KEY_FD, KEY_FILE
from paceline.wire.key import RunKey, key_descriptor

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


STARTED = b"paceline: host process started\n"  # first line on standard output, behind what a login shell may print
SIGNALS = {b"INT": signal.SIGINT, b"TERM": signal.SIGTERM}
SAVE_S = 30.0  # from SIGTERM to SIGKILL
_ORDER_LIMIT, _ORDER_S = 2**20, 60.0
_PR_SET_PDEATHSIG = 1


class Order(msgspec.Struct):
    """Command to run on a host.

    Attributes:
        arguments: of Python.
        environment: added to that of the host.
        key: the run's, as PEM.
        announce: print `STARTED`, and pass the command's output on; else it has this program's own.
    """

    arguments: list[str]
    directory: str
    environment: dict[str, str]
    key: str
    announce: bool


def main() -> int:
    """Run the command of the order on standard input, and return its exit code."""
    try:
        order, rest = _read_order()
        key = key_descriptor(RunKey.from_pem(order.key.encode()))
        process = _start(order, key)
    except LaunchError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        return 1
    os.close(key)
    if order.announce:
        os.write(1, STARTED)
    code = _watch(process, rest)
    return code if code >= 0 else 128 - code


def _read_order() -> tuple[Order, bytes]:
    """The first line of standard input, and what has come after it."""
    data, until = b"", time.monotonic() + _ORDER_S
    while b"\n" not in data:
        if not select.select([0], [], [], max(0.0, until - time.monotonic()))[0]:
            raise LaunchError(f"no order came on standard input within {_ORDER_S:.0f} s; `--hosts` starts this program")
        part = os.read(0, 2**16)
        data += part
        if not part or len(data) > _ORDER_LIMIT:
            raise LaunchError("standard input has no order; `--hosts` starts this program")
    line, _, rest = data.partition(b"\n")
    try:
        return msgspec.json.decode(line, type=Order), rest
    except msgspec.MsgspecError as error:
        raise LaunchError(f"the order of another version of paceline: {error}. Install the same one here.") from None


def _start(order: Order, key: int) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name not in (KEY_FD, KEY_FILE)}
    try:
        return subprocess.Popen(
            [sys.executable, *order.arguments],
            cwd=order.directory,
            env={**inherited, **order.environment, KEY_FD: str(key)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if order.announce else None,
            stderr=subprocess.PIPE if order.announce else None,
            pass_fds=[key],
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise LaunchError(
            f"the command cannot be started in {order.directory}: {error.strerror}. Every host needs the directory "
            "that it is started in."
        ) from error


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _watch(process: subprocess.Popen[bytes], data: bytes) -> int:
    """Pass signals on until the command ends. Returns its exit code, negative for a signal."""
    for number in SIGNALS.values():
        signal.signal(number, lambda number, _: process.send_signal(number))
    ended, kill_at, signals = os.pidfd_open(process.pid), float("inf"), [0]
    output = {stream.fileno(): to for stream, to in ((process.stdout, 1), (process.stderr, 2)) if stream}
    try:
        while True:
            *lines, data = data.split(b"\n")
            for line in lines:
                if line in SIGNALS:
                    process.send_signal(SIGNALS[line])
            ready = select.select([ended, *signals, *output], [], [], 0.2 if kill_at < float("inf") else None)[0]
            _pass_on(output, ready)
            if ended in ready:
                while ready := select.select(output, [], [], 0)[0]:
                    _pass_on(output, ready)
                return process.wait()
            if 0 in ready:
                part = os.read(0, 4096)
                data = (data + part)[-4096:]
                if not part:
                    signals, kill_at = [], time.monotonic() + SAVE_S
                    process.terminate()
            if time.monotonic() > kill_at:
                process.kill()
    finally:
        os.close(ended)


def _pass_on(output: dict[int, int], ready: list[int]) -> None:
    """Write what the command has written. A lost connection takes nothing, and does not disturb its end."""
    for descriptor in output.keys() & set(ready):
        if not (data := os.read(descriptor, 2**16)):
            del output[descriptor]
        with suppress(OSError):
            while data:
                data = data[os.write(output[descriptor], data) :]


if __name__ == "__main__":
    sys.exit(main())


_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # ssh must not prompt
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
        return "localhost"  # the variable has precedence; one host needs no address
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
