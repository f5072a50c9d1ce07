"""Listing of a data set's files: files, folders, patterns and URLs become one sorted list."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, overload

import numpy as np
from fsspec.utils import glob_translate
from numpy.typing import NDArray

from paceline.corpus.formats import format_named, format_of, suffix_of
from paceline.corpus.rows import Format
from paceline.errors import DataError
from paceline.storage.store import Entry, Store
from paceline.storage.url import checked_url, is_url, local_path

_DESCRIPTION_BYTES = 64 << 20  # largest state.json or index.json
_NOT_DATA = {"__pycache__", "site-packages", "dist-packages"}
_REQUESTS = 16  # concurrent requests for the sizes of remote files
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_WILDCARD = re.compile(r"[*?[]")


class Texts(Sequence[str]):
    """Sequence of strings that are stored in one block of memory.

    This saves the 50 to 60 bytes of overhead of each Python string.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        parts = [os.fsencode(text) for text in texts]
        self._ends = np.cumsum([0, *map(len, parts)])
        self._bytes = b"".join(parts)

    @property
    def packed(self) -> bytes:
        """Bytes that identify this sequence of strings, for hashing."""
        return self._ends.tobytes() + self._bytes

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, nth: int) -> str: ...
    @overload
    def __getitem__(self, nth: slice) -> list[str]: ...
    def __getitem__(self, nth: int | slice) -> str | list[str]:
        if isinstance(nth, slice):
            return [self[each] for each in range(*nth.indices(len(self)))]
        return os.fsdecode(self._bytes[self._ends[nth] : self._ends[nth + 1]])


@dataclass(frozen=True)
class Listing:
    """The files of a data set, sorted by name.

    Attributes:
        names: absolute paths and URLs.
        sizes: bytes of each file.
        versions: string per file that changes with the content; for local files, the modification time in nanoseconds.
        rows: number of rows of each file whose folder's description states it; -1 for other files.
        labels: index in `classes` of the class of each image; None for other formats.
        classes: sorted names of the classes of an image folder; empty for other formats.
        columns: columns that converted copies need; empty for all.
    """

    format: Format
    names: Texts
    sizes: NDArray[np.int64]
    versions: Texts
    rows: NDArray[np.int64]
    labels: NDArray[np.int32] | None = None
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def with_classes(self, classes: tuple[str, ...]) -> Listing:
        """Return the listing with labels that are positions in other `classes`.

        Raises:
            DataError: the class of an image is not in `classes`.
        """
        assert self.labels is not None
        if unknown := [name for name in self.classes if name not in classes]:
            first = self.names[int(np.argmax(self.labels == self.classes.index(unknown[0])))]
            raise DataError(
                "data.class_unknown",
                "{folder}: class {name!r} is not among the training classes: {classes}",
                folder=os.path.dirname(first),
                name=unknown[0],
                classes=list(classes),
            )
        numbers = np.array([classes.index(name) for name in self.classes], np.int32)
        return replace(self, labels=numbers[self.labels], classes=classes)


def list_files(paths: Sequence[str], format_name: str | None) -> Listing:
    """List the files of a data set. A file that several paths name is listed once.

    Args:
        paths: files, folders, patterns with `*`, `**` and ranges such as `{000..127}`, and URLs of these. A folder
            contributes all files below it that are not hidden and have a suffix of the format. A folder that
            `datasets.save_to_disk` or MosaicML Streaming wrote contributes the files that its description names.
        format_name: name of the format; None to derive it from the suffixes.

    Raises:
        DataError: a path does not exist or has no matching file, or no format fits all files.
        StorageError: a URL cannot be listed.
    """
    given = None if format_name is None else format_named(format_name)
    if not paths:
        raise DataError("data.no_source", "the data has no path. Name at least one file, folder or URL.")
    found, urls = _Found(), []
    for path in chain.from_iterable(map(_without_ranges, paths)):
        if not is_url(path):
            _find_local(os.path.abspath(path), given, found)
        elif local := local_path(url := checked_url(path)):
            _find_local(str(local), given, found)
        else:
            urls.append(url)
    if urls:
        _find_remote(urls, given, found)
    source = ", ".join(paths)
    chosen = given or format_of([*found.chosen, *found.candidates], source)
    names = sorted({*found.chosen, *(name for name in found.candidates if suffix_of(name) in chosen.suffixes)})
    if given is None and (unknown := [name for name in found.chosen if suffix_of(name) not in chosen.suffixes]):
        raise DataError(
            "data.suffix_unknown",
            "{file}: the format of this file cannot be derived from its suffix. Name the format, e.g. format: jsonl",
            file=unknown[0],
        )
    if not names:
        raise DataError(
            "data.folder_without_files",
            "{source} has no {suffixes} file. Name the files with a pattern such as folder/*.data",
            source=source,
            suffixes=" or ".join(chosen.suffixes),
        )
    sizes = np.empty(len(names), np.int64)

    def versions() -> Iterator[str]:
        for n, name in enumerate(names):
            about = found.remote.get(name) or _about(name)
            sizes[n] = about.size
            yield about.version

    labels, classes = _labels(names, found.folders) if chosen.name == "images" else (None, ())
    return Listing(
        chosen,
        Texts(names),
        sizes,
        Texts(versions()),
        np.array([found.rows.get(name, -1) for name in names], np.int64),
        labels,
        classes,
    )


