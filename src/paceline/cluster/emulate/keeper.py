"""The process that ends what a dead launcher left in its hosts: `python -m paceline.cluster.emulate.keeper`.

It has a session of its own, where neither Ctrl-C nor what ends the launcher's processes reaches it, and where delay is
wanted it is what carries the packets: ranks still need their network while they save after the launcher's death.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cluster.emulate.cgroup import processes_of, remove_group
from paceline.cluster.emulate.network import Relay, path_of, wires
from paceline.errors import ClusterError

_GRACE_S = 35.0  # a rank that saves a checkpoint after its launcher's death ends itself after 30 s
_ANSWER_S = 30.0  # the start of Python on a busy machine
_TERMINATE_S = 1.0  # from SIGTERM to SIGKILL
_KILL_S = 10.0  # SIGKILL takes effect at once, but for a process inside a failing disk or driver
_TICK_S = 0.02


class Keeper:
    """The launcher's end of it."""

    def __init__(self, namespaces: Sequence[int], groups: Sequence[Path], delay_ms: float | None) -> None:
        """Start the process.

        Args:
            namespaces: descriptors, the bridge's first and then each host's.
            groups: folders of the hosts' control groups.
            delay_ms: for which it holds each packet; with None it carries none.
        """
        launcher = os.pidfd_open(os.getpid())
        told = json.dumps([launcher, list(namespaces), list(map(str, groups)), delay_ms])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cluster.emulate.keeper", told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # whoever reads the launcher's must not wait for the keeper
                start_new_session=True,
                pass_fds=[launcher, *namespaces],
            )
        finally:
            os.close(launcher)

    def wait_until_carrying(self) -> None:
        """Wait until it carries the packets.

        Raises:
            ClusterError: it does not; with the reason.
        """
        if (answer := self._answer()) != "carrying":
            raise ClusterError(
                f"the packets between emulated hosts cannot be delayed: {answer or 'the relay died'}. Leave "
                "`delay_ms` out."
            )

    def order(self, verb: str, host: int) -> None:
        """Have it `cut` or `mend` the link of a host, and wait for it.

        Raises:
            ClusterError: it does not answer.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{verb} {host}\n".encode())
            self._process.stdin.flush()
        if (answer := self._answer()) != verb:
            raise ClusterError(
                f"the link of emulated host {host} cannot be {'cut' if verb == 'cut' else 'mended'}: "
                f"{answer or 'the relay died'}. Start the emulation again."
            )

    def _answer(self) -> str:
        """The next line that it prints; empty once it has died."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        return self._process.stdout.readline().decode().strip() if ready else f"no answer within {_ANSWER_S:g} s"

    def dismiss(self) -> None:
        """End it: the launcher has taken everything down itself."""
        self._process.kill()
        self._process.communicate()


def end_processes(namespaces: Sequence[int], groups: Sequence[Path], grace_s: float = 0.0) -> None:
    """End the processes in these namespaces and control groups.

    Args:
        grace_s: the longest to wait for them to end by themselves.

    Raises:
        ClusterError: a process stays.
    """
    for number, patience_s in ((0, grace_s), (signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _KILL_S)):
        for pid in _processes(namespaces, groups):
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    if pid in _processes(namespaces, groups):  # still the same one
                        signal.pidfd_send_signal(pidfd, number)
                finally:
                    os.close(pidfd)
        until = time.monotonic() + patience_s
        while time.monotonic() < until and _processes(namespaces, groups):
            time.sleep(_TICK_S)
    if left := _processes(namespaces, groups):
        raise ClusterError(f"in emulated hosts, these processes cannot be ended: {', '.join(map(str, sorted(left)))}")


def _processes(namespaces: Sequence[int], groups: Sequence[Path]) -> set[int]:
    """The numbers of the processes in these namespaces and control groups."""
    return processes_in([os.fstat(namespace).st_ino for namespace in namespaces], groups)


def processes_in(namespaces: Sequence[int], groups: Sequence[Path]) -> set[int]:
    """Process ids in network namespaces, by their inodes, and in control groups; not this process."""
    wanted = set(namespaces)
    found = set().union(*map(processes_of, groups))
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}/ns/net").st_ino in wanted:
                found.add(int(name))
    return found - {os.getpid()}


def main() -> None:
    """Carry packets where told to, until the launcher's death, then take down what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # for as long as there is something to take down, which ends with the launcher
        signal.signal(number, signal.SIG_IGN)
    launcher, namespaces, folders, delay_ms = json.loads(sys.argv[1])
    groups = list(map(Path, folders))
    relay: Relay | None = None
    if delay_ms:
        bridge, *hosts = map(path_of, namespaces)
        try:
            relay = Relay(bridge, wires(hosts, [None] * len(hosts)), delay_ms / 1000)
            relay.start()
            print("carrying", flush=True)
        except (OSError, ClusterError) as error:
            print(error, flush=True)
    _obey(launcher, relay)
    end_processes(namespaces, groups, _GRACE_S)
    for group in groups:
        remove_group(group)


def _obey(launcher: int, relay: Relay | None) -> None:
    """Cut and mend links as the input says, and answer, until the launcher dies."""
    unread = b""
    while True:
        ready, _, _ = select.select([0, launcher], [], [])
        if launcher in ready or not (more := os.read(0, 4096)):
            return
        *lines, unread = (unread + more).split(b"\n")
        for verb, host in map(bytes.split, lines):
            assert relay is not None
            (relay.cut.add if verb == b"cut" else relay.cut.discard)(int(host))
            print(verb.decode(), flush=True)


if __name__ == "__main__":
    main()
