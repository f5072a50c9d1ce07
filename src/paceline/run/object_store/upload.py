"""Upload of a run's directory beside the training: nobody waits for it before the end.

Lines go as whole objects at intervals, a checkpoint shard by shard with its manifest last, so a checkpoint that has a
manifest is whole. A lost connection is told once, tried again ever more slowly, and told when it is back.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunError, StorageError
from paceline.files import opened_to_read, private_folder
from paceline.run.object_store.lease import LEASE
from paceline.state.manifest import MANIFEST, checkpoints, step_name
from paceline.storage.store import Store

EVERY_S = 5.0  # between two looks for new lines
_SHARE = 0.05  # of the time, at most, the lines of a long run take
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
JOB, CHECKPOINTS = "job.yaml", "checkpoints"
_TOLD = (JOB, "cluster.yaml", "plan.txt", "environment.json")
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Kind:
    """Kind of directory that may be kept at a URL.

    Attributes:
        mark: the file that makes a directory one.
        lines: the file of lines that grows as it goes on.
    """

    name: str
    mark: str
    lines: str


RUN = Kind("run", JOB, "events.jsonl")


@dataclass(frozen=True)
class Unsent:
    """Files of a run that are not in the store, and their size."""

    files: int
    size: int


class Uploader:
    """A thread that mirrors a run's directory to a store.

    Args:
        folder: the run's directory, on a file system of this host.
        say: told when the connection is lost, and when it is back.
        allowed: raises while this process may not write there any more.
        kind: of the directory.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        say: Callable[[str], object],
        allowed: Callable[[], None] = lambda: None,
        kind: Kind = RUN,
    ) -> None:
        self.folder, self.store, self.say, self.allowed, self.kind = folder, store, say, allowed, kind
        self.links = folder.with_name(f"{folder.name}.sending")  # a checkpoint's files, though the run deletes it
        self._sent: dict[str, Stamp] = {}
        self._next: dict[str, float] = {}  # when a file's new lines go at the earliest
        self._newest: Stamp | None = None  # of the manifest of the newest checkpoint that is whole in the store
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="run-upload", daemon=True)

    def start(self) -> None:
        """Begin; everything that is in the directory by now is sent as well."""
        self._thread.start()

    def finish(self, patience_s: float, tell: Callable[[str], object]) -> Unsent:
        """Send what is left, and say what could not be sent.

        It gives up when no byte has moved for `patience_s`, or at Ctrl-C.

        Args:
            tell: told from time to time how much is left.
        """
        self._ending.set()
        began = told_at = time.monotonic()
        with suppress(KeyboardInterrupt):
            while self._thread.is_alive():
                self._thread.join(0.1)
                now = time.monotonic()
                if now - max(self.store.progress_at, began) > patience_s:
                    break
                if now - told_at > EVERY_S:
                    told_at, left = now, self.unsent()
                    tell(f"uploading to {self.store.url}: {left.files} files, {left.size / 1e6:,.1f} MB left")
        self._given_up.set()
        return self.unsent()

    def unsent(self) -> Unsent:
        """Files that differ from the store's; of the checkpoints, only the newest counts."""
        left = [(name, stamp) for name, _, stamp in self._files() if self._sent.get(name) != stamp]
        size = sum(stamp[1] for _, stamp in left)
        newest = self._newest_here()
        if newest is not None and newest[2] != self._newest:
            files = [file for file in newest[1].iterdir() if file.is_file()]
            return Unsent(len(left) + len(files), size + sum(file.stat().st_size for file in files))
        return Unsent(len(left), size)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            last = self._ending.is_set()
            try:
                self._round(last)
            except (StorageError, OSError) as error:
                self._tell_of(error)
                if last:
                    time.sleep(_FIRST_PAUSE_S)
                else:
                    self._ending.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            except RunError:  # of `_check`, and told by whoever stops it
                return
            pause_s = _FIRST_PAUSE_S
            if self._lost:
                self._lost = False
                self.say(f"{self.store.url} can be reached again; everything up to now is uploaded")
            if last:
                shutil.rmtree(self.links, ignore_errors=True)
                return
            self._ending.wait(EVERY_S)

    def _check(self) -> None:
        """Raise where nothing may be written any more."""
        self.allowed()
        if self._given_up.is_set():
            raise RunError("the upload was given up")

    def _tell_of(self, error: Exception) -> None:
        if not self._lost:
            self._lost = True
            self.say(f"upload: {error}. Training goes on; its files stay in {self.folder}, and it is tried again.")

    def _round(self, last: bool) -> None:
        self._check()
        mark = self.kind.mark
        if not (self.folder / mark).exists():  # a run that failed before its first step is withdrawn
            if mark in self._sent:
                self.store.delete([mark])
                del self._sent[mark]
            return
        self._send_files(last)
        newest = self._newest_here()
        if newest is not None and newest[2] != self._newest:
            self._send_checkpoint(*newest, last)

    def _send_files(self, last: bool) -> None:
        for name, path, stamp in self._files():
            began = time.monotonic()
            if self._sent.get(name) == stamp or (not last and began < self._next.get(name, 0.0)):
                continue
            try:
                self._send(name, path)
            except FileNotFoundError:  # a temporary file, or a run that is withdrawn just now
                continue
            self._sent[name] = stamp
            self._next[name] = time.monotonic() + (time.monotonic() - began) / _SHARE

    def _send(self, name: str, path: Path) -> None:
        self._check()
        if path.suffix == ".jsonl":
            with opened_to_read(path) as file:
                content = file.read()
            self.store.write(name, content[: content.rfind(b"\n") + 1])
        else:
            self.store.upload(path, name)

    def _files(self) -> Iterator[tuple[str, Path, Stamp]]:
        """Files beside the checkpoints, in the order in which they are sent."""
        found = []
        for place, folders, files in os.walk(self.folder):
            folders[:] = [f for f in folders if not f.startswith(".") and f != CHECKPOINTS]
            for file in files:
                path = Path(place, file)
                name = path.relative_to(self.folder).as_posix()
                if file == LEASE or file.startswith(".") or path.is_symlink():
                    continue
                with suppress(FileNotFoundError):
                    found.append((name, path, _stamp(path)))
        # job.yaml makes a folder a run, so it comes after the others that describe it
        yield from sorted(found, key=lambda entry: (entry[0] not in _TOLD, entry[0] == JOB, entry[0]))

    def _newest_here(self) -> tuple[int, Path, Stamp] | None:
        """Step, folder and manifest's stamp of the newest whole checkpoint."""
        for step, folder in reversed(checkpoints(self.folder / CHECKPOINTS)):
            with suppress(FileNotFoundError):  # replaced or removed just now
                return step, folder, _stamp(folder / MANIFEST)
        return None

    def _send_checkpoint(self, step: int, folder: Path, stamp: Stamp, last: bool) -> None:
        """Send the newest checkpoint, then remove those from the store that the run has removed."""
        name = f"{CHECKPOINTS}/{step_name(step)}"
        try:
            self._link(folder)
            manifest = (self.links / MANIFEST).read_bytes()
        except FileNotFoundError:  # replaced by a newer one just now
            return
        there = self.store.list(CHECKPOINTS)
        if not self._is_there(name, manifest, set(there)):
            self.store.delete([f"{name}/{MANIFEST}"] if f"{name}/{MANIFEST}" in there else [])
            for file in sorted(self.links.iterdir(), key=lambda file: (file.name == MANIFEST, file.name)):
                self._check()
                self.store.upload(file, f"{name}/{file.name}")
                self._send_files(last)
        self._newest = stamp
        oldest = min((step for step, _ in checkpoints(self.folder / CHECKPOINTS)), default=step)
        old = [path for path in there if (of := step_of(path)) is not None and of < oldest]
        self.store.delete(sorted(old, key=lambda path: not path.endswith(MANIFEST)))
        shutil.rmtree(self.links, ignore_errors=True)

    def _is_there(self, name: str, manifest: bytes, there: set[str]) -> bool:
        return f"{name}/{MANIFEST}" in there and self.store.read(f"{name}/{MANIFEST}", 2**30) == manifest

    def _link(self, folder: Path) -> None:
        """Second names for a checkpoint's files, under which they stay until they are sent."""
        shutil.rmtree(self.links, ignore_errors=True)
        private_folder(self.links)
        for file in folder.iterdir():
            os.link(file, self.links / file.name, follow_symlinks=False)


def _stamp(path: Path) -> Stamp:
    about = path.stat()
    return about.st_mtime_ns, about.st_size, about.st_ino


def step_of(name: str) -> int | None:
    """The step of a checkpoint, from an object's name; None for other objects."""
    match = re.match(rf"{CHECKPOINTS}/step-(\d+)/", name)
    return int(match[1]) if match else None
