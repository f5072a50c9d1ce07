"""Files and folders that a host's processes share, and threads that fetch ahead.

Processes coordinate with flock only, because the kernel releases these locks when a process dies. In a folder of
`HostFiles`, `files/` holds deletable files, `kept/` holds permanent files, and `making/` holds unfinished files and
their locks. The file `room` stores the number of bytes in `files/`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from paceline.errors import StorageError
from paceline.files import cache_folder, made_cache_folder, open_to_append, private_folder

_Opened = TypeVar("_Opened")
_OPEN_TRIES = 100  # attempts to open a file that other processes delete in between
_POLL_S = (0.01, 0.2)  # first and longest pause between two attempts to take a lock
_LOCKED_S = 3600.0  # seconds without a change of an unfinished file after which its maker counts as hung
_DELETED_SHARE = 20  # if a scan deletes files, it deletes at least 1/20 of them, so that scans stay rare
_CLOSE_S = 5.0  # seconds that `FetchAhead.close` waits for transfers


class HostFiles:
    """A folder of files that all processes of a host share, each made once.

    If the files exceed the limit, the least recently used files are deleted. This does not disturb readers that have
    such a file open or mapped, because Linux keeps the content until the last reader closes it. Readers therefore hold
    no locks. A file that was deleted before a reader opened it is made again; see `opened`.

    The access time of a file records its last use. Its modification time does not change.

    Args:
        folder: private folder, created if missing.
        limit_bytes: largest size of all deletable files. A single larger file may exceed the limit. Unfinished files
            are not counted.

    Raises:
        StorageError: the folder cannot be used, or belongs to another user.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._files, self._kept, self._making = folder / "files", folder / "kept", folder / "making"
        with self._usable():
            for each in (folder, self._files, self._kept, self._making):
                private_folder(each)
            self._remove_abandoned()

    def path(self, key: str, make: Callable[[Path], None], *, keep: bool = False) -> Path:
        """Return the file of a key; make the file if it does not exist.

        Args:
            key: name of the file's content. It must change with the content.
            make: function that writes a new file at the given path, in a private folder of its own. If several
                processes or threads ask for the same key, one calls `make`, and the others wait.
            keep: True for a file that is neither counted nor deleted, such as an index.

        Raises:
            StorageError: the disk is full, the folder cannot be used, or the process that makes the file hangs.
            Exception: any error of `make`.
        """
        name = _name(key)
        file = (self._kept if keep else self._files) / name
        if not _touched(file):
            with self._usable(), _locked(self._making / f"{name}.lock", remove=True):
                if not _touched(file):  # no other process has made it meanwhile
                    self._make(file, make, self._making / name)
        return file

    def opened(
        self, key: str, make: Callable[[Path], None], open: Callable[[Path], _Opened], *, keep: bool = False
    ) -> _Opened:
        """Return `open(path)` for the file of a key.

        If another process deletes the file before it is open, the file is made again.

        Raises:
            StorageError: see `path`.
            Exception: any error of `make` or `open`.
        """
        for attempt in range(_OPEN_TRIES):
            path = self.path(key, make, keep=keep)
            try:
                return open(path)
            except OSError:
                if path.exists() or attempt + 1 == _OPEN_TRIES:
                    raise
        raise AssertionError

    def has(self, key: str) -> bool:
        """Return True if the file of a key exists."""
        name = _name(key)
        return (self._files / name).exists() or (self._kept / name).exists()

    def _make(self, file: Path, make: Callable[[Path], None], scratch: Path) -> None:
        shutil.rmtree(scratch, ignore_errors=True)  # a killed process left it
        private_folder(scratch)
        try:
            made = scratch / "file"
            make(made)
            _sync(made)  # otherwise a power failure after the rename could leave an empty file
            if file.parent == self._kept:
                made.rename(file)
            else:
                self._admit(made, file)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _admit(self, made: Path, file: Path) -> None:
        """Rename a new file to its place, and delete others if the limit requires that."""
        size = made.stat().st_size
        with _locked(self.folder / "room") as fd:
            written = os.pread(fd, 32, 0)
            held = int(written) if written.isdigit() else None
            if held is None or held + size > self.limit_bytes:
                held = self._delete_oldest(self.limit_bytes - size)
            # Written before the rename: after a crash the number can only be too large, and the next scan corrects it.
            os.ftruncate(fd, 0)
            os.write(fd, b"%d" % (held + size))
            os.utime(made)
            made.rename(file)

    def _delete_oldest(self, most: int) -> int:
        """Delete the least recently used files. Return the bytes that remain, at most `most`."""
        with os.scandir(self._files) as entries:
            about = [(entry.stat(follow_symlinks=False), Path(entry.path)) for entry in entries]
        about.sort(key=lambda one: one[0].st_atime_ns)
        held, scanned = sum(stat.st_size for stat, _ in about), len(about)
        if held <= most:
            return held
        for deleted, (stat, path) in enumerate(about):
            if held <= most and deleted >= scanned // _DELETED_SHARE:
                break
            path.unlink(missing_ok=True)
            held -= stat.st_size
        return held

    def _remove_abandoned(self) -> None:
        """Remove the unfinished files of killed processes."""
        for lock in self._making.glob("*.lock"):
            with suppress(BlockingIOError), _locked(lock, remove=True, wait=False):
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL and (
                isinstance(error, FileNotFoundError) or not str(error.filename or "").startswith(str(self.folder))
            ):
                raise  # an error of the source that `make` reads
            raise _unusable(self.folder, error) from error


