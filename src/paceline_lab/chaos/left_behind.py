"""Processes, files and control groups that a run leaves behind: there should be none."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from paceline.cluster.emulate.cgroup import PREFIX

_SET_CHILD_SUBREAPER = 36  # of prctl
_GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/memory"))
_MEMORY = Path("/dev/shm")
_SEGMENTS = ("paceline", "torch_", "psm_", "sem.")  # paceline's, torch's, Python's
_TICK_S = 0.1


class Left:
    """Compares what there is now with what there was before."""

    def __init__(self) -> None:
        # orphans of a launcher become children of this process, where they are seen
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._children = {process.pid for process in _children()}
        self._files = _files()
        self._temporary: Path | None = None

    @contextmanager
    def own_temporary_folder(self) -> Iterator[Path]:
        """A temporary folder for the run alone."""
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
            self._temporary = Path(folder)
            yield self._temporary

    def found(self, grace_s: float, *, files: bool = True) -> list[str]:
        """Left-overs in words, after a grace for those about to end; processes are ended then.

        Args:
            files: temporary files are to be gone, too.
        """
        if not files:
            self._temporary = None
        until = time.monotonic() + grace_s
        while (words := self._words()) and time.monotonic() < until:
            time.sleep(_TICK_S)
        for process in _children():
            if process.pid not in self._children:
                with suppress(psutil.Error):
                    process.kill()
        return words

    def _words(self) -> list[str]:
        _reap()
        words = []
        for process in _children():
            with suppress(psutil.Error):
                if process.pid not in self._children and process.status() != psutil.STATUS_ZOMBIE:
                    words.append(f"process {process.pid} ({' '.join(process.cmdline())[:80] or process.name()})")
        words += [f"file {path}" for path in sorted(_unused(_files() - self._files))]
        if self._temporary is not None:
            words += [f"temporary file {path.name}" for path in sorted(self._temporary.iterdir())]
        return words


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _files() -> set[Path]:
    """Named shared memory of this user, and control groups of launchers that have ended."""
    found = set()
    for path in _MEMORY.glob("*"):
        with suppress(OSError):
            if path.stat().st_uid == os.geteuid() and path.name.startswith(_SEGMENTS):
                found.add(path)
    for top in _GROUPS:
        for path in top.glob(f"{PREFIX}*"):
            launcher = path.name.removeprefix(PREFIX).partition("-")[0]
            if launcher.isdecimal() and not psutil.pid_exists(int(launcher)):
                found.add(path)
    return found


def _unused(paths: set[Path]) -> set[Path]:
    """Without shared memory that a living process has mapped: it is another command's."""
    if not paths:
        return paths
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped |= {int(line.split()[4]) for line in maps.read_text().splitlines() if f" {_MEMORY}/" in line}
    return {path for path in paths if path.exists() and path.stat().st_ino not in mapped}


def _reap() -> None:
    """Take the exit codes of adopted orphans that have ended."""
    for process in _children():
        with suppress(psutil.Error, ChildProcessError):
            if process.ppid() == os.getpid() and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
