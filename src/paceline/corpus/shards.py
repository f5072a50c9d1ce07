"""The rows of all files of a data set, by one global row number."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from paceline.corpus.host_files import HostFiles
from paceline.corpus.rows import Damaged, Rows, unreadable
from paceline.corpus.shard_files import ShardFiles, digest_of
from paceline.corpus.sources import Listing, Texts, list_files
from paceline.errors import DataError, StorageError
from paceline.storage.url import is_url
from paceline.text import nearest

_OPEN_SHARDS = 128  # files that a process keeps open, each with at most two descriptors
_REMOTE_THREADS = 64  # requests wait for the store, not for a core
_MOST_IMAGES = 100_000  # local images that are read for a digest
_IMAGE_EDGE_BYTES = 4 << 10  # bytes at each end of an image that its digest covers
_LEFT_OUT = -1  # number of rows of a file that could not be indexed


class Shard(NamedTuple):
    """A file of rows.

    Attributes:
        name: absolute path or URL.
        size: bytes of the file.
        version: string that changes with the content, such as an ETag.
        rows: number of rows.
        digest: SHA-256 in hex over the size and the first and last 64 KiB. For images, over the size and the first and
            last 4 KiB of a local file, or over the size and the version of a remote one; see `Corpus.digest`.
    """

    name: str
    size: int
    version: str
    rows: int
    digest: str


class Corpus:
    """The rows of a data set's files, numbered over all files.

    Files are sorted by name.

    Each version of a file is indexed once per host. An index holds the position of each row, or only the number of rows
    if the format stores the positions itself. A remote file is downloaded when one of its rows is read. Indexing remote
    JSON Lines, text, CSV, Arrow and tar files needs their content, so the first start downloads each of these files
    once. For remote Parquet and MDS files that are not compressed as a whole, the first start reads only the footer or
    header. Compressed, CSV and Parquet files are read from decompressed or converted copies in the cache.

    Only one thread may read rows; `fetch` and `is_local` may be called from any thread. Forked processes may use a
    corpus that their parent opened.

    Attributes:
        format: format of all files.
        shards: description of each file, created on access.
        left_out: name of each file that could not be indexed, and the reason. The next start tries to index the
            file again.
        starts: number of the first row of each file, and the number of all rows; int64, shape (shards + 1,).
        classes: names of the classes of an image folder; empty for other formats.
        digest: SHA-256 in hex over the number of rows and the digest of each file, in order, and over the classes of
            images. If an image cannot be read, or more than 100,000 images are local, only sizes and classes of images
            count. Modification times do not count, because they differ between copies.
    """

    # No `__dict__`, because loader processes copy the attributes of data sets, but must not copy descriptors.
    __slots__ = ("_digests", "_edges", "_files", "_open", "classes", "digest", "format", "left_out", "starts")

    @classmethod
    def open(
        cls,
        paths: Sequence[str],
        *,
        format: str | None = None,
        cache: HostFiles,
        on_bad_shard: Literal["stop", "skip"] = "stop",
        workers: int | None = None,
        classes: tuple[str, ...] = (),
        columns: Sequence[str] = (),
    ) -> Corpus:
        """List and index the files of a data set.

        Args:
            paths: files, folders, patterns and URLs; see `list_files`.
            format: name of the format; None to derive it from the suffixes of the files.
            cache: folder of indexes, downloads and converted files, which the processes of this host share.
            on_bad_shard: "skip" to leave out files that cannot be indexed; "stop" to raise an error.
            workers: number of threads that index files; by default the number of cores, but at least 64 for remote
                files.
            classes: classes of images whose positions become the labels; by default the classes that are found.
            columns: columns that converted files need, if all of them exist; by default all columns.

        Raises:
            DataError: the paths name no files, a file cannot be indexed and `on_bad_shard` is "stop", or there are no
                rows.
            StorageError: a store cannot be read.
        """
        listing = replace(list_files(paths, format), columns=tuple(sorted({*columns})))
        if classes and listing.labels is not None:
            listing = listing.with_classes(classes)
        left_out: list[tuple[str, str]] = []
        if listing.labels is not None:
            rows, digests = np.ones(len(listing.names), np.int64), _image_digests(listing, cache)
        else:
            rows, digests, reasons = _summary(listing, cache, workers)
            left_out = [(listing.names[shard], reason) for shard, reason in reasons]
            if left_out and on_bad_shard == "stop":
                raise DataError(
                    "data.shard_damaged",
                    "{shard}: {reason}. Repair or remove the file, or leave such files out with on_bad_shard: skip. "
                    "{count} of {total} files cannot be used.",
                    shard=left_out[0][0],
                    reason=left_out[0][1],
                    count=len(left_out),
                    total=len(rows),
                )
            if left_out:
                kept = np.flatnonzero(rows != _LEFT_OUT)
                listing, rows, digests = _selected(listing, kept), rows[kept], digests[kept]
        if not rows.sum():
            raise DataError(
                "data.no_rows",
                "{source} has no rows. Name files that are not empty.",
                source=", ".join(paths),
            )
        return cls(ShardFiles(listing, cache), rows, digests, left_out)

    def __init__(
        self,
        files: ShardFiles,
        rows: NDArray[np.int64],
        digests: NDArray[np.uint8] | None,
        left_out: list[tuple[str, str]],
    ) -> None:
        self._files, self._digests, self.left_out = files, digests, left_out
        self.format, self.classes = files.listing.format, files.listing.classes
        self.starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._edges = self.starts.data
        self.digest = _digest_of_all(files.listing, self.starts, digests)
        # A dict keeps the order of insertion; the first file is the least recently used one.
        self._open: OrderedDict[int, Rows] = OrderedDict()

    @property
    def shards(self) -> Sequence[Shard]:
        """Description of each file."""
        return _Shards(self._files.listing, self.starts, self._digests)

    def __len__(self) -> int:
        return int(self._edges[-1])

    def row(self, row: int) -> dict[str, Any]:
        """Read a row by its global number; a remote file is downloaded first.

        Raises:
            IndexError: there is no row with this number.
            Damaged: the file has changed since it was listed, or the row is invalid.
            StorageError: a remote file cannot be downloaded.
        """
        shard = self.shard_of(row)
        rows = self._open.get(shard)
        try:
            if rows is None:
                rows = self._opened(shard)
            else:
                self._open.move_to_end(shard)
            return rows[row - self._edges[shard]]
        except Damaged as error:
            raise Damaged(self._files.listing.names[shard], error.row, error.reason) from error
        except OSError as error:
            raise unreadable(self._files.listing.names[shard], error) from error

    def shard_of(self, row: int) -> int:
        """Return the number of the file that contains a row.

        Raises:
            IndexError: there is no row with this number.
        """
        if not 0 <= row < self._edges[-1]:
            raise IndexError(f"row {row} of {len(self)}")
        return bisect_right(self._edges, row) - 1

    def fetch(self, shard: int) -> None:
        """Download, decompress and convert a file now, unless its rows can be read already."""
        self._files.fetch(shard)

    @property
    def reads_in_place(self) -> bool:
        """True if no file has to be downloaded, decompressed or converted."""
        return all(map(self._files.is_in_place, range(len(self.shards))))

    def is_local(self, shard: int) -> bool:
        """Return True if a file can be read without a download or conversion."""
        return self._files.is_local(shard)

    def apart(self) -> Corpus:
        """Return a corpus that shares this index, but opens its own files."""
        other = object.__new__(Corpus)
        for name in Corpus.__slots__:
            setattr(other, name, getattr(self, name))
        other._open = OrderedDict()
        return other

    def close(self) -> None:
        """Close all files. Reading a row opens its file again."""
        while self._open:
            self._open.popitem()[1].close()

    def _opened(self, shard: int) -> Rows:
        rows = self._files.open(shard)
        self._open[shard] = rows
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return rows


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a row, whose text is made only for an error."""

    corpus: Corpus
    row: int

    def __str__(self) -> str:
        shard = self.corpus.shard_of(self.row)
        name = self.corpus.shards[shard].name
        first, end = self.corpus.starts[shard : shard + 2].tolist()
        return name if end - first == 1 else f"{name}, row {self.row - first}"


