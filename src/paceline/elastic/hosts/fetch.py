"""Folders that host 0 keeps, such as checkpoints: a rank asks for one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.rank_environment import FOLDER_IS_COPY

WANTED = ".wanted"  # folder in the copy; a file there names a folder that is asked for, with | for /
_LOOK_EVERY_S = 0.02


def fetch(wanted: Path, copy: Path, deadline_s: float) -> None:
    """Have a folder here that is in a copy of host 0's.

    Args:
        wanted: the folder, in `copy`.
        deadline_s: the longest that nothing of it may arrive.

    Raises:
        CheckpointError: nothing came in time.
    """
    if os.environ.get(FOLDER_IS_COPY) != "1":
        return
    asked = copy / WANTED / str(wanted.relative_to(copy)).replace("/", "|")
    asked.parent.mkdir(mode=0o700, exist_ok=True)
    asked.touch(mode=0o600)
    arrived, since = -1, time.monotonic()
    while asked.exists():
        if (size := _size(wanted)) != arrived:
            arrived, since = size, time.monotonic()
        if time.monotonic() - since > deadline_s:
            raise CheckpointError(f"nothing of {wanted.name} came from host 0 for {deadline_s:g} s")
        time.sleep(_LOOK_EVERY_S)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder.is_dir() else 0