def user_cache(name: str) -> Path:
    """Return a folder of this user's cache; create it if missing.

    Raises:
        StorageError: the folder cannot be created, or belongs to another user.
    """
    try:
        return made_cache_folder(name)
    except OSError as error:
        raise _unusable(cache_folder(), error) from error


def shared_folder(home: Path, key: str, limit_bytes: int, make: Callable[[Path], None]) -> Path:
    """Return the folder of a key, which no process deletes while this process runs.

    If all folders together exceed the limit, the least recently used folders that no process uses are deleted.

    Args:
        key: name of the folder's content. It must change with the content.
        make: function that creates or completes the folder. Several processes may call it at the same time.

    Raises:
        StorageError: the disk is full, or `home` cannot be used.
        Exception: any error of `make`.
    """
    folder = home / _name(key)
    try:
        if folder not in _used:
            _used[folder] = _shared_lock(_lock_of(folder))
        os.utime(_used[folder])
        make(folder)
        with _locked(home / "room"):
            _delete_unused(home, limit_bytes)
    except OSError as error:
        if error.errno not in _FULL and not str(error.filename or "").startswith(str(home)):
            raise
        raise _unusable(home, error) from error
    return folder


_FULL = (errno.ENOSPC, errno.EDQUOT)
_used: dict[Path, int] = {}  # descriptors of the shared locks of the folders that this process uses


def _unusable(folder: Path, error: OSError) -> StorageError:
    if error.errno in _FULL:
        return StorageError(
            "storage.disk_full",
            "the disk of {folder} is full. Free some space, or choose another folder with XDG_CACHE_HOME.",
            folder=folder,
            may_pass=True,
        )
    return StorageError(
        "storage.folder_unusable",
        "{folder} cannot hold cached files: {reason}. Choose another folder with XDG_CACHE_HOME.",
        folder=folder,
        reason=error.strerror or error,
    )