def value_of(row: Mapping[str, Any], column: str, where: Where) -> Any:
    """Return the value of a column.

    Raises:
        DataError: the row has no such column; the error names `where`.
    """
    if column not in row:
        raise DataError(
            "data.row_without_column",
            "{where}: this row has no column {name}. {hint}",
            where=where,
            name=column,
            hint=nearest(column, sorted(row)),
        )
    return row[column]


class _Shards(Sequence[Shard]):
    """Descriptions of files, stored in columns because a million objects would need a gigabyte."""

    def __init__(self, listing: Listing, starts: NDArray[np.int64], digests: NDArray[np.uint8] | None) -> None:
        self._listing, self._starts, self._digests = listing, starts, digests

    def __len__(self) -> int:
        return len(self._listing.names)

    @overload
    def __getitem__(self, nth: int) -> Shard: ...
    @overload
    def __getitem__(self, nth: slice) -> list[Shard]: ...
    def __getitem__(self, nth: int | slice) -> Shard | list[Shard]:
        if isinstance(nth, slice):
            return [self[each] for each in range(*nth.indices(len(self)))]
        nth = range(len(self))[nth]
        size, rows = int(self._listing.sizes[nth]), int(self._starts[nth + 1] - self._starts[nth])
        digest = hashlib.sha256(f"{size} ".encode()).digest() if self._digests is None else self._digests[nth].tobytes()
        return Shard(self._listing.names[nth], size, self._listing.versions[nth], rows, digest.hex())


