"""The command of `faults.py` started once per host, as an engine does, each in a network of its own.

The host that coordinates is lost again and again: its host process is killed, and the same command started there again.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from faults_found import HANG_S, REPLICAS, events, wait_for
from paceline.cluster.emulate import Emulation
from paceline.cluster.host import Emulate
from paceline.wire.key import RunKey, write_key

PORT = 29650
_NUMBER = re.compile(r"-(\d+) \(number \d+\)$")  # of the host when the run began, in its name


class HostCommands:
    """The command on every host; as a process it stands for that of the host that coordinates.

    Args:
        start: starts it on a host, by number.
        run: the run directory.
    """

    def __init__(self, start: Callable[[int], subprocess.Popen[bytes]], run: Path) -> None:
        self._start, self._run, self.coordinator = start, run, 0
        self.processes = [start(number) for number in range(REPLICAS)]

    def poll(self) -> int | None:
        """Exit code of the coordinator; None while it runs."""
        return self.processes[self.coordinator].poll()

    def send_signal(self, number: int) -> None:
        """Send the coordinator a signal."""
        self.processes[self.coordinator].send_signal(number)

    def wait(self, limit_s: float) -> None:
        """Wait until all have ended."""
        for process in self.processes:
            process.wait(limit_s)

    def lose_coordinator(self, number: int = signal.SIGKILL) -> float:
        """End the host process that coordinates, and start its command again once another does; returns when."""
        lost, before = self.coordinator, len(events(self._run, "coordinator"))
        at = time.time()
        self.processes[lost].send_signal(number)
        self.processes[lost].wait(HANG_S)
        other = self.processes[(lost + 1) % REPLICAS]
        if not wait_for(lambda: len(events(self._run, "coordinator")) > before, other):
            raise RuntimeError(f"{self._run}: no other host coordinates within {HANG_S:g} s")
        found = _NUMBER.search(events(self._run, "coordinator")[-1]["by"])
        assert found is not None
        self.coordinator = int(found[1])
        self.processes[lost] = self._start(lost)
        return at


@contextmanager
def host_commands(
    command: Sequence[str], folder: Path, name: str, settings: Mapping[str, str]
) -> Iterator[tuple[HostCommands, Path]]:
    """The command on each host, and its run directory; all are ended with the context."""
    write_key(RunKey.make(), key := folder / f"{name}.key")
    started: list[subprocess.Popen[bytes]] = []
    with Emulation(Emulate(hosts=REPLICAS)) as emulation, ExitStack() as held:
        held.callback(_end, started)

        def start(number: int) -> subprocess.Popen[bytes]:
            variables = {
                "PACELINE_HOSTS": str(REPLICAS),
                "PACELINE_HOST_NUMBER": str(number),
                "PACELINE_COORDINATOR": f"{emulation.hosts[0].address}:{PORT}",
                "PACELINE_KEY_FILE": str(key),
                "PACELINE_HOST_DEVICES": "1",
            }
            inside = ["nsenter", f"--net={emulation.hosts[number].namespace}", *command]
            with open(folder / f"{name}-{number}.log", "ab") as log:
                started.append(subprocess.Popen(inside, stdout=log, stderr=log, env={**settings, **variables}))
            return started[-1]

        yield HostCommands(start, folder / name), folder / name


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes, and what they have started."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()
