"""Readable local copies of a data set's files, and their indexes."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from paceline.corpus.formats import decompress, is_compressed
from paceline.corpus.host_files import HostFiles
from paceline.corpus.rows import Damaged, Offsets, Rows, unreadable
from paceline.corpus.sources import Listing, bucket_and_key
from paceline.errors import StorageError
from paceline.storage.store import Entry, Store
from paceline.storage.url import is_url

_LAYOUT = 1  # changes with the content of cached files
_EDGE_BYTES = 64 << 10  # bytes at each end of a file that its digest covers
_HEAD_WORDS = 5  # uint64 words in front of the offsets of an index: the number of rows (1) and the digest (4)
_MAPPED_FROM_BYTES = 1 << 16  # smaller indexes are read, because each mapping keeps a descriptor
_Opened = TypeVar("_Opened")


class Index:
    """Number of rows, digest and row offsets of a file.

    Attributes:
        rows: number of rows.
        digest: SHA-256 over the size and the first and last 64 KiB of the file; uint8, shape (32,).
        offsets: byte offsets that `Format.index` returned; None if it returned a number.
    """

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self.rows, self.digest = int(words[0]), words[1:_HEAD_WORDS].view(np.uint8)
        self.offsets = words[_HEAD_WORDS:] if len(words) > _HEAD_WORDS else None


class ShardFiles:
    """The files of a listing, by number. All methods are thread-safe, and may be called in forked processes.

    Files on a local disk are read in place if their format allows it. All other files are read from copies in the
    cache, which are downloaded, decompressed and converted as needed.
    """

    # No `__dict__`, because loader processes copy the attributes of data sets.
    __slots__ = ("_cache", "_stores", "listing")

    def __init__(self, listing: Listing, cache: HostFiles) -> None:
        self.listing, self._cache = listing, cache
        # by process, because a store's connections do not survive a fork
        self._stores: dict[tuple[int, str], Store] = {}

    def open(self, shard: int) -> Rows:
        """Open a file for reading, after making its copy if one is needed.

        Raises:
            Damaged: the file has changed since it was listed, or cannot be read.
            StorageError: the file cannot be downloaded.
        """
        listing = self.listing
        offsets: Offsets | None
        if listing.labels is not None:
            offsets, expected = listing.labels[shard : shard + 1].astype(np.uint64), 1
        else:
            index = self.index(shard)
            offsets, expected = index.offsets, index.rows
        rows = self._read(shard, lambda path: listing.format.open(path, offsets))
        if len(rows) != expected:
            found = len(rows)
            rows.close()
            raise Damaged(listing.names[shard], None, f"the file has {found} rows, but its index has {expected}")
        return rows

    def fetch(self, shard: int) -> None:
        """Make the copy of a file, if it needs one and has none."""
        if not self.is_in_place(shard):
            with self._naming(shard):
                self._cache.path(self._key("copy", shard), partial(self._copy, shard))

    def is_local(self, shard: int) -> bool:
        """Return True if a file can be opened without a download or conversion."""
        return self.is_in_place(shard) or self._cache.has(self._key("copy", shard))

    def index(self, shard: int) -> Index:
        """Return the index of a file, from the cache if possible.

        Raises:
            Damaged: the file cannot be read, its content is invalid, or it has changed since it was listed.
            StorageError: the file cannot be downloaded.
        """
        make = partial(self._make_index, shard)
        return Index(self._cache.opened(self._key("index", shard), make, _words, keep=True))

    def _make_index(self, shard: int, into: Path) -> None:
        listing = self.listing
        count, rows = listing.format.count, int(listing.rows[shard])
        offsets: Any = []
        with self._naming(shard), self._opened_source(shard) as file:
            if rows < 0 and count is not None and not is_compressed(listing.names[shard]):
                rows = count(file)
            elif rows < 0:
                found = self._read(shard, listing.format.index)
                rows, offsets = (found, []) if isinstance(found, int) else (len(found) - 1, found)
            digest = np.frombuffer(digest_of(file, int(listing.sizes[shard])), np.uint64)
        np.concatenate([np.array([rows], np.uint64), digest, np.asarray(offsets, np.uint64)]).tofile(into)

    def _read(self, shard: int, read: Callable[[Path], _Opened]) -> _Opened:
        """Return `read(path)` for a readable copy of a file."""
        with self._naming(shard):
            if self.is_in_place(shard):
                path = Path(self.listing.names[shard])
                found = read(path)
                self._check_unchanged(shard, path)
                return found
            return self._cache.opened(self._key("copy", shard), partial(self._copy, shard), read)

    def _copy(self, shard: int, into: Path) -> None:
        """Write the readable copy of a file."""
        listing, name = self.listing, self.listing.names[shard]
        prepare, compressed = listing.format.prepare, is_compressed(name)
        source = Path(name)
        if is_url(name):
            source = into.with_name("source") if compressed or prepare else into
            self._download(shard, source)
        plain = source
        if compressed:
            plain = into.with_name("plain") if prepare else into
            decompress(source, name, plain)
        if prepare is not None:
            prepare(plain, into, listing.columns)
        if not is_url(name):
            self._check_unchanged(shard, source)

    def _download(self, shard: int, into: Path) -> None:
        listing = self.listing
        store, key = self._store_and_key(shard)
        try:
            store.fetch(key, into, expected=Entry(int(listing.sizes[shard]), listing.versions[shard]))
        except StorageError as error:
            if not error.absent and error.code != "storage.object_changed":
                raise
            change = "was removed" if error.absent else "was replaced"
            raise Damaged(listing.names[shard], None, f"the object {change} after it was listed") from error

    def _check_unchanged(self, shard: int, path: Path) -> None:
        about = path.stat()
        if (about.st_size, str(about.st_mtime_ns)) != (self.listing.sizes[shard], self.listing.versions[shard]):
            raise Damaged(str(path), None, "the size or modification time of the file has changed since the start")

    def is_in_place(self, shard: int) -> bool:
        """Return True if a file is read without a copy in the cache."""
        name = self.listing.names[shard]
        return self.listing.format.prepare is None and not is_url(name) and not is_compressed(name)

    def _key(self, kind: str, shard: int) -> str:
        listing = self.listing
        about = (listing.sizes[shard], listing.rows[shard], listing.versions[shard], listing.names[shard])
        columns = listing.columns if kind == "copy" and listing.format.prepare is not None else ()
        return " ".join(map(str, (kind, _LAYOUT, listing.format.name, *about, *map(repr, columns))))

    @contextmanager
    def _naming(self, shard: int) -> Iterator[None]:
        """Name the original file in errors, and convert OSError as `unreadable` does."""
        try:
            yield
        except Damaged as error:
            raise Damaged(self.listing.names[shard], error.row, error.reason) from error
        except OSError as error:
            raise unreadable(self.listing.names[shard], error) from error

    def _opened_source(self, shard: int) -> IO[bytes]:
        name = self.listing.names[shard]
        if not is_url(name):
            return open(name, "rb")
        store, key = self._store_and_key(shard)
        parts = _Parts(lambda start, end: store.part(key, start, end), int(self.listing.sizes[shard]), name)
        return io.BufferedReader(parts, _EDGE_BYTES)

    def _store_and_key(self, shard: int) -> tuple[Store, str]:
        """Return this process's store for a remote file, and the file's key there."""
        bucket, key = bucket_and_key(self.listing.names[shard])
        of_process = os.getpid(), bucket
        # No lock, because a thread could hold it while the process forks. Opening a second store is harmless.
        return self._stores.get(of_process) or self._stores.setdefault(of_process, Store(bucket)), key


class _Parts(io.RawIOBase):
    """A seekable remote file that reads byte ranges on demand.

    The first and the last 64 KiB are each read at once and kept, because an index needs little else.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, name: str) -> None:
        super().__init__()
        self._read, self._size, self._position, self.name = read, size, 0, name
        is_small = size <= 2 * _EDGE_BYTES
        self._ends = [(0, size)] if is_small else [(0, _EDGE_BYTES), (size - _EDGE_BYTES, size)]
        self._kept: dict[tuple[int, int], bytes] = {}

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position of the next read."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer; return their number."""
        view = memoryview(buffer).cast("B")
        start, end = self._position, min(self._position + len(view), self._size)
        if end <= start:
            return 0
        bounds = next(((first, last) for first, last in self._ends if first <= start < last), None)
        if bounds is None:
            found = self._read(start, min(end, self._ends[-1][0]))
        else:
            kept = self._kept.get(bounds) or self._kept.setdefault(bounds, self._read(*bounds))
            found = kept[start - bounds[0] : end - bounds[0]]
        view[: len(found)] = found
        self._position += len(found)
        return len(found)


def digest_of(file: IO[bytes], size: int, edge: int = _EDGE_BYTES) -> bytes:
    """Return the SHA-256 over a file's size and its first and last `edge` bytes."""
    digest = hashlib.sha256(f"{size} ".encode())
    file.seek(0)
    digest.update(file.read(edge))
    file.seek(max(edge, size - edge))
    digest.update(file.read(edge))
    return digest.digest()


def _words(path: Path) -> NDArray[np.uint64]:
    if path.stat().st_size <= _MAPPED_FROM_BYTES:
        return np.fromfile(path, np.uint64)
    # Converted to a plain array, because reading elements of the class `memmap` is slow.
    return cast("NDArray[np.uint64]", np.asarray(np.memmap(path, np.uint64, mode="r")))
