"""Linux control groups (v1, v2): limits on cores and memory, and groups that paceline creates.

`root` is the root of the file system to read. A container is limited by its own group and by all visible parent groups.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import ClusterError
from paceline.files import kernel_text

# short compared with a training step, so that a share of a core behaves like a slower core, without noticeable pauses
_PERIOD_US = 20_000
PREFIX = "paceline-"  # prefix of the names of groups of emulated hosts
_EMPTY_S = 10.0
_NEWBORN_S = 60.0  # time during which a new group may not be locked yet


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota as a number of cores; None if there is no limit."""
    quotas = [q for folder in _folders(root, "cpu") for q in (_quota_v2(folder), _quota_v1(folder)) if q is not None]
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory limit in bytes; None if there is no limit.

    Without a limit, version 1 returns a number that is larger than the memory of any machine.
    """
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [kernel_text(folder / name) for folder in _folders(root, "memory") for name in names]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def place_of_group(name: str, root: Path = Path("/")) -> Path:
    """Find a folder for a new control group that limits CPU time.

    The folder is in the group of this process, or in the nearest parent group that allows CPU limits. `make_group`
    creates the folder.

    Raises:
        ClusterError: no group allows CPU limits.
    """
    for folder in _folders(root, "cpu"):
        if (folder / "cgroup.procs").exists() and _limits_children(folder):
            return folder / name
    raise ClusterError(
        "cluster.no_cpu_control_group",
        "the cores of emulated hosts cannot be limited: no control group for CPU time can be created under "
        "/sys/fs/cgroup. Start a container with --privileged --cgroupns=host. With systemd, use a scope with "
        "Delegate=yes. You can also leave `cpu` out of `emulate`.",
    )


@contextmanager
def held_group(folder: Path, cores: float) -> Iterator[Path]:
    """Return a context with a control group that limits its processes to `cores` busy cores.

    Raises:
        ClusterError: the kernel refuses, for instance because a parent group has fewer cores.
    """
    _remove_abandoned(folder.parent)
    try:
        make_group(folder, cores)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the lock lasts until this process ends, for whatever reason
            yield folder
        finally:
            os.close(descriptor)
    finally:
        remove_group(folder)


def remove_group(folder: Path) -> None:
    """Wait until a control group is empty, and remove it.

    The kernel refuses the removal until the last process of the group has ended.
    """
    until = time.monotonic() + _EMPTY_S
    while folder.exists() and time.monotonic() < until:
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.02)


def _remove_abandoned(parent: Path) -> None:
    """Remove empty groups of emulated hosts whose launcher and keeper were both killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process holds the group, runs in it, or has just removed it
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > _NEWBORN_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    folder.rmdir()
            finally:
                os.close(descriptor)


def make_group(folder: Path, cores: float) -> Path:
    """Create a control group with a limit of `cores` busy cores; return its folder.

    Raises:
        ClusterError: the kernel refuses, for instance because a parent group has fewer cores.
    """
    quota_us = round(cores * _PERIOD_US)
    try:
        folder.mkdir(exist_ok=True)
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        raise ClusterError(
            "cluster.control_group_refused",
            "the control group {folder} cannot be limited to {cores:g} CPU cores: {reason}. Leave `cpu` out of "
            "`emulate`.",
            folder=folder,
            cores=cores,
            reason=error.strerror,
        ) from error
    return folder


def processes_of(folder: Path) -> set[int]:
    """Return the ids of the processes in a control group."""
    return set(map(int, kernel_text(folder / "cgroup.procs").split()))


def enter_group(folder: Path) -> None:
    """Move this process with all its threads into a control group.

    Raises:
        ClusterError: the group does not exist, or the kernel refuses.
    """
    try:
        (folder / "cgroup.procs").write_text("0")
    except OSError as error:
        raise ClusterError(
            "cluster.control_group_not_entered",
            "this process cannot enter the control group {folder}: {reason}",
            folder=folder,
            reason=error.strerror,
        ) from error


def _limits_children(folder: Path) -> bool:
    """Return True if the groups inside this group can have CPU quotas.

    In version 1, they always can. In version 2, they can if this group delegates the controller.
    """
    return (folder / "cpu.cfs_quota_us").exists() or "cpu" in kernel_text(folder / "cgroup.subtree_control").split()


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's group, and its parent folders.

    If the container cannot see a group, the mount point is used instead.
    """
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = ["", "unified"]  # version 2, alone or together with version 1
        elif controller in controllers.split(","):
            mounts = [controllers, controller]
        else:
            continue
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            own = top / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = kernel_text(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = kernel_text(folder / "cpu.cfs_quota_us"), kernel_text(folder / "cpu.cfs_period_us")
    # a quota of -1 means no limit
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
