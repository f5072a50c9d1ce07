"""WebDataset tar files: consecutive members with the same key form a row.

The layout of rows and the decoded suffixes follow webdataset, so that its shards give the same rows here.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.corpus.rows import Damaged, Format, Offsets, OpenFile

_BLOCK = 512
_KEY_AND_SUFFIX = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_NO_DATA = re.compile(r"__[^/]*__(?:$|/)")
_MOST_NAME_BYTES = 1 << 20  # of a long name or an extended header


class TarRows:
    """Rows `{"__key__": key, "jpg": bytes, "cls": 3, …}` of a tar file, read with one system call each.

    Numbers, text, JSON and `.npy` arrays are decoded like in webdataset. Pickled members stay bytes, because unpickling
    runs code.
    """

    def __init__(self, path: Path, offsets: Offsets | None) -> None:
        assert offsets is not None
        self._file, self._offsets = OpenFile(path), offsets.data

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        first = self._offsets[row]
        content = self._file.read(first, self._offsets[row + 1], row)
        found: dict[str, Any] = {}
        try:
            for name, _, start, end in _members(lambda a, b: content[a:b], len(content)):
                parts = _key_and_suffix(name)
                if parts is None:
                    continue
                key, suffix = parts
                if found.setdefault("__key__", key) != key or suffix in found:
                    raise ValueError(f"the member {name!r} does not belong to the row")
                decode = _DECODERS.get(suffix.rpartition(".")[2])
                value = content[start:end]
                found[suffix] = value if decode is None else _decoded(decode, value, name)
        except ValueError as error:
            raise Damaged(self._file.path, row, str(error)) from error
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def row_offsets(path: Path) -> Offsets:
    """Return the position of each row's first header, and the end of the last row.

    Only the headers are read.
    """
    offsets: list[int] = []
    last_key, end, size = None, 0, path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        try:
            for name, header, _, end in _members(lambda a, b: os.pread(descriptor, b - a, a), size):
                if end > size:
                    raise ValueError(f"the file ends within the member {name!r}")
                parts = _key_and_suffix(name)
                if parts is not None and parts[0] != last_key:
                    offsets.append(header)
                    last_key = parts[0]
        except ValueError as error:
            raise Damaged(str(path), len(offsets), str(error)) from error
    return np.array([*offsets, end], np.uint64)


def _members(read: Callable[[int, int], bytes], size: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield each regular member: its name, first header, and start and end of its content.

    Directories, links and the project-wide headers of pax archives are skipped. Long names of GNU and pax archives are
    headers of their own in front of the member.

    Raises:
        ValueError: a header is invalid.
    """
    position, first, name, given_size = 0, 0, None, None
    while position < size:
        header = read(position, position + _BLOCK)
        kind = header[156:157]
        if len(header) < _BLOCK:
            raise ValueError("the file ends within a header")
        if not header[0] and not any(header):
            return  # the end of the archive
        start = position + _BLOCK
        length = _checked_size(header)
        if kind in b"Lx":
            text = read(start, start + min(length, _MOST_NAME_BYTES))
            if kind == b"L":
                name = text.rstrip(b"\0").decode("utf-8", "surrogateescape")
            else:
                about = _pax_records(text)
                name, given_size = about.get("path", name), about.get("size", given_size)
        elif kind in b"0\0" or kind == b"7":
            length = length if given_size is None else int(given_size)
            yield (name if name is not None else _name(header)), first, start, start + length
        elif kind == b"S":
            raise ValueError("the member is a sparse file, which is not supported")
        position = _padded(start + length)
        if kind not in b"LKx":
            first, name, given_size = position, None, None


def _checked_size(header: bytes) -> int:
    # Headers without this mark are from before 1988, or no headers.
    if header[257:262] != b"ustar" and sum(header) - sum(header[148:156]) + 8 * 32 != int(header[148:154] or b"0", 8):
        raise ValueError("a header of the tar file is invalid")
    if header[124] & 0x80:
        return int.from_bytes(header[125:136])
    return int(header[124:136].rstrip(b" \0") or b"0", 8)


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _pax_records(text: bytes) -> dict[str, str]:
    """Return the records `LENGTH KEY=VALUE` of an extended header."""
    found, position = {}, 0
    while position < len(text):
        length = int(text[position : position + 20].partition(b" ")[0])
        if length < len("5 a=\n"):
            raise ValueError("an extended header of the tar file is invalid")
        key, _, value = text[position : position + length - 1].partition(b" ")[2].partition(b"=")
        found[key.decode()] = value.decode("utf-8", "surrogateescape")
        position += length
    return found


def _padded(position: int) -> int:
    return -(-position // _BLOCK) * _BLOCK


def _key_and_suffix(name: str) -> tuple[str, str] | None:
    """Divide a member's name into key and suffix; None for members that are no data."""
    parts = _KEY_AND_SUFFIX.fullmatch(name)
    if parts is None or _NO_DATA.match(name):
        return None
    return parts[1], parts[2].lower()


def _decoded(decode: Callable[[bytes], Any], value: bytes, name: str) -> Any:
    try:
        return decode(value)
    except (ValueError, EOFError) as error:
        raise ValueError(f"the member {name!r} cannot be decoded: {error}") from error


def _array(value: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(value), allow_pickle=False)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), msgspec.json.decode),
    "npy": _array,
}

TAR = Format("tar", (".tar",), row_offsets, TarRows)