def _digest_of_all(listing: Listing, starts: NDArray[np.int64], digests: NDArray[np.uint8] | None) -> str:
    whole = hashlib.sha256(starts.tobytes())
    if digests is not None:
        whole.update(digests.tobytes())
    if listing.labels is not None:
        whole.update(listing.sizes.tobytes() + listing.labels.tobytes() + "\0".join(listing.classes).encode())
    return whole.hexdigest()


def _selected(listing: Listing, kept: NDArray[np.int64]) -> Listing:
    return replace(
        listing,
        names=Texts(listing.names[n] for n in kept),
        versions=Texts(listing.versions[n] for n in kept),
        sizes=listing.sizes[kept],
        rows=listing.rows[kept],
    )


def _image_digests(listing: Listing, cache: HostFiles) -> NDArray[np.uint8] | None:
    """Return the digests of images, shape (images, 32).

    Returns None if too many images are local, or if one cannot be read.
    """
    if sum(not is_url(name) for name in listing.names) > _MOST_IMAGES:
        return None

    def digest(name: str, size: int, version: str) -> bytes:
        if is_url(name):
            return hashlib.sha256(f"{size} {version}".encode()).digest()
        try:
            with open(name, "rb", buffering=0) as file:
                return digest_of(file, size, _IMAGE_EDGE_BYTES)
        except OSError as error:
            raise unreadable(name, error) from error

    def make(into: Path) -> None:
        with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
            found = pool.map(digest, listing.names, listing.sizes.tolist(), listing.versions)
            into.write_bytes(b"".join(found))

    key = hashlib.sha256(listing.names.packed + listing.versions.packed + listing.sizes.tobytes()).hexdigest()
    try:
        found = cache.opened(f"images 1 {key}", make, lambda file: np.fromfile(file, np.uint8), keep=True)
    except Damaged:  # training reports or replaces the image
        return None
    return found.reshape(-1, 32)


def _summary(
    listing: Listing, cache: HostFiles, workers: int | None
) -> tuple[NDArray[np.int64], NDArray[np.uint8], list[tuple[int, str]]]:
    """Index all files, or read the summary of an earlier start.

    Returns:
        Number of rows of each file (-1 if it is left out), digests of shape (files, 32), and number and reason of each
        file that is left out.
    """
    whole = hashlib.sha256(listing.format.name.encode())
    for column in (listing.names, listing.versions):
        whole.update(column.packed)
    whole.update(listing.sizes.tobytes() + listing.rows.tobytes())
    try:
        return cache.opened(
            f"summary 1 {whole.hexdigest()}", lambda into: _summarize(listing, cache, workers, into), _loaded, keep=True
        )
    except _LeftOut as error:
        return error.rows, error.digests, error.reasons


class _LeftOut(Exception):
    """The summary of a listing of which files are left out.

    It is not kept, because the reason may pass: a disk that fails, or missing permissions. The next start indexes these
    files again.
    """

    def __init__(self, rows: NDArray[np.int64], digests: NDArray[np.uint8], reasons: list[tuple[int, str]]) -> None:
        super().__init__(reasons)
        self.rows, self.digests, self.reasons = rows, digests, reasons


def _summarize(listing: Listing, cache: HostFiles, workers: int | None, into: Path) -> None:
    files, shards = ShardFiles(listing, cache), len(listing.names)
    rows, digests = np.full(shards, _LEFT_OUT, np.int64), np.zeros((shards, 32), np.uint8)

    def index(shard: int) -> str | None:
        try:
            found = files.index(shard)
        except Damaged as error:
            return error.reason if error.row is None else f"row {error.row}: {error.reason}"
        except StorageError as error:
            if not error.absent:
                raise
            return str(error)
        rows[shard], digests[shard] = found.rows, found.digest
        return None

    threads = workers or max(len(os.sched_getaffinity(0)), _REMOTE_THREADS * is_url(listing.names[0]))
    pool = ThreadPoolExecutor(threads)
    try:
        reasons = [(shard, reason) for shard, reason in enumerate(pool.map(index, range(shards))) if reason is not None]
    finally:
        pool.shutdown(cancel_futures=True)
    if reasons:
        raise _LeftOut(rows, digests, reasons)
    with open(into, "wb") as file:
        np.savez(file, rows=rows, digests=digests)


def _loaded(path: Path) -> tuple[NDArray[np.int64], NDArray[np.uint8], list[tuple[int, str]]]:
    with np.load(path) as found:
        return found["rows"], found["digests"], []
