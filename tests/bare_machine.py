"""Run tests as on a bare machine: without optional programs, without root, with 64 MiB of /dev/shm.

    python tests/bare_machine.py [PYTEST-ARGUMENT …]

Needs root. The tests run on a copy of the checkout, as the user `nobody`, in their own mount namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOBODY = "65534"
# programs that every container has: a shell, and the common programs of coreutils and procps
PROGRAMS = (
    *(
        "awk",
        "bash",
        "basename",
        "cat",
        "chmod",
        "cp",
        "cut",
        "date",
        "dirname",
        "echo",
        "env",
        "expr",
        "false",
        "find",
    ),
    *("grep", "head", "hostname", "id", "kill", "ln", "ls", "mkdir", "mktemp", "mv", "nproc", "ps", "pwd", "readlink"),
    *("rm", "rmdir", "sed", "seq", "sh", "sleep", "sort", "stat", "tail", "tee", "test", "timeout", "touch", "tr"),
    *("true", "uname", "uniq", "wc", "which", "xargs"),
)
# $1: the folder of this run; $2: the folder that holds Python; $3: its unreadable parent, or nothing
SETUP = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
if [ -n "$3" ]; then
    mkdir "$1/python"
    mount --bind "$2" "$1/python"
    mount -t tmpfs -o mode=755 tmpfs "$3"
    mkdir -p "$2"
    mount --move "$1/python" "$2"
fi
cd "$1/checkout"
shift 3
exec "$@"
"""


def run(arguments: list[str], folder: Path) -> int:
    """Run pytest with these arguments on a copy of the checkout in `folder`; return its exit status."""
    folder.chmod(0o755)
    checkout, programs, home = folder / "checkout", folder / "bin", folder / "home"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    home.mkdir()
    (folder / "tmp").mkdir()
    programs.mkdir()
    for name in PROGRAMS:
        if found := shutil.which(name):
            (programs / name).symlink_to(os.path.realpath(found))
    for one in (checkout, home, folder / "tmp"):
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", one], check=True)
    environment = {
        "PATH": str(programs),
        "HOME": str(home),
        "TMPDIR": str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(checkout / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    python = Path(sys.base_prefix)
    hidden = [parent for parent in python.parents if not parent.stat().st_mode & 0o001]
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    as_nobody = ["/usr/bin/setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--no-new-privs"]
    command = ["/usr/bin/unshare", "--mount", "/bin/bash", "-c", SETUP, "bash", folder, python]
    command += [hidden[-1] if hidden else "", *as_nobody, "/usr/bin/env", "-i"]
    command += [f"{name}={value}" for name, value in environment.items()]
    return subprocess.run([*map(str, command), *tests], check=False).returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="bare-") as made:
        sys.exit(run(sys.argv[1:], Path(made)))
