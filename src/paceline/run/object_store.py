"""Runs in object stores: a local working directory that is uploaded during training."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.elastic.leadership import LOCK, Lease
from paceline.errors import CheckpointError, RunError, StorageError
from paceline.files import LINES_LIMIT, made_cache_folder, opened_to_read, private_folder, scratch_folder
from paceline.state.manifest import MANIFEST, Manifest, checkpoints, shard_name, step_name
from paceline.state.reader import BEST, best_step
from paceline.storage.store import Entry, Store
from paceline.storage.url import cache_name

PATIENCE_S = 60.0  # after training, the upload gives up after this many seconds without a transferred byte
HURRIED_S = 3.0  # the same limit after a signal or Ctrl-C

JOB, CHECKPOINTS = "job.yaml", "checkpoints"


@dataclass(frozen=True)
class Kind:
    """Type of a directory that can be kept at a URL.

    Attributes:
        mark: file that identifies a directory of this type.
        lines: file to which the program appends lines.
    """

    name: str
    mark: str
    lines: str


RUN = Kind("run", JOB, "events.jsonl")


class RemoteRun:
    """Context that locks the run at a URL for training, and uploads it.

    Training writes to `path`, a private directory in the user's cache. No rank waits for the store.

    Args:
        say: function that shows a message to the user.
        resume: whether to continue the run at the URL; files that are missing on this machine are fetched.
        kind: type of the directory.

    Attributes:
        path: the working directory.

    Raises:
        RunError: the run exists already, another process trains it, or the upload is incomplete at the end.
        StorageError: the store cannot be used, for lack of a bucket, credentials, permission or a connection.
    """

    def __init__(self, url: str, say: Callable[[str], object], *, resume: bool, kind: Kind = RUN) -> None:
        self.store, self.say, self.resume, self.kind = Store(url), say, resume, kind
        self.url = self.store.url
        try:
            self.path = made_cache_folder("runs") / cache_name(self.url)
        except OSError as error:
            raise RunError(
                "run.cache_unusable",
                "{url} needs a working directory on this machine, but {folder} cannot be created: {reason}. Choose "
                "another folder with XDG_CACHE_HOME.",
                url=self.url,
                folder=error.filename,
                reason=error.strerror,
            ) from error

    def __enter__(self) -> Self:
        self.store.make()
        self.lease = Lease(self.store, self.path.with_name(f"{self.path.name}.lease"), self.say)
        try:
            self._prepare()
            self.uploader = Uploader(self.path, self.store, self.say, self.lease.check, self.kind)
            self.uploader.start()
        except BaseException:
            self.lease.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            hurried = isinstance(error, (SystemExit, KeyboardInterrupt))
            unsent = self.uploader.finish(HURRIED_S if hurried else PATIENCE_S, self.say)
        finally:
            self.lease.release()
        if error is None and not unsent.files and self.lease.lost is None:
            shutil.rmtree(self._old, ignore_errors=True)
        if not unsent.files or self.lease.lost is not None or not (self.path / self.kind.mark).exists():
            return
        again = "the same command again uploads them"
        if self.kind == RUN:
            job, url = shlex.quote(str(self.path / JOB)), shlex.quote(self.url)
            again = f"this uploads them: paceline train {job} --run {url} --resume"
        problem = RunError(
            "run.files_not_uploaded",
            "{files} files ({size_mb:,.1f} MB) of the {kind} could not be uploaded to {url}. They are in {path}; "
            "{again}",
            files=unsent.files,
            size_mb=unsent.size / 1e6,
            kind=self.kind.name,
            url=self.url,
            path=self.path,
            again=again,
        )
        if error is None:
            raise problem
        self.say(str(problem))

    def check(self) -> None:
        """Raise RunError if another process has taken over the run."""
        self.lease.check()

    def _prepare(self) -> None:
        listed = self.store.list()
        here = (self.path / self.kind.mark).is_file()
        if self.kind != RUN and JOB in listed:
            raise RunError(
                "run.url_of_other_kind",
                "{url} holds a run, not a {kind}. Name another URL.",
                url=self.url,
                kind=self.kind.name,
            )
        if self.kind.mark in listed:
            if not self.resume:
                raise RunError(
                    "run.url_in_use",
                    "{url} holds a run already. Continue it with --resume, or name another URL.",
                    url=self.url,
                )
            if here and goes_on_from(self.store, self.path, self.kind.lines):
                return
            self._set_aside()
            self.say(f"fetching the {self.kind.name} from {self.url}")
            fetch_run(self.store, listed, self.path, self.say, checkpoint=BEST)
        elif here and not self.resume:
            raise RunError(
                "run.not_uploaded",
                "{path} contains a run that belongs to {url}, but the run is not at this URL. The upload failed, or "
                "the run was removed from the store. Continue with --resume, or remove that directory.",
                url=self.url,
                path=self.path,
            )
        elif not here:
            self._set_aside()

    def _set_aside(self) -> None:
        try:
            if self.path.exists():
                shutil.rmtree(self._old, ignore_errors=True)
                self.path.rename(self._old)
        except OSError as error:
            raise RunError(
                "run.not_moved",
                "{path} cannot be moved to {target}: {reason}",
                path=self.path,
                target=self._old,
                reason=error.strerror,
            ) from error

    @property
    def _old(self) -> Path:
        return self.path.with_name(f"{self.path.name}.old")


Say = Callable[[str], object]


@contextmanager
def copy_of(url: str, say: Say, *, checkpoint: str | None) -> Iterator[Path]:
    """Make a temporary copy of the run at a URL.

    Args:
        checkpoint: checkpoint to copy: `newest`, `best` or a step; None copies no checkpoint.

    Raises:
        RunError: there is no run at the URL.
        StorageError: the store cannot be used.
    """
    store = Store(url)
    listed = store.list()
    if JOB not in listed:
        raise RunError("run.url_without_job", "{url} is not a run: it has no {file}", url=store.url, file=JOB)
    with scratch_folder() as folder:
        # the copy keeps the run's name: `--layout hf` looks for the run above its checkpoints
        run = folder / store.url.rpartition("/")[2]
        fetch_run(store, listed, run, say, checkpoint=checkpoint)
        yield run


def fetch_run(store: Store, listed: dict[str, Entry], into: Path, say: Say, *, checkpoint: str | None) -> None:
    """Copy a run into a new folder; the folder is renamed when complete."""
    partial = into.with_name(f".{into.name}.fetching")
    shutil.rmtree(partial, ignore_errors=True)
    private_folder(partial)
    for name in listed:
        if name != LOCK and not name.startswith(f"{CHECKPOINTS}/") and is_plain(name):
            _fetch(store, name, partial / name)
    (partial / CHECKPOINTS).mkdir(mode=0o700)
    if checkpoint is not None and checkpoint.isdecimal():
        _fetch_step(store, listed, int(checkpoint), partial)
    elif checkpoint is not None:
        _fetch_newest(store, listed, partial, say)
        newest = next(iter(checkpoints(partial / CHECKPOINTS)), None) if checkpoint == BEST else None
        best = None if newest is None else best_step(Manifest.read(newest[1]).values)
        if newest is not None and best not in (None, newest[0]):
            _fetch_step(store, listed, int(best or 0), partial)
    partial.rename(into)


def goes_on_from(store: Store, folder: Path, lines: str) -> bool:
    """Return True if the local file begins with all lines of the store's file."""
    try:
        here = (folder / lines).read_bytes()
    except FileNotFoundError:
        here = b""
    return here.startswith(store.read(lines, LINES_LIMIT) or b"")


