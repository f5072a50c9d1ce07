"""Objects in stores: their URLs, and how they are listed, read and written.

A URL is `s3://bucket/name`, `gs://…`, `file:///…` or of any other protocol that fsspec knows. fsspec does the work.
Its many errors become one here, with what to do, and a connection over which nothing moves is given up.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from fsspec import Callback, filesystem
from fsspec.asyn import AsyncFileSystem

from paceline.errors import StorageError
from paceline.files import create_private, private_folder
from paceline.nearest import nearest

STALL_S = 120.0  # after so long without a byte, a connection counts as lost
PART_BYTES = 5 << 20  # the smallest that S3 takes; one has to get through in `STALL_S`
_MOST_PARTS = 9000  # S3 allows 10,000
_TRIES, _FIRST_PAUSE_S = 4, 0.5  # of a part that is fetched
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "LastModified", "mtime")


@dataclass(frozen=True)
class Entry:
    """An object: its size in bytes, and a text that changes with its content."""

    size: int
    version: str


class Store:
    """Objects under a URL, which acts as a folder.

    Names are relative to the URL. All methods raise StorageError, and may be called from several threads.

    Attributes:
        progress_at: when the last byte moved or the last answer came (monotonic seconds).
    """

    def __init__(self, url: str, *, stall_s: float = STALL_S) -> None:
        self.url = checked_url(url)
        self.protocol = protocol_of(self.url)
        self.stall_s = stall_s
        self.progress_at = time.monotonic()
        try:
            # A new instance: nothing is remembered of what was listed before.
            self._files: Any = filesystem(self.protocol, skip_instance_cache=True, **_options(self.protocol))
        except (ImportError, ValueError) as error:
            raise StorageError(f"{self.url} cannot be used: {_missing_package(self.protocol, error)}") from error
        self._asynchronous = isinstance(self._files, AsyncFileSystem)
        self._root = str(self._files._strip_protocol(self.url)).rstrip("/")

    def make(self) -> None:
        """Make the folder, private to its owner, where the URL is of this machine's files."""
        if (path := local_path(self.url)) is not None:
            try:
                private_folder(path)
            except OSError as error:
                raise self._explained(error, self.url) from error

    def list(self, under: str = "") -> dict[str, Entry]:
        """All objects below `under`, by name; empty where there is nothing."""
        found = self._call("find", self._path(under), detail=True)
        below = f"{self._root}/"
        return {
            path.removeprefix(below): _entry(about)
            for path, about in found.items()
            if path.startswith(below) and about.get("type") == "file"
        }

    def about(self, name: str = "") -> Entry | None:
        """An object's size and version; None where there is no object of that name."""
        try:
            found = self._call("info", self._path(name))
        except StorageError as error:
            if error.absent:
                return None
            raise
        return _entry(found) if found.get("type") == "file" else None

    def read(self, name: str, limit: int) -> bytes | None:
        """The content of a small object; None where there is none."""
        about = self.about(name)
        if about is None:
            return None
        if about.size > limit:
            raise StorageError(f"{self.url}/{name} has {about.size:,} bytes; at most {limit:,} are expected")
        return bytes(self._call("cat_file", self._path(name))) if about.size else b""

    def create(self, name: str, content: bytes) -> bool:
        """Write an object that must be new; False where there is one of that name.

        Of several that try at once, one succeeds, on stores that can tell (S3, Google's, local files).
        """
        try:
            self._call("pipe_file", self._path(name), content, mode="create")
        except StorageError as error:
            if error.exists:
                return False
            raise
        return True

    def write(self, name: str, content: bytes) -> None:
        """Write an object, new or not; readers see the old content or the new one."""
        if self._asynchronous:
            self._call("pipe_file", self._path(name), content)
        else:
            self._call("pipe_file", self._path(f"{name}.part"), content)
            self._call("mv", self._path(f"{name}.part"), self._path(name))

    def upload(self, file: Path, name: str) -> None:
        """Write a file's content as an object, as `write`.

        Raises:
            FileNotFoundError: the file is not there.
        """
        size = file.stat().st_size
        if self._asynchronous:
            part = max(PART_BYTES, -(-size // _MOST_PARTS))
            more = {"chunksize": part} | ({"max_concurrency": 2} if self.protocol in ("s3", "s3a") else {})
            self._call("put_file", str(file), self._path(name), callback=_Moved(self), **more)
        else:
            self._call("put_file", str(file), self._path(f"{name}.part"))
            self._call("mv", self._path(f"{name}.part"), self._path(name))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already do not matter."""
        for name in names:
            try:
                self._call("rm_file", self._path(name))
            except StorageError as error:
                if not error.absent:
                    raise

    def fetch(
        self, name: str, into: Path, moved: Callable[[int], None] = lambda _: None, *, sha256: str | None = None
    ) -> Entry:
        """Copy an object into a new private file.

        Its length is checked, and that it did not change meanwhile.

        Args:
            moved: told the bytes of each part.
            sha256: what its content has to have, in hex.
        """
        shown = f"{self.url}/{name}".rstrip("/")
        about = self.about(name)
        if about is None:
            raise StorageError(f"{shown}: no such object", absent=True)
        digest = hashlib.sha256()
        with create_private(into) as file:
            for start in range(0, about.size, PART_BYTES):
                part = self._part(name, start, min(start + PART_BYTES, about.size))
                file.write(part)
                digest.update(part)
                moved(len(part))
            written = file.tell()
        if written != about.size or self.about(name) != about:
            into.unlink()
            raise StorageError(f"{shown} changed while it was fetched. Try again.", may_pass=True)
        if sha256 not in (None, digest.hexdigest()):
            into.unlink()
            raise StorageError(f"{shown} was altered: it does not have the SHA-256 that is written beside it")
        return about

    def _part(self, name: str, start: int, end: int) -> bytes:
        pause_s = _FIRST_PAUSE_S
        for last in (False,) * (_TRIES - 1) + (True,):
            try:
                return bytes(self._call("cat_file", self._path(name), start=start, end=end))
            except StorageError as error:
                if last or not error.may_pass:
                    raise
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _call(self, method: str, path: str, *args: Any, **options: Any) -> Any:
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
                        text = f"{self.url}: nothing has moved for {self.stall_s:g} s"
                        raise StorageError(text, may_pass=True) from None
        finally:
            future.cancel()

    def _explained(self, error: Exception, path: str) -> StorageError:
        """A store's own error, of whatever class, in words."""
        shown = f"{self.protocol}://{path}" if path.startswith(self._root) else self.url
        code = str(getattr(error, "response", {}).get("Error", {}).get("Code", "")) or type(error).__name__
        first = _first_line(error)
        if "Credential" in type(error).__name__:
            return StorageError(f"{shown}: no credentials. Looked for {credentials_of(self.protocol)}.", denied=True)
        if isinstance(error, PermissionError):
            return StorageError(
                f"{shown}: refused ({first}). The credentials come from {credentials_of(self.protocol)}; they need the "
                "right to list, read and write there.",
                denied=True,
            )
        if isinstance(error, FileNotFoundError):
            return StorageError(f"{shown}: not there ({first})", absent=True)
        if isinstance(error, FileExistsError) or code in ("PreconditionFailed", "ConditionalRequestConflict"):
            return StorageError(f"{shown}: there already", exists=True)
        if isinstance(error, NotImplementedError):
            return StorageError(f"{shown}: {self.protocol}:// cannot be written to or listed")
        return StorageError(f"{shown} cannot be reached: {first}", may_pass=True)


class _Moved(Callback):
    """Notes on a store that bytes have moved."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def relative_update(self, inc: int = 1) -> None:
        """See fsspec; called for each part."""
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
    """An error's first line, without secrets and without the queries of URLs."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return re.sub(r"\?[^\s\"']*", "", without_secrets(lines[0]))[:300]


def _entry(about: dict[str, Any]) -> Entry:
    return Entry(int(about.get("size") or 0), next((str(about[key]) for key in _VERSION_KEYS if key in about), ""))


DATA_VERSIONS = "PACELINE_DATA"  # of a rank's environment: versions of its data by URL, as JSON
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_USER = re.compile(r"//[^/@\s]*@")
_OF_ONE_PROCESS = ("memory",)
_WITHOUT_BUCKET = ("file", "local")


def is_url(what: object) -> TypeGuard[str]:
    """True for text that begins like `s3://`."""
    return isinstance(what, str) and _URL.match(what) is not None


def checked_url(text: str) -> str:
    """A URL that may be written into a record, without slashes at its end.

    Raises:
        StorageError: it carries a user, a password or a query, is not whole, or names a protocol that does not exist or
            that other processes cannot reach.
    """
    match = _URL.match(text)
    if match is None:
        raise StorageError(f"{text!r} is not a URL; write s3://bucket/name or file:///folder/name")
    protocol, rest = match[1].lower(), match[2].rstrip("/")
    shown = without_secrets(text)
    if "@" in rest.partition("/")[0]:
        raise StorageError(
            f"{shown}: the URL names a user, and URLs are written into records. Leave it out, and put "
            f"{credentials_of(protocol)} in place."
        )
    if "?" in rest or "#" in rest:
        raise StorageError(
            f"{shown.partition('?')[0]}: a URL with ? or # may hold a secret, and URLs are written into records. Name "
            f"the object alone, and put {credentials_of(protocol)} in place."
        )
    if not rest.isprintable() or "::" in rest or ".." in rest.split("/"):
        raise StorageError(f"{shown!r}: a URL here is printable, without :: and without .. in its path")
    if protocol in _OF_ONE_PROCESS:
        raise StorageError(f"{shown}: {protocol}:// is seen by one process alone, and ranks are several. Use file:///…")
    if not rest or (protocol in _WITHOUT_BUCKET) != rest.startswith("/"):
        whole = f"{protocol}:///folder/name" if protocol in _WITHOUT_BUCKET else f"{protocol}://bucket/name"
        raise StorageError(f"{shown} is not whole; write {whole}")
    _must_exist(protocol, shown)
    return f"{protocol}://{rest}"


def protocol_of(url: str) -> str:
    """The protocol of a checked URL, e.g. `s3`."""
    return url.partition("://")[0]


def local_path(url: str) -> Path | None:
    """The path of a `file://` URL; None for any other."""
    return Path(url.partition("://")[2]) if protocol_of(url) in _WITHOUT_BUCKET else None


def cache_name(url: str) -> str:
    """Name of a checked URL's folder in the cache; another S3 server's is another one."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    named = f"{url} {endpoint if protocol_of(url) in ('s3', 's3a') else ''}"
    return hashlib.sha256(named.encode()).hexdigest()[:20]


def without_secrets(text: str) -> str:
    """Text, such as a library's message, without the users and passwords of URLs in it."""
    return _USER.sub("//", text)


def credentials_of(protocol: str) -> str:
    """The places where credentials for a protocol are looked for, in words."""
    if protocol in ("s3", "s3a"):
        return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ~/.aws, or a role of this machine"
    if protocol in ("gs", "gcs"):
        return "GOOGLE_APPLICATION_CREDENTIALS, gcloud's own file, or a role of this machine"
    return f"what fsspec reads for {protocol} (~/.config/fsspec, FSSPEC_{protocol.upper()}_…)"


def _must_exist(protocol: str, shown: str) -> None:
    from fsspec import available_protocols

    known = available_protocols()
    if protocol not in known:
        raise StorageError(f'{shown}: no protocol "{protocol}". {nearest(protocol, known)}')
