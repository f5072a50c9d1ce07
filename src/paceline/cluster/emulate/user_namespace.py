"""User namespace in which a user who is not root may emulate hosts.

Within it the user is root over networks that are made there, and over nothing else of the machine: files, processes and
control groups are as they were.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.cluster.emulate.namespace import call_libc
from paceline.errors import ClusterError

_CLONE_NEWUSER = 0x10000000
# Settings by which kernels refuse such namespaces: what they are set to then, and what allows them.
_SETTINGS = {
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "10000"),
}


def become_root_of_own_namespace(system: Path = Path("/proc/sys")) -> None:
    """Move this process into a new user namespace, where its user is root.

    What it starts from then on is there, too. To be called before any thread is started.

    Raises:
        ClusterError: the kernel does not allow it.
    """
    if not sys.platform.startswith("linux"):
        return  # the emulation says why it is not possible
    user, group = os.geteuid(), os.getegid()
    own = Path("/proc/self")
    try:
        call_libc("unshare", _CLONE_NEWUSER)
        (own / "setgroups").write_text("deny")  # else no group may be named
        (own / "uid_map").write_text(f"0 {user} 1")
        (own / "gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise ClusterError(
            f"emulated hosts need root, or a user namespace, which the kernel refuses: {error.strerror}. "
            f"{_advice(system)}"
        ) from error


def _advice(system: Path) -> str:
    for name, (refuses, allows) in _SETTINGS.items():
        file = system / name.replace(".", "/")
        if file.exists() and file.read_text().strip() == refuses:
            return f"It would be allowed by `sudo sysctl -w {name}={allows}`; or start the command with sudo."
    return "Start the command with sudo, or in a container with --privileged."
