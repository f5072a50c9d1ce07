"""Process information of the kernel: stopped processes, and those ended for lack of memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """True if SIGSTOP or a debugger holds the process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def oom_kills() -> int | None:
    """Number of processes that the kernel ended for lack of memory in this control group.

    None where it does not say.
    """
    for file in _memory_counters():
        with suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])
    return None


def _memory_counters() -> list[Path]:
    """Candidate paths of this control group's counters; in a container it is often the root."""
    files = [Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control")]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":  # version 2
                files.insert(0, Path(f"/sys/fs/cgroup{group}/memory.events"))
            elif controllers == "memory":  # version 1
                files.insert(0, Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
    return files
