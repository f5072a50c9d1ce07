"""Start of a command on every host, with the system's ssh (`--hosts a,b:2`).

The starter makes a key for the run. The starter is not a host process itself: ssh starts the host processes on other
machines. If the user names this machine as well, the starter also starts a host process here. Each host process runs
this module, whose `main` runs the command. The starter forwards signals to host 0, which coordinates, and returns the
exit code of host 0. If another host leaves or is lost, the starter starts the command on the next spare host.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.cluster.launch_engines import (
    COORDINATOR,
    ENGINE,
    HOST_DEVICES,
    HOST_NUMBER,
    HOSTS,
    MOST_HOSTS,
    address_from,
    default_port,
)
from paceline.elastic.failure import StopSignals, stopped_before
from paceline.errors import LaunchError
from paceline.files import read_text, scratch_folder
from paceline.rank_environment import KEY_FD, KEY_FILE, RankEnvironment
from paceline.text import printable
from paceline.wire.key import RunKey, key_descriptor

REMOTE_PYTHON = "PACELINE_REMOTE_PYTHON"
_PROGRAM = "paceline.elastic.ssh"
# user settings that apply only to this machine
_NOT_SENT = RankEnvironment.names() | {KEY_FD, KEY_FILE, REMOTE_PYTHON, "PACELINE_SSH"}
_SENT_AS_WELL = ("OMP_NUM_THREADS",)
_START_S = 60.0  # time for the connection, the login and the start of Python
# time for the other hosts to end after host 0 has failed; the same after host 0 is done
_DISMISS_S, _LAST_FILES_S = 5.0, 60.0
# time from the failure of another host to its replacement; if host 0 ends within this time, the run has ended
_REPLACE_S = 2.0
_TERMINATE_S = 3.0  # time from the end of a command's input to SIGKILL, once all hosts had time to save
_LINE_LIMIT = 2**16
_SSH_FAILED = 255  # exit code of ssh if ssh itself fails
_TICK_S = 0.2


def run_on_hosts(hosts: Sequence[NamedHost], arguments: Sequence[str], spares: Sequence[NamedHost] = ()) -> int:
    """Run `python ARGUMENTS…` on every host. Return the exit code of host 0.

    Args:
        spares: hosts that replace hosts that leave the run or are lost, except host 0.

    Raises:
        LaunchError: a host cannot be reached, or cannot start the program.
    """
    key = RunKey.make()
    address, port = address_from(coordinator_of(hosts), default_port("ssh", key.fingerprint))
    common = {
        **{name: value for name, value in os.environ.items() if name.startswith("PACELINE_") and name not in _NOT_SENT},
        **{name: os.environ[name] for name in _SENT_AS_WELL if name in os.environ},
        HOSTS: str(len(hosts)),
        COORDINATOR: f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
        ENGINE: "ssh",
    }
    pem = key.to_pem().decode()
    with ExitStack() as held:
        folder = held.enter_context(scratch_folder())
        signals = held.enter_context(StopSignals())

        def start(host: NamedHost, number: int, is_spare: bool = False) -> _HostCommand:
            place = {HOST_NUMBER: str(number)} | ({HOST_DEVICES: str(host.devices)} if host.devices else {})
            order = Order(list(arguments), os.getcwd(), common | place, pem, announce=not host.is_here)
            return held.enter_context(_HostCommand(host, order, folder, is_spare))

        started = [start(host, number) for number, host in enumerate(hosts)]
        return _watch(started, signals, _Spares(spares, start))


class _HostCommand:
    """Command on one host. `process` is ssh, or the program itself if the host is this machine."""

    def __init__(self, host: NamedHost, order: Order, folder: Path, is_spare: bool) -> None:
        self.host, self.order, self.is_spare = host, order, is_spare
        # messages of ssh itself, which are kept separate from the output of the host
        self.log = folder / f"ssh-{host.name}"
        self.has_begun = host.is_here
        self._begun_by = time.monotonic() + _START_S
        self._ended_at = float("inf")
        self._signals_sent, self._lost = 0, False
        self._errors = b""  # end of the standard error output, until the command has begun

    def __enter__(self) -> _HostCommand:
        here = [sys.executable, "-m", _PROGRAM]
        output = None if self.host.is_here else subprocess.PIPE  # ssh makes inherited descriptors non-blocking
        try:
            self.process = subprocess.Popen(
                here if self.host.is_here else [*ssh(), "-E", str(self.log), "--", self.host.name, _remote_command()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C then reaches only the starter, which forwards it once
            )
        except FileNotFoundError as error:
            raise no_ssh(error) from error
        self.send(msgspec.json.encode(self.order) + b"\n")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        try:
            self.process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def send(self, data: bytes) -> None:
        """Write to the command's standard input, unless the command has ended."""
        with suppress(BrokenPipeError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def stop(self) -> None:
        """Close the standard input, which ends the command. If ssh is still connecting, terminate ssh."""
        with suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        if not self.has_begun:
            self.process.terminate()

    def pass_on(self, signals: StopSignals) -> None:
        """Forward the first signal, and a second Ctrl-C. Each is forwarded only once."""
        wanted = [signals.first.removeprefix("SIG")] if signals.first else []
        wanted += ["INT"] if signals.kill else []
        for name in wanted[self._signals_sent :]:
            self.send(f"{name}\n".encode())
        self._signals_sent = len(wanted)

    def noted(self, line: bytes, is_error: bool) -> bool:
        """Handle a line of output; return True if it should be shown."""
        if self.has_begun:
            return True
        if line == STARTED:
            self.has_begun = True
        elif is_error:
            self._errors = (self._errors + line)[-_LINE_LIMIT:]
            return True
        return False  # output of the login shell

    def check(self) -> None:
        """Report once if the connection was lost after the command had begun.

        Raises:
            LaunchError: the command did not begin. If the host is a spare, the error is printed instead.
        """
        code, output = self.process.poll(), (self.process.stdout, self.process.stderr)
        if code is not None:
            self._ended_at = min(self._ended_at, time.monotonic())
        if not self.has_begun:
            if code is not None and all(stream is None or stream.closed for stream in output):
                self._refuse(self._problem())
            elif time.monotonic() > self._begun_by:
                self._refuse(
                    LaunchError(
                        "ssh.start_timeout",
                        "ssh did not start paceline on host {host} within {deadline_s:.0f} s",
                        host=self.host.name,
                        deadline_s=_START_S,
                    )
                )
        elif code is not None and (code == _SSH_FAILED or code < 0) and not self.host.is_here and not self._lost:
            self._lost = True
            print(f"paceline: the ssh connection to host {self.host.name} was lost", file=sys.stderr, flush=True)

    @property
    def has_failed(self) -> bool:
        """True if the command ended with an error more than `_REPLACE_S` seconds ago."""
        return self.process.returncode not in (None, 0) and time.monotonic() > self._ended_at + _REPLACE_S

    def _refuse(self, problem: LaunchError) -> None:
        if not self.is_spare:
            raise problem
        print(f"paceline: {printable(str(problem))}", file=sys.stderr, flush=True)
        self.stop()
        self.has_begun = self._lost = True

    def _problem(self) -> LaunchError:
        said = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        code, name = self.process.returncode, self.host.name
        if code == _SSH_FAILED:
            return LaunchError(
                "ssh.unreachable",
                "host {host} cannot be reached by ssh: {reason}\n`{command}` must work without a password or "
                "another prompt.",
                host=name,
                reason=said or "ssh ended with exit code 255",
                command=shlex.join([*ssh_program(), "-o", "BatchMode=yes", name, "true"]),
            )
        last = self._errors.decode(errors="replace").strip().rpartition("\n")[2]
        return LaunchError(
            "ssh.not_started",
            "paceline did not start on host {host} (exit code {code}): {reason}. Install paceline on that "
            "host for {python}, or set {variable} to another Python.",
            host=name,
            code=code,
            reason=last,
            python=_remote_python(),
            variable=REMOTE_PYTHON,
        )


class _Spares:
    """Spare hosts, which replace hosts that have left or were lost.

    Args:
        start: function that starts the command on a spare host, with the number of the replaced host.
    """

    def __init__(self, hosts: Sequence[NamedHost], start: Callable[[NamedHost, int, bool], _HostCommand]) -> None:
        self._hosts, self._start = list(hosts), start

    def replace_failed(self, started: list[_HostCommand], output: _Output) -> None:
        """Replace hosts whose command has failed. Host 0 is never replaced, because its end ends the run."""
        if started[0].process.poll() is not None:
            return
        for number, command in enumerate(started[1:], 1):
            if self._hosts and command.has_failed:
                spare = self._hosts.pop(0)
                replaced = f"host {command.host.name} (number {number})"
                print(f"paceline: the spare host {spare.name} replaces {replaced}", file=sys.stderr, flush=True)
                started[number] = self._start(spare, number, True)
                output.add(started[number])


def _watch(started: list[_HostCommand], signals: StopSignals, spares: _Spares) -> int:
    """Show the output of all hosts until they have ended. Return the exit code of host 0."""
    with _Output() as output:
        for command in started:
            output.add(command)
        try:
            _until_the_end(started, signals, output, spares)
        finally:
            for command in started:
                command.stop()
            until = time.monotonic() + SAVE_S + 5.0
            while _is_under_way(started, output) and time.monotonic() < until and not signals.kill:
                output.show(_TICK_S)
    code = started[0].process.wait()
    return code if 0 <= code < _SSH_FAILED else 1


def _until_the_end(started: list[_HostCommand], signals: StopSignals, output: _Output, spares: _Spares) -> None:
    """Wait until all hosts have ended, at most for some time after host 0.

    Raises:
        LaunchError: a host did not start.
    """
    dismissed_by = float("inf")
    while _is_under_way(started, output) and time.monotonic() < dismissed_by:
        output.show(_TICK_S)
        started[0].pass_on(signals)
        _check(started)
        if signals.first is None:
            spares.replace_failed(started, output)
        elif late := [each.host.name for each in started if not each.has_begun and not each.is_spare]:
            raise stopped_before(f"host {late[0]} had started", signals.first)
        if (code := started[0].process.poll()) is not None and dismissed_by == float("inf"):
            dismissed_by = time.monotonic() + (_DISMISS_S if code else _LAST_FILES_S)
    _check(started)


def _check(started: list[_HostCommand]) -> None:
    for command in started:
        command.check()


def _is_under_way(started: list[_HostCommand], output: _Output) -> bool:
    return output.is_open or any(command.process.poll() is None for command in started)


class _Output:
    """Standard output and error of remote hosts, forwarded line by line."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._parts: dict[int, bytes] = {}

    def add(self, command: _HostCommand) -> None:
        """Forward the output of another host."""
        for stream, to in ((command.process.stdout, 1), (command.process.stderr, 2)):
            if stream is not None:
                self._selector.register(stream, selectors.EVENT_READ, (command, stream, to))

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    @property
    def is_open(self) -> bool:
        return bool(self._selector.get_map())

    def show(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for output, and forward the output that has arrived."""
        for key, _ in self._selector.select(wait_s) if self.is_open else ():
            command, stream, to = key.data
            data = os.read(key.fd, _LINE_LIMIT)
            lines = (self._parts.pop(key.fd, b"") + data).splitlines(keepends=True)
            if data and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < _LINE_LIMIT:
                self._parts[key.fd] = lines.pop()
            if not data:
                self._selector.unregister(stream)
                stream.close()
            _write(to, b"".join(line for line in lines if command.noted(line, to == 2)))
        if not self.is_open:
            time.sleep(wait_s)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _remote_python() -> str:
    return os.environ.get(REMOTE_PYTHON) or sys.executable


def _remote_command() -> str:
    """Return the command line for the remote login shell.

    It contains no secrets, because the order and the key are sent on standard input.
    """
    path = os.pathsep.join(map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    environment = ["env", f"PYTHONPATH={path}"] if path else []
    return shlex.join(["exec", *environment, _remote_python(), "-m", _PROGRAM])


# No name may begin with "-", because ssh would parse such a name as an option.
_ENTRY = re.compile(
    r"(?P<name>(?:[A-Za-z0-9_][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\]))(?::(?P<devices>\d{1,6}))?"
)


@dataclass(frozen=True)
class NamedHost:
    """Host in the user's list of hosts.

    Attributes:
        name: name of the host for ssh, optionally with a user name.
        devices: number of devices to use on the host; None uses all devices.
    """

    name: str
    devices: int | None = None

    def __str__(self) -> str:
        return self.name if self.devices is None else f"{self.name}:{self.devices}"

    @property
    def is_here(self) -> bool:
        """True if the name belongs to this machine, which needs no ssh."""
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", own, own.partition(".")[0]}


def read_hosts(text: str) -> list[NamedHost]:
    """Parse the value of `--hosts`: a list of hosts, or the path of a file.

    Raises:
        LaunchError: an entry is not a host, a host is named twice, there are no hosts, or the file cannot be read.
    """
    if Path(text).is_file() or "/" in text:
        where, entries = text, _lines(Path(text))
    else:
        where, entries = "--hosts", [entry.strip() for entry in text.split(",")]
    hosts = [_host(entry, where) for entry in entries]
    names = [host.name for host in hosts]
    if twice := {name for name in names if names.count(name) > 1}:
        name = min(twice)
        raise LaunchError(
            "ssh.host_twice",
            "{where} names {name} twice. To use two of its devices, write {name}:2.",
            where=where,
            name=name,
        )
    if sum(host.is_here for host in hosts) > 1:
        raise LaunchError(
            "ssh.this_machine_twice",
            "{where} names this machine twice: {hosts}.",
            where=where,
            hosts=[host.name for host in hosts if host.is_here],
        )
    return hosts


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.partition("#")[0].strip() for line in read_text(path).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            "ssh.list_unreadable", "{path}: the list of hosts cannot be read: {error}", path=path, error=error
        ) from error
    if not (hosts := [line for line in lines if line]):
        raise LaunchError(
            "ssh.no_hosts",
            "{path} contains no host. Write one host on each line, for example b, or b:2 to use two of its devices.",
            path=path,
        )
    return hosts


def _host(entry: str, where: str) -> NamedHost:
    found = _ENTRY.fullmatch(entry)
    devices = int(found["devices"]) if found and found["devices"] else None
    if found is None or devices == 0 or (devices or 0) > MOST_HOSTS:
        raise LaunchError(
            "ssh.host_invalid",
            '{where}: "{entry}" is not a host. Write NAME, USER@NAME or [ADDRESS], followed by :N to use N of its '
            "devices, as in a,b:2.",
            where=where,
            entry=entry[:80],
        )
    return NamedHost(found["name"], devices)


STARTED = b"paceline: host process started\n"  # line on standard output that ends the output of the login shell
SIGNALS = {b"INT": signal.SIGINT, b"TERM": signal.SIGTERM}
SAVE_S = 30.0  # seconds from SIGTERM to SIGKILL
_ORDER_LIMIT, _ORDER_S = 2**20, 60.0
_PR_SET_PDEATHSIG = 1


class Order(msgspec.Struct):
    """Command to run on a host.

    Attributes:
        arguments: arguments of Python.
        environment: variables to add to the host's environment.
        key: the run's key, as PEM.
        announce: True to print `STARTED` and forward the output of the command. If False, the command inherits the
            output of this program.
    """

    arguments: list[str]
    directory: str
    environment: dict[str, str]
    key: str
    announce: bool


def main() -> int:
    """Read an order from standard input, run its command, and return the exit code."""
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
    code = _obey_input(process, rest)
    return code if code >= 0 else 128 - code


def _read_order() -> tuple[Order, bytes]:
    """Read the order from the first line of standard input. Return it with any data that follows."""
    data, until = b"", time.monotonic() + _ORDER_S
    while b"\n" not in data:
        if not select.select([0], [], [], max(0.0, until - time.monotonic()))[0]:
            raise LaunchError(
                "ssh.order_timeout",
                "no instructions arrived on standard input within {deadline_s:.0f} s. This program is started by "
                "`--hosts`.",
                deadline_s=_ORDER_S,
            )
        part = os.read(0, 2**16)
        data += part
        if not part or len(data) > _ORDER_LIMIT:
            raise LaunchError(
                "ssh.no_order", "standard input contains no instructions. This program is started by `--hosts`."
            )
    line, _, rest = data.partition(b"\n")
    try:
        return msgspec.json.decode(line, type=Order), rest
    except msgspec.MsgspecError as error:
        raise LaunchError(
            "ssh.other_version",
            "the instructions come from another version of paceline: {error}. Install the same version on this host.",
            error=error,
        ) from None


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
            "ssh.directory_unusable",
            "the command cannot be started in {directory}: {reason}. Every host needs the directory in which the "
            "command was started.",
            directory=order.directory,
            reason=error.strerror,
        ) from error


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _obey_input(process: subprocess.Popen[bytes], data: bytes) -> int:
    """Forward signals until the command ends; return its exit code, negative for a signal."""
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
    """Forward the output of the command, and ignore errors of a lost connection."""
    for descriptor in output.keys() & set(ready):
        if not (data := os.read(descriptor, 2**16)):
            del output[descriptor]
        with suppress(OSError):
            while data:
                data = data[os.write(output[descriptor], data) :]


