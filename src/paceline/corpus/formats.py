"""All file formats, their selection by name or suffix, and decompression."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from paceline.corpus.images import IMAGES
from paceline.corpus.lines import JSONL, LINES, TEXT
from paceline.corpus.mds import MDS
from paceline.corpus.rows import Damaged, Format
from paceline.corpus.tables import ARROW, CSV, PARQUET
from paceline.corpus.tar import TAR
from paceline.errors import DataError
from paceline.extensions import optional_package
from paceline.text import listed, nearest

FORMATS: dict[str, Format] = {each.name: each for each in (JSONL, TEXT, LINES, CSV, PARQUET, ARROW, TAR, MDS, IMAGES)}


def format_named(name: str) -> Format:
    """Return the format with a given name.

    Raises:
        DataError: no format has this name.
    """
    if name not in FORMATS:
        raise DataError(
            "data.format_unknown",
            'there is no format "{name}". {hint}',
            name=name,
            hint=nearest(name, FORMATS),
        )
    return FORMATS[name]


def format_of(names: Iterable[str], source: str) -> Format:
    """Return the format that the suffixes of file names select. Names with unknown suffixes are ignored.

    Args:
        source: the folder or pattern that has these names, for errors.

    Raises:
        DataError: the suffixes select no format, or several formats.
    """
    of_suffix: dict[str, list[Format]] = {}
    for each in FORMATS.values():
        for suffix in each.suffixes:
            of_suffix.setdefault(suffix, []).append(each)
    found = Counter(suffix for name in names if (suffix := suffix_of(name)) in of_suffix)
    formats = {each.name: each for suffix in found for each in of_suffix[suffix]}
    if not formats:
        raise DataError(
            "data.format_unrecognized",
            "{source} has no file whose name ends with a known suffix. Name the format, and the files with a pattern: "
            "format: {formats}",
            source=source,
            formats=" | ".join(FORMATS),
        )
    if len(formats) > 1:
        raise DataError(
            "data.formats_mixed",
            "{source} has files that can be read as {formats} ({counts}). Choose one, e.g. format: {first}, or name "
            "the files with a pattern such as folder/*{suffix}",
            source=source,
            formats=listed(list(formats)),
            counts=", ".join(f"{number:,} {suffix}" for suffix, number in found.most_common()),
            first=next(iter(formats)),
            suffix=found.most_common(1)[0][0],
        )
    return next(iter(formats.values()))


def suffix_of(name: str) -> str:
    """Return a file name's suffix, ignoring a compression suffix: `.jsonl` for `a.JSONL.gz`."""
    lower = name.lower().rpartition("/")[2]
    return f".{plain_name(lower).rpartition('.')[2]}" if "." in lower else ""


def plain_name(name: str) -> str:
    """Return the name of a file after decompression: `a.jsonl` for `a.jsonl.gz`, `a.tar` for `a.tgz`."""
    suffix = _compression(name)
    return name if suffix is None else name[: -len(suffix)] + (".tar" if suffix == ".tgz" else "")


def is_compressed(name: str) -> bool:
    """Return True if a file name ends with a compression suffix."""
    return _compression(name) is not None


def decompress(path: Path, name: str, into: Path) -> None:
    """Decompress a file into a new file.

    Args:
        name: name of the file; its suffix selects the compression method.

    Raises:
        Damaged: the file is truncated, or was compressed with another method.
    """
    opened = _COMPRESSIONS[_compression(name) or ""]
    try:
        with opened(path) as file, open(into, "xb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
    except (EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise Damaged(str(path), None, f"decompression fails: {error}") from error
    except OSError as error:
        # For invalid content, Python and pyarrow raise OSError without an errno.
        if error.errno is not None:
            raise
        raise Damaged(str(path), None, f"decompression fails: {error}") from error


def _compression(name: str) -> str | None:
    suffix = f".{name.lower().rpartition('.')[2]}"
    return suffix if suffix in _COMPRESSIONS else None


def _open_zstandard(path: Path) -> Any:
    pa = optional_package("pyarrow", "pyarrow")
    return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")


_COMPRESSIONS: dict[str, Callable[[Path], IO[bytes] | Any]] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
    ".zstd": _open_zstandard,
}
