"""Record of an emulation's parts on this machine, in a file.

From it everything can be found and removed, whichever process has died meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.cluster.emulate.namespace import NAMED
from paceline.errors import ClusterError

FOLDER = Path("/run/paceline")
_TERMINATE_S = 1.0  # from SIGTERM to SIGKILL
_KILL_S = 10.0  # SIGKILL takes effect at once, but for a process inside a failing disk or driver
_TICK_S = 0.02


@dataclass(frozen=True)
class Owner:
    """A process, told from a later one of the same number by its start (clock ticks since the machine's)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Owner:
        """The process of that number, which must be alive."""
        return cls(pid, _stat(pid)[1])

    @property
    def alive(self) -> bool:
        """True if the process still runs; a zombie does not."""
        try:
            state, started = _stat(self.pid)
        except OSError:
            return False
        return state not in "ZX" and started == self.started


@dataclass(frozen=True)
class Record:
    """Parts of one emulation, written down before they are made.

    Attributes:
        name: that all its parts' names begin with.
        launcher: the process whose emulation it is.
        keeper: the process that takes it down after the launcher's death.
        namespaces: by name.
        groups: the folders of control groups.
    """

    name: str
    launcher: Owner
    keeper: Owner
    namespaces: tuple[str, ...]
    groups: tuple[Path, ...]

    @classmethod
    def read(cls, file: Path) -> Record:
        """Read a record that `write` has written."""
        data = json.loads(file.read_text())
        owners = {role: Owner(**data[role]) for role in ("launcher", "keeper")}
        return cls(
            data["name"], **owners, namespaces=tuple(data["namespaces"]), groups=tuple(map(Path, data["groups"]))
        )

    @classmethod
    def all(cls) -> list[Record]:
        """The records of all emulations on this machine."""
        found = []
        for file in sorted(FOLDER.glob("*.json")):
            with suppress(FileNotFoundError):  # just taken down
                found.append(cls.read(file))
        return found

    @property
    def file(self) -> Path:
        """The record's own file, which is removed last."""
        return FOLDER / f"{self.name}.json"

    @property
    def abandoned(self) -> bool:
        """True if no process is left to take the emulation down."""
        return not self.launcher.alive and not self.keeper.alive

    def write(self) -> None:
        """Keep it; whole or not at all."""
        FOLDER.mkdir(mode=0o755, exist_ok=True)
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self), default=str))
        draft.rename(self.file)

    def take_down(self, grace_s: float = 0.0) -> None:
        """Remove all parts; what another process is removing at the same time is waited for.

        Args:
            grace_s: the longest to wait for the processes inside to end by themselves.

        Raises:
            ClusterError: something cannot be removed. The record then stays, for a later attempt.
        """
        _wait_for_end(self, grace_s)
        with _locked(self.file) as there:
            if not there:
                return
            _end_processes(self)
            for namespace in self.namespaces:
                if (NAMED / namespace).exists():
                    subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
            for group in self.groups:
                _remove_group(group)
            left = [str(path) for path in (*(NAMED / name for name in self.namespaces), *self.groups) if path.exists()]
            if left:
                raise ClusterError(
                    f"of the emulated hosts {self.name} these cannot be removed: {', '.join(left)}. Is a "
                    "process stuck in them?"
                )
            self.file.unlink(missing_ok=True)

    def processes(self) -> set[int]:
        """The numbers of the processes in its namespaces and control groups."""
        inodes = set()
        for namespace in self.namespaces:
            with suppress(FileNotFoundError):
                inodes.add(os.stat(NAMED / namespace).st_ino)
        found = {pid for pid in _pids() if _namespace(pid) in inodes}
        for group in self.groups:
            with suppress(OSError):
                found |= {int(line) for line in (group / "cgroup.procs").read_text().split()}
        return found - {os.getpid()}


def remove_abandoned() -> list[Record]:
    """Take down the emulations whose launcher and keeper have died, and return them."""
    found = [record for record in Record.all() if record.abandoned]
    for record in found:
        record.take_down()
    return found


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """One process at a time; yields whether the file is still there then."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield os.fstat(descriptor).st_nlink > 0
    finally:
        os.close(descriptor)


def _end_processes(record: Record) -> None:
    for number, patience_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _KILL_S)):
        for pid in record.processes():
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    if pid in record.processes():  # still the same one
                        signal.pidfd_send_signal(pidfd, number)
                finally:
                    os.close(pidfd)
        _wait_for_end(record, patience_s)


def _wait_for_end(record: Record, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until and record.processes():
        time.sleep(_TICK_S)


def _remove_group(group: Path) -> None:
    """Remove a control group; the kernel refuses while its last process is ending."""
    until = time.monotonic() + _KILL_S
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > until:
                return
            time.sleep(_TICK_S)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, int]:
    """State and start time of a process.

    They are read after its name, which may hold anything.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