def is_plain(name: str) -> bool:
    """Return True if an object's name is a relative path without hidden parts."""
    return all(part and not part.startswith(".") and part.isprintable() for part in name.split("/"))


def _fetch_newest(store: Store, listed: dict[str, Entry], run: Path, say: Say) -> None:
    """Fetch the newest checkpoint whose files match its manifest in length and hash."""
    folders = {
        name.rpartition("/")[0] for name in listed if name.endswith(f"/{MANIFEST}") and step_of(name) is not None
    }
    for folder in sorted(folders, key=lambda name: step_of(f"{name}/") or 0, reverse=True):
        try:
            size = _fetch_checkpoint(store, listed, folder, run / folder)
        except (StorageError, CheckpointError) as error:
            if isinstance(error, StorageError) and (error.may_pass or error.denied):
                raise
            shutil.rmtree(run / folder, ignore_errors=True)
            say(f"{store.url}/{folder} is left out: {error}")
            continue
        say(f"fetched the checkpoint of step {step_of(f'{folder}/')} from {store.url} ({size / 1e6:,.1f} MB)")
        return


def _fetch_step(store: Store, listed: dict[str, Entry], step: int, run: Path) -> None:
    """Fetch the checkpoint of a step, if the store has it."""
    name = f"{CHECKPOINTS}/{step_name(step)}"
    if f"{name}/{MANIFEST}" in listed:
        _fetch_checkpoint(store, listed, name, run / name)


def _fetch_checkpoint(store: Store, listed: dict[str, Entry], name: str, into: Path) -> int:
    private_folder(into)
    store.fetch(f"{name}/{MANIFEST}", into / MANIFEST)
    shards = Manifest.read(into).shards
    for rank, shard in enumerate(shards):
        file = f"{name}/{shard_name(rank)}"
        if file not in listed or listed[file].size != shard.bytes:
            raise CheckpointError(
                "run.shard_missing",
                "{shard} is missing, or its length differs from the manifest",
                shard=shard_name(rank),
            )
        store.fetch(file, into / shard_name(rank), sha256=shard.sha256)
    return sum(shard.bytes for shard in shards)


