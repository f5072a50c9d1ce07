"""Start of one command on every host by ssh, with a key made for it.

The starter is no host process: those of other hosts are started by the system's ssh, that of this machine, where it is
named, beside it. It passes signals on to host 0, which coordinates, and ends with that one's exit code.
"""

from __future__ import annotations

import os
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from paceline.cluster.launch_engines import (
    COORDINATOR,
    ENGINE,
    HOST_DEVICES,
    HOST_NUMBER,
    HOSTS,
    address_from,
    default_port,
)
from paceline.elastic.signals import StopSignals, stopped_before
from paceline.elastic.ssh.hosts import (
    SAVE_S,
    STARTED,
    NamedHost,
    Order,
    coordinator_of,
    no_ssh,
    read_hosts,
    ssh,
    ssh_program,
)
from paceline.errors import LaunchError
from paceline.files import scratch_folder
from paceline.rank_environment import KEY_FD, KEY_FILE, RankEnvironment
from paceline.wire.key import RunKey

REMOTE_PYTHON = "PACELINE_REMOTE_PYTHON"
_PROGRAM = "paceline.elastic.ssh.hosts"
# Settings of the user's that hold for this machine only.
_NOT_SENT = RankEnvironment.names() | {KEY_FD, KEY_FILE, REMOTE_PYTHON, "PACELINE_SSH"}
_SENT_AS_WELL = ("OMP_NUM_THREADS",)
_START_S = 60.0  # for ssh, the login and Python
_DISMISS_S, _LAST_FILES_S = 5.0, 60.0  # for the other hosts to end after host 0: a failed one, one that is done
_TERMINATE_S = 3.0  # from the end of its input to SIGKILL, once all had time to save
_LINE_LIMIT = 2**16
_SSH_FAILED = 255  # ssh's exit code for failures of its own
_TICK_S = 0.2


def run_on_hosts(text: str, arguments: Sequence[str]) -> int:
    """Run `python ARGUMENTS…` on every host of the option's value. Returns the exit code of host 0.

    Raises:
        LaunchError: a host is named wrongly, cannot be reached, or cannot start the program.
    """
    hosts, key = read_hosts(text), RunKey.make()
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
        started = []
        for number, host in enumerate(hosts):
            place = {HOST_NUMBER: str(number)} | ({HOST_DEVICES: str(host.devices)} if host.devices else {})
            order = Order(list(arguments), os.getcwd(), common | place, pem, announce=not host.is_here)
            started.append(held.enter_context(_HostCommand(host, number, order, folder)))
        return _watch(started, signals)