def _lock_of(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _shared_lock(file: Path) -> int:
    while True:
        fd = open_to_append(file)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is_at(fd, file):
            return fd
        os.close(fd)  # another process has deleted the folder and its lock meanwhile


def _delete_unused(home: Path, most: int) -> None:
    """Delete unused folders, the least recently used first, until `most` bytes remain."""
    doomed = home / "deleted"  # a killed process may leave it
    shutil.rmtree(doomed, ignore_errors=True)
    found = sorted((_changed_at(_lock_of(folder)), folder) for folder in home.iterdir() if folder.is_dir())
    sizes = {folder: _size_of(folder) for _, folder in found}
    held = sum(sizes.values())
    for folder, size in sizes.items():
        if held <= most:
            return
        with suppress(BlockingIOError), _locked(_lock_of(folder), remove=True, wait=False):
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            held -= size


def _size_of(folder: Path) -> int:
    size = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # a process renames its new files
            size += file.stat().st_size
    return size


class FetchAhead:
    """Threads that make shards local before they are read.

    An error of `fetch` is stored in `errors` and not raised; a reader that needs the shard gets the error from its own
    attempt. After a fork, the child has no threads until it calls `want`.

    Args:
        fetch: thread-safe function that makes a shard local; it returns at once if the shard already is.
        threads: largest number of concurrent calls.

    Attributes:
        errors: the most recent error by shard, of shards whose last attempt failed.
    """

    def __init__(self, fetch: Callable[[int], None], threads: int = 16) -> None:
        self._fetch, self._most = fetch, threads
        self._begin()

    def want(self, shards: Sequence[int]) -> None:
        """Fetch shards in this order, and drop earlier requests that have not started."""
        if self._pid != os.getpid():
            self._begin()
        with self._changed:
            self._wanted.clear()
            self._wanted.extend(shard for shard in dict.fromkeys(shards) if shard not in self._begun)
            for _ in range(min(len(self._wanted), self._most - len(self._threads))):
                thread = threading.Thread(target=self._run, args=(self._changed,), name="fetch-ahead", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """End all threads; a later `want` starts new ones.

        A transfer that takes longer than 5 s ends in the background.
        """
        if self._pid != os.getpid():
            return
        changed, threads = self._changed, self._threads
        with changed:
            self._begin()
            changed.notify_all()
        until = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _begin(self) -> None:
        self._pid = os.getpid()
        # Each start has its own condition. A thread ends when its condition is no longer the current one.
        self._changed: threading.Condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._wanted: deque[int] = deque()
        self._begun: set[int] = set()  # shards of running calls
        self.errors: dict[int, Exception] = {}

    def _run(self, changed: threading.Condition) -> None:
        while True:
            with changed:
                while not self._wanted and self._changed is changed:
                    changed.wait()
                if self._changed is not changed:
                    return
                shard = self._wanted.popleft()
                self._begun.add(shard)
            error = None
            try:
                self._fetch(shard)
            except Exception as raised:  # noqa: BLE001 - the reader raises it, with its own traceback
                error = raised
            with changed:
                self._begun.discard(shard)
                self.errors.pop(shard, None)
                if error is not None:
                    self.errors[shard] = error


_held: set[int] = set()  # descriptors of the locks of this process


@contextmanager
def _locked(file: Path, *, remove: bool = False, wait: bool = True) -> Iterator[int]:
    """Hold the lock of a file within this context.

    Args:
        remove: True to remove the file at the end.
        wait: False to raise BlockingIOError if another process or thread holds the lock.

    Raises:
        StorageError: another process has held the lock for an hour without writing anything.
    """
    fd = _taken(file, wait)
    try:
        yield fd
    finally:
        if remove:
            file.unlink(missing_ok=True)
        _held.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the same descriptor open
        os.close(fd)


def _taken(file: Path, wait: bool) -> int:
    pause_s, began = _POLL_S[0], time.time()
    while True:
        fd = open_to_append(file)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, file):
                os.utime(fd)
                _held.add(fd)
                return fd
            pause_s = 0.0  # the previous holder removed the file
        except BlockingIOError:
            if not wait:
                os.close(fd)
                raise
            pause_s = min(2 * pause_s or _POLL_S[0], _POLL_S[1])
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.time() - max(began, _changed_at(file), _changed_at(file.with_suffix("") / "file")) > _LOCKED_S:
            raise StorageError(
                "storage.maker_hung",
                "another process of this host holds the lock {file}, but has written nothing for an hour. End that "
                "process.",
                file=file,
                may_pass=True,
            )
        time.sleep(pause_s)


def _close_in_child() -> None:
    """Close the parent's lock descriptors, which would keep its locks held after the parent ends."""
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _name(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]


def _touched(file: Path) -> bool:
    """Set a file's access time; return False if the file does not exist."""
    try:
        os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


def _is_at(fd: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(file))
    except FileNotFoundError:
        return False


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