def bucket_and_key(url: str) -> tuple[str, str]:
    """Split a URL into its bucket's or server's URL and the object's key."""
    protocol, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{protocol}://{bucket}", key


def _without_ranges(path: str) -> Iterator[str]:
    """Expand the ranges of a path: `a-{08..10}.tar` yields `a-08.tar`, `a-09.tar` and `a-10.tar`."""
    found = _RANGE.search(path)
    if found is None or os.path.exists(path):
        yield path
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        yield from _without_ranges(f"{path[: found.start()]}{number:0{len(first)}}{path[found.end() :]}")


@dataclass
class _Found:
    """Files that paths name. Those in `candidates` count only if their suffix belongs to the format."""

    chosen: list[str] = field(default_factory=list)
    candidates: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    remote: dict[str, Entry] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)


def _find_remote(urls: list[str], given: Format | None, found: _Found) -> None:
    """Add the files of URLs."""
    stores = {bucket: Store(bucket) for bucket in {bucket_and_key(url)[0] for url in urls}}

    def about(url: str) -> Entry | None:
        bucket, key = bucket_and_key(url)
        return None if _WILDCARD.search(url) else stores[bucket].about(key)

    with ThreadPoolExecutor(_REQUESTS) as pool:
        abouts = list(pool.map(about, urls))
    hidden = re.compile(r"(^|/)\.").search
    for url, entry in zip(urls, abouts, strict=True):
        if entry is not None:
            found.remote[url] = entry
            found.chosen.append(url)
            continue
        is_pattern = _WILDCARD.search(url) is not None
        folder = _WILDCARD.split(url)[0].rpartition("/")[0] if is_pattern else url
        bucket, key = bucket_and_key(folder)
        store = stores[bucket]
        listed = {f"{bucket}/{name}": entry for name, entry in store.list(key).items()}
        entries = {name: entry for name, entry in listed.items() if not hidden(name[len(folder) :])}
        found.remote |= entries
        if is_pattern:
            matches = re.compile(glob_translate(url)).match
            _add_matches(url, [name for name in entries if matches(name)], given, found)
        elif entries:
            _add_folder(url, [*entries], given, found, partial(_read_remote, store, key))
        else:
            _raise_missing(url)


def _read_remote(store: Store, folder: str, name: str) -> bytes | None:
    return store.read(f"{folder}/{name}", _DESCRIPTION_BYTES)


def _find_local(path: str, given: Format | None, found: _Found) -> None:
    if os.path.isdir(path):
        _add_folder(path, _files_below(path), given, found, lambda name: _read(os.path.join(path, name)))
    elif os.path.exists(path):
        found.chosen.append(path)
    elif _WILDCARD.search(path):
        files = [file for file in glob.iglob(path, recursive=True) if os.path.isfile(file)]
        _add_matches(path, files, given, found)
    else:
        _raise_missing(path)


def _raise_missing(path: str) -> None:
    raise DataError("data.source_missing", "{path} does not exist. Check the path.", path=path)


def _add_matches(pattern: str, names: list[str], given: Format | None, found: _Found) -> None:
    if not names:
        raise DataError(
            "data.pattern_unmatched",
            "no file matches {pattern}. Check the pattern: * matches within one folder, and ** any number of folders.",
            pattern=pattern,
        )
    (found.candidates if given is None else found.chosen).extend(names)


