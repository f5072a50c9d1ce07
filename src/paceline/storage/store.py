"""Objects under a URL: list, read, write and fetch; local copies of a job's files.

fsspec transfers the data. Its errors are converted to StorageErrors, and stalled connections are closed. For each file
that a job names by URL, one copy per version is cached.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec import Callback, filesystem
from fsspec.asyn import AsyncFileSystem

from paceline.errors import StorageError
from paceline.files import (
    cache_folder,
    create_private,
    made_cache_folder,
    must_not_be_anothers,
    open_to_append,
    private_folder,
    read_text,
    write_whole,
)
from paceline.storage.url import (
    DATA_VERSIONS,
    cache_name,
    checked_url,
    credentials_of,
    local_path,
    protocol_of,
    without_secrets,
)
from paceline.text import printable

STALL_S = 120.0  # seconds without a transferred byte after which a connection counts as lost
PART_BYTES = 5 << 20  # S3's minimum part size; each part must be transferred within `STALL_S`
_MOST_PARTS = 9000  # S3 allows at most 10,000 parts
RETRY_S = 15.0  # a failed read is retried for this time after its first failure, if a retry may succeed
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0  # pauses between attempts; each pause is twice the last
_READS = ("find", "info", "cat_file")  # fsspec's methods that may be retried
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "LastModified", "mtime")


@dataclass(frozen=True)
class Entry:
    """An object's size in bytes, and a version string that changes with its content."""

    size: int
    version: str