def _fetch(store: Store, name: str, into: Path) -> None:
    into.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        store.fetch(name, into)
    except OSError as error:
        raise RunError(
            "run.object_not_kept",
            "{url}/{name} cannot be kept in {folder}: {reason}",
            url=store.url,
            name=name,
            folder=into.parent,
            reason=error.strerror or error,
        ) from error


EVERY_S = 5.0  # seconds between two uploads
_SHARE = 0.05  # maximum share of the time for uploading a file again and again as it grows
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_TOLD = (JOB, "cluster.yaml", "plan.txt", "environment.json")
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Unsent:
    """Number and total bytes of a run's files that are not in the store."""

    files: int
    size: int


class Uploader:
    """Thread that mirrors a run's directory to a store.

    Args:
        folder: the run's directory, on a file system of this host.
        say: function that shows a message when the connection is lost or restored.
        allowed: function that raises an error if this process has lost the right to write to the store.
        kind: type of the directory.
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
        # hard links to a checkpoint's files, which survive if the run deletes the checkpoint
        self.links = folder.with_name(f"{folder.name}.sending")
        self._sent: dict[str, Stamp] = {}
        self._next: dict[str, float] = {}  # by file: earliest time of its next upload
        self._newest: Stamp | None = None  # stamp of the newest uploaded checkpoint's manifest
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="run-upload", daemon=True)

    def start(self) -> None:
        """Start the thread; it also uploads existing files."""
        self._thread.start()

    def finish(self, patience_s: float, tell: Callable[[str], object]) -> Unsent:
        """Upload the remaining files; return those that could not be uploaded.

        The upload gives up after `patience_s` seconds without a transferred byte, or at Ctrl-C.

        Args:
            tell: function that is called every few seconds with a message about the remaining files.
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
        """Return the files that are not uploaded; of the checkpoints, only the newest counts."""
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
            except RunError:  # from `_check`; the caller that stops the thread reports it
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
        self.allowed()
        if self._given_up.is_set():
            raise RunError("run.upload_cancelled", "the upload was cancelled")

    def _tell_of(self, error: Exception) -> None:
        if not self._lost:
            self._lost = True
            self.say(f"upload: {error}. Training goes on; its files stay in {self.folder}, and it is tried again.")

    def _round(self, last: bool) -> None:
        self._check()
        mark = self.kind.mark
        if not (self.folder / mark).exists():  # a run that failed before its first step has been withdrawn
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
            except FileNotFoundError:  # the file was temporary, or the run has just been withdrawn
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
        """Yield the files outside of the checkpoints, in upload order."""
        found = []
        for place, folders, files in os.walk(self.folder):
            folders[:] = [f for f in folders if not f.startswith(".") and f != CHECKPOINTS]
            for file in files:
                path = Path(place, file)
                name = path.relative_to(self.folder).as_posix()
                if file == LOCK or file.startswith(".") or path.is_symlink():
                    continue
                with suppress(FileNotFoundError):
                    found.append((name, path, _stamp(path)))
        # job.yaml marks a complete run, so it is uploaded after the other files that describe the run
        yield from sorted(found, key=lambda entry: (entry[0] not in _TOLD, entry[0] == JOB, entry[0]))

    def _newest_here(self) -> tuple[int, Path, Stamp] | None:
        for step, folder in reversed(checkpoints(self.folder / CHECKPOINTS)):
            with suppress(FileNotFoundError):  # the checkpoint has just been replaced or removed
                return step, folder, _stamp(folder / MANIFEST)
        return None

    def _send_checkpoint(self, step: int, folder: Path, stamp: Stamp, last: bool) -> None:
        """Upload the newest checkpoint, then delete old checkpoints from the store.

        Old checkpoints are those that the run has deleted.
        """
        name = f"{CHECKPOINTS}/{step_name(step)}"
        try:
            self._link(folder)
            manifest = (self.links / MANIFEST).read_bytes()
        except FileNotFoundError:  # a newer checkpoint has just replaced it
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
        """Make hard links to a checkpoint's files, to keep them until they are uploaded."""
        shutil.rmtree(self.links, ignore_errors=True)
        private_folder(self.links)
        for file in folder.iterdir():
            os.link(file, self.links / file.name, follow_symlinks=False)


def _stamp(path: Path) -> Stamp:
    about = path.stat()
    return about.st_mtime_ns, about.st_size, about.st_ino


def step_of(name: str) -> int | None:
    """Return the checkpoint step in an object's name; None for other objects."""
    match = re.match(rf"{CHECKPOINTS}/step-(\d+)/", name)
    return int(match[1]) if match else None
