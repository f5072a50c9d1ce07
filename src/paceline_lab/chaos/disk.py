"""A small file system for a run, which can be full without harm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.cluster.emulate.network import call_libc
from paceline.errors import RunError
from paceline.files import private_folder

_CLONE_NEWNS = 0x00020000
_LEAST_BYTES, _TIMES = 48 * 2**20, 4


def keep_mounts_private() -> None:
    """Have what this process mounts be gone with it, however it ends."""
    call_libc("unshare", _CLONE_NEWNS)
    _mount("--make-rprivate", "/")


@contextmanager
def small_disk(folder: Path, like: Path) -> Iterator[Path]:
    """A file system in memory, with a few times the room that `like` takes.

    Its `run` is copied into `folder` at the end.
    """
    place = folder / "disk"
    private_folder(place)
    size = max(_LEAST_BYTES, _TIMES * sum(file.stat().st_size for file in like.rglob("*") if file.is_file()))
    _mount("-t", "tmpfs", "-o", f"size={size},mode=0700", "paceline-chaos", str(place))
    try:
        yield place
        if (place / "run").exists():
            shutil.copytree(place / "run", folder / "run")
    finally:
        subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)
        os.rmdir(place)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            f"no small file system can be made for the fault disk-full: {done.stderr.strip()}. Leave it out."
        )