class Store:
    """Objects under a URL, like files in a folder.

    Names are relative to the URL. All methods may raise StorageError, and are thread-safe. A forked process may use its
    parent's stores. Requests that only read are repeated for `RETRY_S`, so that a store may fail now and then.

    Attributes:
        progress_at: time of the last transferred byte or answer (monotonic seconds).
    """

    def __init__(self, url: str, *, stall_s: float = STALL_S) -> None:
        self.url = checked_url(url)
        self.protocol = protocol_of(self.url)
        self.stall_s = stall_s
        self.progress_at = time.monotonic()
        self._connect()

    def _connect(self) -> None:
        self._pid = os.getpid()
        try:
            # Create a new instance, because fsspec's cached instance may have outdated listings.
            self._files: Any = filesystem(self.protocol, skip_instance_cache=True, **_options(self.protocol))
        except (ImportError, ValueError) as error:
            raise StorageError(
                "storage.package_missing",
                "{url} cannot be used: {reason}",
                url=self.url,
                reason=_missing_package(self.protocol, error),
            ) from error
        self._asynchronous = isinstance(self._files, AsyncFileSystem)
        self._root = str(self._files._strip_protocol(self.url)).rstrip("/")

    def make(self) -> None:
        """For a `file://` URL, create the folder with access for its owner only."""
        if (path := local_path(self.url)) is not None:
            try:
                private_folder(path)
            except OSError as error:
                raise self._explained(error, self.url) from error

    def list(self, under: str = "") -> dict[str, Entry]:
        """Return all objects below `under` by name; empty if there are none."""
        found = self._call("find", self._path(under), detail=True)
        below = f"{self._root}/"
        return {
            path.removeprefix(below): _entry(about)
            for path, about in found.items()
            if path.startswith(below) and about.get("type") == "file"
        }

    def about(self, name: str = "") -> Entry | None:
        """Return an object's size and version; None if it does not exist."""
        try:
            found = self._call("info", self._path(name))
        except StorageError as error:
            if error.absent:
                return None
            raise
        return _entry(found) if found.get("type") == "file" else None

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small object; None if it does not exist."""
        about = self.about(name)
        if about is None:
            return None
        if about.size > limit:
            raise StorageError(
                "storage.too_large",
                "{url}/{name} has {size:,} bytes; at most {limit:,} are expected",
                url=self.url,
                name=name,
                size=about.size,
                limit=limit,
            )
        return bytes(self._call("cat_file", self._path(name))) if about.size else b""

    def create(self, name: str, content: bytes) -> bool:
        """Write a new object; return False if the name already exists.

        If several processes call this concurrently, exactly one succeeds. This requires a store with conditional
        writes, such as S3, Google Cloud Storage or local files.
        """
        try:
            self._call("pipe_file", self._path(name), content, mode="create")
        except StorageError as error:
            if error.exists:
                return False
            raise
        return True

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object; readers see either the old or the new content."""
        self._replace(name, lambda path: self._call("pipe_file", path, content))

    def upload(self, file: Path, name: str) -> None:
        """Upload a file to an object atomically, like `write`.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        part = max(PART_BYTES, -(-file.stat().st_size // _MOST_PARTS))
        more: dict[str, Any] = {"chunksize": part, "callback": _Moved(self)} if self._asynchronous else {}
        more |= {"max_concurrency": 2} if self.protocol in ("s3", "s3a") else {}
        self._replace(name, lambda path: self._call("put_file", str(file), path, **more))

    def _replace(self, name: str, put: Callable[[str], object]) -> None:
        """Write an object atomically; local files are renamed at the end."""
        path = self._path(name)
        if self._asynchronous:
            put(path)
        else:
            put(f"{path}.part")
            self._call("mv", f"{path}.part", path)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, ignoring missing ones."""
        for name in names:
            try:
                self._call("rm_file", self._path(name))
            except StorageError as error:
                if not error.absent:
                    raise

    def fetch(
        self,
        name: str,
        into: Path,
        moved: Callable[[int], None] = lambda _: None,
        *,
        expected: Entry | None = None,
        sha256: str | None = None,
    ) -> Entry:
        """Download an object into a new private file.

        The download fails if its length is wrong, or if the object changes meanwhile.

        Args:
            moved: function that is called with the number of bytes of each part.
            expected: the object's known size and version; None to ask the store. An object of another version is an
                error.
            sha256: expected SHA-256 of the content, in hex.
        """
        shown = f"{self.url}/{name}".rstrip("/")
        about = expected or self.about(name)
        if about is None:
            raise StorageError("storage.object_absent", "{url}: no such object", url=shown, absent=True)
        digest = hashlib.sha256()
        with create_private(into) as file:
            for start in range(0, about.size, PART_BYTES):
                part = self.part(name, start, min(start + PART_BYTES, about.size))
                file.write(part)
                digest.update(part)
                moved(len(part))
            written = file.tell()
        if written != about.size or self.about(name) != about:
            into.unlink()
            raise StorageError(
                "storage.object_changed",
                "{url} changed while it was downloaded. Try again.",
                url=shown,
                may_pass=expected is None,
            )
        if sha256 not in (None, digest.hexdigest()):
            into.unlink()
            raise StorageError(
                "storage.altered",
                "{url} was altered. Its SHA-256 differs from the recorded SHA-256.",
                url=shown,
            )
        return about

    def part(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` up to `end`, which is excluded."""
        return bytes(self._call("cat_file", self._path(name), start=start, end=end))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _call(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        failed_at, pause_s = 0.0, _FIRST_PAUSE_S
        while True:
            try:
                return self._call_once(method, path, *args, **options)
            except StorageError as error:
                failed_at = failed_at or time.monotonic()
                if method not in _READS or not error.may_pass or time.monotonic() + pause_s > failed_at + RETRY_S:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _call_once(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        if self._pid != os.getpid():
            self._connect()  # fsspec's connections do not work in a forked process
        try:
            answer = self._waited_for(method, path, *args, **options)
        except FileNotFoundError as error:
            if method == "put_file" and not os.path.exists(path):
                raise
            raise self._explained(error, path) from error
        except StorageError:
            raise
        except Exception as error:
            raise self._explained(error, path) from error
        self.progress_at = time.monotonic()
        return answer

    def _waited_for(self, method: str, *args: Any, **options: Any) -> Any:
        if not self._asynchronous:
            return getattr(self._files, method)(*args, **options)
        began = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(
            getattr(self._files, f"_{method}")(*args, **options), self._files.loop
        )
        try:
            while True:
                try:
                    return future.result(timeout=1.0)
                except TimeoutError:
                    if future.done():
                        raise
                    if time.monotonic() - max(began, self.progress_at) > self.stall_s:
                        raise StorageError(
                            "storage.stalled",
                            "{url}: nothing was transferred for {stall_s:g} s",
                            url=self.url,
                            stall_s=self.stall_s,
                            may_pass=True,
                        ) from None
        finally:
            future.cancel()

    def _explained(self, error: Exception, path: str) -> StorageError:
        """Convert any error of a store to a StorageError."""
        shown = f"{self.protocol}://{path}" if path.startswith(self._root) else self.url
        code = str(getattr(error, "response", {}).get("Error", {}).get("Code", "")) or type(error).__name__
        first = _first_line(error)
        if "Credential" in type(error).__name__:
            return StorageError(
                "storage.no_credentials",
                "{url}: no credentials were found in {credentials}.",
                url=shown,
                credentials=credentials_of(self.protocol),
                denied=True,
            )
        if isinstance(error, PermissionError):
            return StorageError(
                "storage.denied",
                "{url}: access was refused ({reason}). The credentials come from {credentials}. They must allow "
                "listing, reading and writing at this URL.",
                url=shown,
                reason=first,
                credentials=credentials_of(self.protocol),
                denied=True,
            )
        if isinstance(error, FileNotFoundError):
            return StorageError(
                "storage.not_there", "{url} does not exist ({reason})", url=shown, reason=first, absent=True
            )
        if isinstance(error, FileExistsError) or code in ("PreconditionFailed", "ConditionalRequestConflict"):
            return StorageError("storage.exists", "{url} already exists", url=shown, exists=True)
        if isinstance(error, NotImplementedError):
            return StorageError(
                "storage.read_only",
                "{url}: {protocol}:// does not support writing or listing",
                url=shown,
                protocol=self.protocol,
            )
        return StorageError(
            "storage.unreachable", "{url} cannot be reached: {reason}", url=shown, reason=first, may_pass=True
        )


class _Moved(Callback):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def relative_update(self, inc: int = 1) -> None:
        """Record progress; fsspec calls this for each part."""
        super().relative_update(inc)
        self.store.progress_at = time.monotonic()


def _options(protocol: str) -> dict[str, Any]:
    if protocol in ("file", "local"):
        return {"auto_mkdir": True}
    if protocol in ("s3", "s3a"):
        limits = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
        return {"use_listings_cache": False, "config_kwargs": limits}
    return {"use_listings_cache": False}


def _missing_package(protocol: str, error: Exception) -> str:
    if protocol in ("s3", "s3a"):
        return f"s3fs cannot be imported ({error}); run: pip install 'paceline[s3]'"
    if protocol in ("gs", "gcs"):
        return f"gcsfs cannot be imported ({error}); run: pip install gcsfs"
    return without_secrets(str(error))


def _first_line(error: Exception) -> str:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return re.sub(r"\?[^\s\"']*", "", without_secrets(lines[0]))[:300]


def _entry(about: dict[str, Any]) -> Entry:
    return Entry(int(about.get("size") or 0), next((str(about[key]) for key in _VERSION_KEYS if key in about), ""))


Say = Callable[[str], object]
TELL_EVERY_S = 5.0
_AT_ONCE = 4  # number of a folder's files that are downloaded concurrently
_UNUSED_S = 30 * 86_400.0  # seconds without use after which a version is removed when a new version is fetched
_VERSION = re.compile(r"\d+-[0-9a-f]{20}")


def to_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(printable(line), file=sys.stderr, flush=True)


def fetched(url: str, say: Say = to_stderr) -> Path:
    """Return a local copy of the newest version of a file or folder.

    The version is downloaded if the cache lacks it. If several processes of a host call this concurrently, one
    downloads and the others wait.

    Raises:
        StorageError: the object does not exist or cannot be read, or the disk has too little space.
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
            "storage.cache_unusable",
            "{url} cannot be kept in {folder}: {reason}. Choose another folder with XDG_CACHE_HOME.",
            url=store.url,
            folder=cache_folder() / "data",
            reason=error.strerror or error,
        ) from error
    return home / version / _leaf(store.url)


def at_hand(url: str, say: Say = to_stderr) -> Path:
    """Return the cached copy that the run uses, or the newest cached copy.

    The file is downloaded if the cache lacks it. All ranks of a run use the same version, and do not check for a newer
    version.

    Raises:
        StorageError: the file cannot be fetched (see `fetched`), or has changed in the store since the run began.
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
        raise StorageError(
            "storage.changed_since_start",
            "{url} was changed after the run began. Start the run again.",
            url=url,
        )
    return place


def version_of(copy: Path) -> str:
    """Return the version of a local copy."""
    return copy.parent.name


def _remove_unused(home: Path) -> None:
    """Remove complete and partial versions that no run has used for 30 days."""
    for folder in home.iterdir():
        is_version = _VERSION.fullmatch(folder.name.removeprefix("."))
        if is_version and time.time() - folder.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)


def _contents(store: Store) -> dict[str, Entry]:
    about = store.about()
    found = {"": about} if about is not None else store.list()
    if not found:
        raise StorageError("storage.absent", "{url}: no such file or folder", url=store.url, absent=True)
    for name in found:
        if name and not all(part.isprintable() and part not in ("", ".", "..") for part in name.split("/")):
            raise StorageError(
                "storage.name_unusable",
                "{url}: {name!r} cannot be a file name on this machine",
                url=store.url,
                name=name,
            )
    return found


def _version(contents: dict[str, Entry]) -> str:
    """Return a version's name: its total bytes, and a hash of names, sizes and versions."""
    listed = sorted((name, entry.size, entry.version) for name, entry in contents.items())
    return f"{_bytes(contents)}-{hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:20]}"


def _fetch(
    store: Store, contents: dict[str, Entry], home: Path, version: str, say: Say, alive: Callable[[], None]
) -> None:
    """Download a version into a temporary folder, which is renamed when complete.

    Complete files of an earlier attempt are reused.
    """
    partial = home / f".{version}"
    private_folder(partial)
    free = shutil.disk_usage(home).free
    if _bytes(contents) > free + sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()):
        raise StorageError(
            "storage.no_room",
            "{url} has {size_mb:,.0f} MB, but {home} has only {free_mb:,.0f} MB of free space. Choose another "
            "folder with XDG_CACHE_HOME.",
            url=store.url,
            size_mb=_bytes(contents) / 1000000.0,
            home=home,
            free_mb=free / 1000000.0,
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
    store.fetch(name, part, progress.moved, expected=entry)
    part.rename(into)


class _Progress:
    """Download progress of several threads, reported every few seconds."""

    def __init__(self, url: str, total: int, say: Say, alive: Callable[[], None]) -> None:
        self.url, self.total, self.say, self.alive = url, total, say, alive
        self.done, self._told_at, self._lock = 0, time.monotonic(), threading.Lock()
        say(f"fetching {url} ({total / 1e6:,.1f} MB)")

    def moved(self, size: int) -> None:
        with self._lock:
            self.done += size
            self.alive()
            if time.monotonic() - self._told_at > TELL_EVERY_S:
                self._told_at = time.monotonic()
                self.say(f"fetching {self.url}: {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB")


@contextmanager
def _only_one(file: Path, store: Store, say: Say) -> Iterator[Callable[[], None]]:
    """Lock the cached copies of a URL within this context.

    Call the yielded function regularly, to show waiting processes that the download makes progress.

    Raises:
        StorageError: another process holds the lock, but makes no progress.
    """
    fd = open_to_append(file)
    try:
        told = False
        while not _locked(fd):
            if not told:
                told = True
                say(f"another process of this host fetches {store.url}; waiting for it")
            if time.time() - os.fstat(fd).st_mtime > 2 * STALL_S:
                raise StorageError(
                    "storage.locked",
                    "another process on this host holds the lock {file}, but downloads nothing. End that process.",
                    file=file,
                )
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
