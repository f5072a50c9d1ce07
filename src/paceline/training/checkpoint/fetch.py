"""Checkpoints that another host keeps: a rank asks its host process for one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.rank_environment import FOLDER_IS_COPY

WANTED = ".wanted"  # folder in the run directory; a file there names a folder that is asked for, with | for /
_LOOK_EVERY_S = 0.02


def fetch(checkpoint: Path, deadline_s: float) -> None:
    """Have a checkpoint here, where the run directory is a copy of another host's.

    Args:
        deadline_s: the longest that nothing of it may arrive.

    Raises:
        CheckpointError: nothing came in time.
    """
    if os.environ.get(FOLDER_IS_COPY) != "1":
        return
    run = checkpoint.parent.parent
    wanted = run / WANTED / str(checkpoint.relative_to(run)).replace("/", "|")
    wanted.parent.mkdir(mode=0o700, exist_ok=True)
    wanted.touch(mode=0o600)
    arrived, since = -1, time.monotonic()
    while wanted.exists():
        if (size := _size(checkpoint)) != arrived:
            arrived, since = size, time.monotonic()
        if time.monotonic() - since > deadline_s:
            raise CheckpointError(f"nothing of {checkpoint.name} came from host 0 for {deadline_s:g} s")
        time.sleep(_LOOK_EVERY_S)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder.is_dir() else 0
