"""Control groups in which a rank has little memory, or little time on the processor."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.emulate.cgroup import PREFIX, make_group, place_of_group, remove_group
from paceline.errors import ClusterError

_MEMORY_BYTES = 128 * 1024
_CORES = 0.1
_numbers = itertools.count()
_TOPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # versions 1 and 2


@dataclass(frozen=True)
class Squeezed:
    """A process in a control group of ours.

    Attributes:
        before: the group that it was in.
    """

    pid: int
    group: Path
    before: Path

    def release(self) -> None:
        """Move the process back, if it lives, and remove the group."""
        for limit in ("memory.max", "memory.limit_in_bytes"):
            if (self.group / limit).exists():
                with suppress(OSError):  # refused; it goes with the group
                    (self.group / limit).write_text("max" if limit == "memory.max" else "-1")
        with suppress(OSError):  # the kernel has ended it
            (self.before / "cgroup.procs").write_text(str(self.pid))
        remove_group(self.group)


def little_memory(pid: int) -> Squeezed:
    """Give a process no further page of memory: the kernel ends it at the next."""
    top = memory_groups()
    group = top / _name()
    group.mkdir()
    limit = group / "memory.max"
    # before it has pages that count: a limit below what is used may be refused
    (limit if limit.exists() else group / "memory.limit_in_bytes").write_text(str(_MEMORY_BYTES))
    _move(pid, group)
    return Squeezed(pid, group, top)


def little_time(pid: int) -> Squeezed:
    """Let a process use a tenth of a core."""
    folder = place_of_group(_name())
    before = _group_of(pid, folder.parent)
    group = make_group(folder, _CORES)
    _move(pid, group)
    return Squeezed(pid, group, before)


def _move(pid: int, group: Path) -> None:
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:  # it has just ended
        remove_group(group)
        raise ClusterError(f"process {pid} cannot be moved to the control group {group}: {error}") from error


def memory_groups() -> Path:
    """Folder in which control groups with a limit of memory can be made.

    Raises:
        ClusterError: there is none.
    """
    for top in _TOPS:
        limits = (top / "memory.limit_in_bytes").exists() or "memory" in _read(top / "cgroup.subtree_control").split()
        if limits and os.access(top, os.W_OK):
            return top
    raise ClusterError("no control group with a limit of memory can be made under /sys/fs/cgroup; it takes root")


def _group_of(pid: int, top: Path) -> Path:
    """The group for CPU time of a process; `top` where it is not seen here."""
    for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or not controllers:
            for above in (top, *top.parents):
                own = above / path.lstrip("/")
                if path != "/" and (own / "cgroup.procs").exists() and own.is_relative_to("/sys/fs/cgroup"):
                    return own
    return top


def _name() -> str:
    return f"{PREFIX}{os.getpid()}-chaos-{next(_numbers)}"


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
