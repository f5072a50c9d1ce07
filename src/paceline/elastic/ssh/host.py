"""A host's end of ssh: it runs the command as long as the connection lasts.

The order and the run's key come on standard input, where no other user sees them. After them, each line is a signal for
the command; the end of the input, as when the connection is lost, ends it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import msgspec

from paceline.errors import LaunchError
from paceline.rank_environment import KEY_FD, KEY_FILE
from paceline.wire.key import RunKey, key_descriptor

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
