"""What the kernel tells of processes: who is stopped, and how many were ended for lack of memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger holds the process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def oom_kills() -> int | None:
    """How many processes of this control group the kernel has ended for lack of memory; None where it does not say."""
    for file in _memory_counters():
        with suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])
    return None


def _memory_counters() -> list[Path]:
    """Where this process's control group may keep its counters; inside a container the group is often mounted as the root."""
    files = [Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control")]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":  # version 2
                files.insert(0, Path(f"/sys/fs/cgroup{group}/memory.events"))
            elif controllers == "memory":  # version 1
                files.insert(0, Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
    return files
