"""What Linux's control groups (versions 1 and 2) leave to this process of the machine's cores and memory.

`root` is where the file system is looked up; a container's limits are those of its own group and of every group above it that it can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many cores' worth of time may be used at once, or None where nothing limits it."""
    quotas = [q for folder in _folders(root, "cpu") for q in (_quota_v2(folder), _quota_v1(folder)) if q is not None]
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """How many bytes of memory may be used, or None where nothing limits it (version 1 then states a number beyond any machine's)."""
    names = ("memory.max", "memory.limit_in_bytes")
    limits = [int(text) for folder in _folders(root, "memory") for name in names if (text := _read(folder / name)).isdecimal()]
    return min(limits, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The group's own folder and those above it. A group that the container cannot see is skipped; its mount point is then the group."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = ["", "unified"]  # version 2, alone or beside version 1
        elif controller in controllers.split(","):
            mounts = [controllers, controller]
        else:
            continue
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            own = top / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None  # a quota of -1 is none


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
