"""Build of the C++ part: once per torch version and state of the sources, in a folder of this user alone.

`python -m simulated.build` prints where it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

NAME = "simulated_c"
COMPILER = "g++"
KEPT = 4
"""Builds that are kept: those used last."""
_SOURCES = Path(__file__).parent / "csrc"
_UNIT = _SOURCES / "all.cpp"
_FLAGS = ("-shared", "-fPIC", "-O1", "-std=c++20", "-Wall", f"-DTORCH_EXTENSION_NAME={NAME}")


def library() -> Path:
    """The built library of the sources as they are; it need not be there yet."""
    parts = [version("torch"), sys.version, *_FLAGS, *(file.read_text() for file in sorted(_SOURCES.iterdir()))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    # Not $XDG_CACHE_HOME: each test has an empty one.
    return Path.home() / ".cache" / "paceline-simulated" / key / f"{NAME}.so"


def build() -> Path:
    """Build the library unless it is there; processes that do so at once wait for the first.

    A new build removes all but the `KEPT` that were used last.

    Raises:
        PermissionError: others may write to the folder.
        RuntimeError: the compiler failed; with what it said.
    """
    target = library()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(target.parent)
    with open(target.parent.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        os.utime(target.parent)
        if not target.exists():
            # A build that is interrupted leaves no half of a library.
            unfinished = target.with_suffix(".unfinished")
            _compile(unfinished)
            unfinished.rename(target)
            _prune(target.parent.parent)
    return target


def built() -> Path:
    """The library, which this user alone may have written.

    Raises:
        RuntimeError: it is not built.
        PermissionError: others may write to its folder.
    """
    target = library()
    if not target.exists():
        raise RuntimeError(f"{target} is not built; run `python -m simulated.build` in the folder of the tests")
    _refuse_foreign(target.parent)
    return target


def _compile(target: Path) -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    headers = [
        torch / "include",
        torch / "include" / "torch" / "csrc" / "api" / "include",
        sysconfig.get_path("include"),
    ]
    command = [COMPILER, *_FLAGS, *(word for folder in headers for word in ("-isystem", str(folder)))]
    command += [str(_UNIT), "-o", str(target), f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated accelerator could not be built: {' '.join(command)}\n{done.stderr[-8000:]}")


def _prune(builds: Path) -> None:
    folders = [folder for folder in builds.iterdir() if folder.is_dir()]
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime_ns)[:-KEPT]:
        shutil.rmtree(folder)


def _refuse_foreign(folder: Path) -> None:
    """Refuse a folder that is not this user's, or that others may write to: what lies there is run."""
    for place in (folder, folder.parent):
        state = place.stat()
        if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{place} must belong to this user, and others must not write to it")


if __name__ == "__main__":
    print(build())