_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # ssh must not prompt
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=10"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "ForwardAgent=no"),
    *("-o", "ForwardX11=no"),
    *("-o", "ControlPath=none"),  # do not share an existing connection, which could outlive this process
)
_ANSWER_S = 15.0


def ssh() -> list[str]:
    """Return the command line of ssh, without the host."""
    return [*ssh_program(), *_OPTIONS]


def ssh_program() -> list[str]:
    """Return the ssh program and its first arguments. PACELINE_SSH replaces `ssh`."""
    return shlex.split(os.environ.get("PACELINE_SSH") or "ssh")


def coordinator_of(hosts: Sequence[NamedHost]) -> str:
    """Return an address of host 0 that the other hosts can reach.

    Raises:
        LaunchError: the address cannot be determined.
    """
    if os.environ.get(COORDINATOR) or len(hosts) == 1:
        return "localhost"  # a user's setting takes precedence, and a single host needs no address
    if not hosts[0].is_here:
        return host_name(hosts[0].name)
    other = host_name(hosts[1].name)
    try:
        with socket.socket(_family(other), socket.SOCK_DGRAM) as asked:
            asked.connect((other, 9))  # this sends nothing: the kernel only chooses the source address
            return str(asked.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            "ssh.own_address_unknown",
            "this machine is host 0, but the address at which {host} ({other}) reaches this machine cannot "
            "be determined: {reason}. Set {variable}=ADDRESS.",
            host=hosts[1].name,
            other=other,
            reason=error.strerror or error,
            variable=COORDINATOR,
        ) from error


def host_name(name: str) -> str:
    """Return the name or address that the ssh configuration gives for a host."""
    try:
        done = subprocess.run(
            [*ssh(), "-G", "--", name], capture_output=True, text=True, timeout=_ANSWER_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise no_ssh(error) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            "ssh.address_unknown", "ssh did not return the address of host {name}: {error}", name=name, error=error
        ) from error
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value
    raise LaunchError(
        "ssh.host_unknown",
        "ssh does not know host {name}: {reason}",
        name=name,
        reason=done.stderr.strip() or "no host name",
    )


def no_ssh(error: FileNotFoundError) -> LaunchError:
    """Return the error of a machine without ssh."""
    return LaunchError(
        "ssh.not_installed",
        "--hosts needs the program {program}, which is not installed (package openssh-client).",
        program=error.filename,
    )


def _family(name: str) -> socket.AddressFamily:
    return socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0][0]


if __name__ == "__main__":
    sys.exit(main())