def _files_below(folder: str) -> list[str]:
    names = []
    for place, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if name not in _NOT_DATA and not name.startswith(".")]
        names += [os.path.join(place, name) for name in files if not name.startswith(".")]
    return names


def _raise(error: OSError) -> None:
    raise DataError(
        "data.unreadable",
        "{place}: {reason}. Expected: {expected}",
        place=error.filename,
        reason=error.strerror or error,
        expected="a folder of files that can be read",
    ) from error


def _add_folder(path: str, names: list[str], given: Format | None, found: _Found, read: Any) -> None:
    """Add the files of a folder, or the files that its description names."""
    found.folders.append(path)
    kind = None if given is None else given.name
    described = {os.path.basename(name) for name in names if os.path.dirname(name) == path}
    if kind in (None, "arrow") and "dataset_dict.json" in described:
        raise DataError(
            "data.split_unnamed",
            "{folder} has several splits ({splits}). Name the folder of one split: {folder}/{first}",
            folder=path,
            splits=(splits := _json(path, "dataset_dict.json", read).get("splits", ["train"])),
            first=splits[0],
        )
    if kind in (None, "arrow") and "state.json" in described:
        state = _json(path, "state.json", read)
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise DataError(
                "data.rows_selected",
                "{folder} stores a selection of rows apart from its files, which is not supported. Write only the "
                "selected rows: dataset.flatten_indices().save_to_disk(folder)",
                folder=path,
            )
        _add_described(path, [(each["filename"], -1) for each in state.get("_data_files", [])], names, found)
    elif kind in (None, "mds") and "index.json" in described and "shards" in (about := _json(path, "index.json", read)):
        shards = [_mds_shard(shard, set(names), path) for shard in about["shards"]]
        _add_described(path, shards, names, found)
    else:
        found.candidates += names


def _json(folder: str, name: str, read: Any) -> dict[str, Any]:
    try:
        content = json.loads(read(name))
        if isinstance(content, dict):
            return content
        reason: object = "not an object"
    except (ValueError, TypeError) as error:
        reason = error
    raise DataError(
        "data.description_invalid", "{file} is invalid: {reason}", file=f"{folder}/{name}", reason=reason
    ) from None


def _mds_shard(shard: dict[str, Any], names: set[str], folder: str) -> tuple[str, int]:
    """Return the name and the number of rows of a shard. An uncompressed copy is preferred."""
    raw, compressed = (shard.get(key) or {} for key in ("raw_data", "zip_data"))
    base = raw.get("basename", "")
    if compressed and f"{folder}/{base}" not in names:
        base = compressed.get("basename", "")
    return base, int(shard.get("samples", -1))


def _add_described(folder: str, shards: list[tuple[str, int]], names: list[str], found: _Found) -> None:
    present = set(names)
    for base, rows in shards:
        name = f"{folder}/{base}"
        if name not in present:
            raise DataError(
                "data.shard_missing",
                "{folder} lacks the file {name}, which its description names. Copy the whole folder again.",
                folder=folder,
                name=base,
            )
        found.chosen.append(name)
        if rows >= 0:
            found.rows[name] = rows


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_DESCRIPTION_BYTES)


def _about(name: str) -> Entry:
    try:
        about = os.stat(name)
    except OSError as error:
        raise DataError(
            "data.unreadable",
            "{place}: {reason}. Expected: {expected}",
            place=name,
            reason=error.strerror or error,
            expected="a file that can be read",
        ) from error
    return Entry(about.st_size, str(about.st_mtime_ns))


def _labels(names: list[str], folders: list[str]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Return the class of each image, and all classes.

    The class is the name of the first folder between a given folder and the image.
    """
    roots = sorted((f"{folder}/" for folder in folders), key=len, reverse=True)
    found = []
    for name in names:
        root = next((root for root in roots if name.startswith(root)), name)
        folder, _, rest = name[len(root) :].partition("/")
        if not rest:
            raise DataError(
                "data.image_without_class",
                "{file} is not in the folder of a class. Name a folder that has one folder of images per class.",
                file=name,
            )
        found.append(folder)
    classes = tuple(sorted(set(found)))
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[folder] for folder in found], np.int32), classes
