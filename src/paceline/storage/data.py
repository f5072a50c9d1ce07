"""Copies of a job's files that are named by URL, one for each version."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import StorageError
from paceline.files import (
    cache_folder,
    made_cache_folder,
    must_not_be_anothers,
    open_to_append,
    private_folder,
    read_text,
    write_whole,
)
from paceline.printable import printable
from paceline.storage.store import DATA_VERSIONS, STALL_S, Entry, Store, cache_name, checked_url, local_path

Say = Callable[[str], object]
TELL_EVERY_S = 5.0
_AT_ONCE = 4  # files of a folder
_UNUSED_S = 30 * 86_400.0  # after which an old version goes, when a new one is fetched
_VERSION = re.compile(r"\d+-[0-9a-f]{20}")


def to_stderr(line: str) -> None:
    """Print a line for the person who waits."""
    print(printable(line), file=sys.stderr, flush=True)


def fetched(url: str, say: Say = to_stderr) -> Path:
    """The copy of a file or folder in the store's version, fetched if missing.

    Processes of one host that ask at once wait for the one that fetches.

    Raises:
        StorageError: there is nothing, it cannot be read, or the disk is too small.
    """
    store = Store(url)
    if (path := local_path(store.url)) is not None:
        return path
    try:
        home = made_cache_folder("data") / cache_name(store.url)
        private_folder(home)
        with _only_one(home / "lock", store, say) as alive:
            contents = _contents(store)
            version = _version(contents)
            if not (home / version).exists():
                _remove_unused(home)
                _fetch(store, contents, home, version, say, alive)
            write_whole(home / "newest", version)
            os.utime(home / version)
    except OSError as error:
        raise StorageError(
            f"{store.url} cannot be kept in {cache_folder() / 'data'}: {error.strerror or error}. Name another place "
            "with XDG_CACHE_HOME."
        ) from error
    return home / version / _leaf(store.url)


def at_hand(url: str, say: Say = to_stderr) -> Path:
    """The copy that the run reads, else the one fetched last; fetched if missing.

    All ranks of a run read one version, and do not ask the store for another.

    Raises:
        StorageError: as `fetched`, or the store has another version now than the run began with.
    """
    url = checked_url(url)
    home = cache_folder() / "data" / cache_name(url)
    of_run = json.loads(os.environ.get(DATA_VERSIONS, "{}")).get(url)
    try:
        must_not_be_anothers(home)
        version = of_run or read_text(home / "newest", 100)
    except OSError:
        version = ""
    place = home / version / _leaf(url)
    if not (_VERSION.fullmatch(version) and place.exists()):
        place = fetched(url, say)
    else:
        with suppress(OSError):
            os.utime(place.parent)
    if of_run not in (None, version_of(place)):
        raise StorageError(f"{url} is not what the run began with: it was changed. Start the run again.")
    return place


def version_of(copy: Path) -> str:
    """The version of a fetched copy."""
    return copy.parent.name


def _remove_unused(home: Path) -> None:
    """Remove versions, whole or half fetched, that no run has begun with for long."""
    for folder in home.iterdir():
        is_version = _VERSION.fullmatch(folder.name.removeprefix("."))
        if is_version and time.time() - folder.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)


def _contents(store: Store) -> dict[str, Entry]:
    """Files by name, `""` where the URL is of one file."""
    about = store.about()
    found = {"": about} if about is not None else store.list()
    if not found:
        raise StorageError(f"{store.url}: no such file or folder", absent=True)
    for name in found:
        if name and not all(part.isprintable() and part not in ("", ".", "..") for part in name.split("/")):
            raise StorageError(f"{store.url}: {name!r} cannot be the name of a file here")
    return found


def _version(contents: dict[str, Entry]) -> str:
    """Name of a version: its bytes, and a hash of all names, sizes and versions."""
    listed = sorted((name, entry.size, entry.version) for name, entry in contents.items())
    return f"{_bytes(contents)}-{hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:20]}"


def _fetch(
    store: Store, contents: dict[str, Entry], home: Path, version: str, say: Say, alive: Callable[[], None]
) -> None:
    """Fetch a version into a folder that gets its name at the end.

    Whole files of an earlier try stay.
    """
    partial = home / f".{version}"
    private_folder(partial)
    free = shutil.disk_usage(home).free
    if _bytes(contents) > free + sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()):
        raise StorageError(
            f"{store.url} has {_bytes(contents) / 1e6:,.0f} MB, and {home} has room for {free / 1e6:,.0f} MB. Name "
            "another place with XDG_CACHE_HOME."
        )
    progress = _Progress(store.url, _bytes(contents), say, alive)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        jobs = [
            pool.submit(_fetch_one, store, name, partial / _leaf(store.url) / name, entry, progress)
            for name, entry in contents.items()
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    partial.rename(home / version)


def _fetch_one(store: Store, name: str, into: Path, entry: Entry, progress: _Progress) -> None:
    if into.is_file():
        progress.moved(entry.size)
        return
    into.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = into.with_name(f".{into.name}.part")
    part.unlink(missing_ok=True)
    if store.fetch(name, part, progress.moved) != entry:
        part.unlink()
        raise StorageError(f"{store.url}/{name} changed while it was fetched. Try again.", may_pass=True)
    part.rename(into)


class _Progress:
    """Counts the bytes of several threads, and tells of them every few seconds."""

    def __init__(self, url: str, total: int, say: Say, alive: Callable[[], None]) -> None:
        self.url, self.total, self.say, self.alive = url, total, say, alive
        self.done, self._told_at, self._lock = 0, time.monotonic(), threading.Lock()
        say(f"fetching {url} ({total / 1e6:,.1f} MB)")

    def moved(self, size: int) -> None:
        """Count bytes."""
        with self._lock:
            self.done += size
            self.alive()
            if time.monotonic() - self._told_at > TELL_EVERY_S:
                self._told_at = time.monotonic()
                self.say(f"fetching {self.url}: {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB")


@contextmanager
def _only_one(file: Path, store: Store, say: Say) -> Iterator[Callable[[], None]]:
    """Hold the lock of a URL's copies; the value shows others that bytes move.

    Raises:
        StorageError: another process has it, and moves nothing.
    """
    fd = open_to_append(file)
    try:
        told = False
        while not _locked(fd):
            if not told:
                told = True
                say(f"another process of this host fetches {store.url}; waiting for it")
            if time.time() - os.fstat(fd).st_mtime > 2 * STALL_S:
                raise StorageError(f"another process of this host holds {file}, and fetches nothing. End it.")
            time.sleep(0.2)
        os.utime(fd)
        yield lambda: os.utime(fd)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _bytes(contents: dict[str, Entry]) -> int:
    return sum(entry.size for entry in contents.values())


def _leaf(url: str) -> str:
    return url.rpartition("/")[2]