class _HostCommand:
    """The command on one host; `process` is ssh, or on this machine the program itself."""

    def __init__(self, host: NamedHost, number: int, order: Order, folder: Path) -> None:
        self.host, self.order = host, order
        self.log = folder / f"ssh-{number}"  # what ssh itself says, apart from what comes from the host
        self.has_begun = host.is_here
        self._signals_sent, self._lost = 0, False
        self._errors = b""  # the last of its standard error, until it has begun

    def __enter__(self) -> _HostCommand:
        here = [sys.executable, "-m", _PROGRAM]
        output = None if self.host.is_here else subprocess.PIPE  # ssh makes what it inherits non-blocking
        try:
            self.process = subprocess.Popen(
                here if self.host.is_here else [*ssh(), "-E", str(self.log), "--", self.host.name, _remote_command()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the starter alone, which passes it on once
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
        """Write on its standard input; nothing where it has ended."""
        with suppress(BrokenPipeError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def stop(self) -> None:
        """End its standard input, which ends the command there; ssh itself, while it still connects."""
        with suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        if not self.has_begun:
            self.process.terminate()

    def pass_on(self, signals: StopSignals) -> None:
        """Send the first signal, and a second Ctrl-C, once each."""
        wanted = [signals.first.removeprefix("SIG")] if signals.first else []
        wanted += ["INT"] if signals.kill else []
        for name in wanted[self._signals_sent :]:
            self.send(f"{name}\n".encode())
        self._signals_sent = len(wanted)

    def noted(self, line: bytes, is_error: bool) -> bool:
        """True if a line of output is to be shown."""
        if self.has_begun:
            return True
        if line == STARTED:
            self.has_begun = True
        elif is_error:
            self._errors = (self._errors + line)[-_LINE_LIMIT:]
            return True
        return False  # from the login shell

    def check(self, begun_by: float) -> None:
        """Raise LaunchError if it did not begin; tell once if the connection was lost later."""
        code, output = self.process.poll(), (self.process.stdout, self.process.stderr)
        if not self.has_begun:
            if code is not None and all(stream is None or stream.closed for stream in output):
                raise LaunchError(self._problem())
            if time.monotonic() > begun_by:
                raise LaunchError(f"host {self.host.name} was asked by ssh, but did not start within {_START_S:.0f} s")
        elif code is not None and (code == _SSH_FAILED or code < 0) and not self.host.is_here and not self._lost:
            self._lost = True
            print(f"paceline: the ssh connection to host {self.host.name} was lost", file=sys.stderr, flush=True)

    def _problem(self) -> str:
        """Reason why it has ended before it began."""
        said = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        code, name = self.process.returncode, self.host.name
        if code == _SSH_FAILED:
            return (
                f"host {name} cannot be reached by ssh: {said or 'ssh ended with exit code 255'}\n"
                f"`{shlex.join([*ssh_program(), '-o', 'BatchMode=yes', name, 'true'])}` has to work without a question."
            )
        last = self._errors.decode(errors="replace").strip().rpartition("\n")[2]
        return (
            f"paceline did not start on host {name} (exit code {code}): {last}. It has to be installed there as "
            f"{_remote_python()}; {REMOTE_PYTHON} names another Python."
        )


def _watch(started: list[_HostCommand], signals: StopSignals) -> int:
    """Show what the hosts write until all have ended; the exit code of host 0."""
    with _Output(started) as output:
        try:
            _until_the_end(started, signals, output)
        finally:
            for command in started:
                command.stop()
            until = time.monotonic() + SAVE_S + 5.0
            while _is_under_way(started, output) and time.monotonic() < until and not signals.kill:
                output.show(_TICK_S)
    code = started[0].process.wait()
    return code if 0 <= code < _SSH_FAILED else 1


def _until_the_end(started: list[_HostCommand], signals: StopSignals, output: _Output) -> None:
    """Return when all hosts have ended, or had time to after host 0.

    Raises:
        LaunchError: a host did not start.
    """
    begun_by, dismissed_by = time.monotonic() + _START_S, float("inf")
    while _is_under_way(started, output) and time.monotonic() < dismissed_by:
        output.show(_TICK_S)
        started[0].pass_on(signals)
        _check(started, begun_by)
        if signals.first and (late := [command.host.name for command in started if not command.has_begun]):
            raise stopped_before(f"host {late[0]} had started", signals.first)
        if (code := started[0].process.poll()) is not None and dismissed_by == float("inf"):
            dismissed_by = time.monotonic() + (_DISMISS_S if code else _LAST_FILES_S)
    _check(started, begun_by)


def _check(started: list[_HostCommand], begun_by: float) -> None:
    for command in started:
        command.check(begun_by)


def _is_under_way(started: list[_HostCommand], output: _Output) -> bool:
    return output.is_open or any(command.process.poll() is None for command in started)


class _Output:
    """Standard output and error of remote hosts, passed on line by line."""

    def __init__(self, started: list[_HostCommand]) -> None:
        self._selector = selectors.DefaultSelector()
        self._parts: dict[int, bytes] = {}
        for command in started:
            for stream, to in ((command.process.stdout, 1), (command.process.stderr, 2)):
                if stream is not None:
                    self._selector.register(stream, selectors.EVENT_READ, (command, stream, to))

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    @property
    def is_open(self) -> bool:
        """True while a host may still write."""
        return bool(self._selector.get_map())

    def show(self, wait_s: float) -> None:
        """Pass on what has come, after `wait_s` at most."""
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
    """Line for the login shell there. It names no secret: order and key come on standard input."""
    path = os.pathsep.join(map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    environment = ["env", f"PYTHONPATH={path}"] if path else []
    return shlex.join(["exec", *environment, _remote_python(), "-m", _PROGRAM])
