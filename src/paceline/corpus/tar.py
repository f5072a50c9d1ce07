"""WebDataset tar files: consecutive members with the same key form a row.

The grouping into rows and the decoded suffixes follow webdataset, so a shard gives the same rows as there.
"""

from __future__ import annotations

import io
import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.corpus.rows import Damaged, Format, Offsets, RowsByOffset

_BLOCK = 512
_NO_DATA = re.compile(r"__[^/]*__(?:$|/)")
_KIND = 156  # position in a header
_REGULAR, _LONG_NAME, _IN_FRONT = frozenset(b"0\07"), frozenset(b"Lx"), frozenset(b"LKx")
_PAX, _SPARSE = ord("x"), ord("S")
_MOST_NAME_BYTES = 1 << 20  # of a long name or an extended header


class TarRows(RowsByOffset):
    """Rows `{"__key__": key, "jpg": bytes, "cls": 3, …}` of a tar file, one system call per row.

    Numbers, text, JSON and `.npy` arrays are decoded as in webdataset. Pickled members stay bytes, because unpickling
    would run code from the file.
    """

    def __getitem__(self, row: int) -> dict[str, Any]:
        content = self._bytes(row)
        found: dict[str, Any] = {}
        try:
            for name, _, start, end in _members(content):
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


def row_offsets(path: Path) -> Offsets:
    """Return the position of each row's first header, and the end of the last row.

    Only the headers are read.
    """
    if not (size := path.stat().st_size):
        raise Damaged(str(path), None, "the file is empty")
    offsets: list[int] = []
    last_key, end = None, 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        content.madvise(mmap.MADV_RANDOM)  # only headers are read
        try:
            for name, header, _, end in _members(content):
                if end > size:
                    raise ValueError(f"the file ends within the member {name!r}")
                parts = _key_and_suffix(name)
                if parts is not None and parts[0] != last_key:
                    offsets.append(header)
                    last_key = parts[0]
        except ValueError as error:
            raise Damaged(str(path), len(offsets), str(error)) from error
    return np.array([*offsets, end], np.uint64)


def _members(content: bytes | mmap.mmap) -> Iterator[tuple[str, int, int, int]]:
    """Yield each regular member: its name, first header, and start and end of its content.

    Directories, links and the global headers of pax archives are skipped. GNU and pax archives store a long name in an
    extra header in front of the member.

    Raises:
        ValueError: a header is invalid.
    """
    position, first, long_name, given_size, size = 0, 0, None, None, len(content)
    while position < size:
        start = position + _BLOCK
        header = content[position:start]
        if len(header) < _BLOCK:
            raise ValueError("the file ends within a header")
        kind = header[_KIND]
        length = _content_size(header)
        if length is None:
            return
        if kind in _REGULAR:
            length = length if given_size is None else given_size
            yield (_name(header) if long_name is None else long_name), first, start, start + length
        elif kind in _LONG_NAME:
            text = content[start : start + min(length, _MOST_NAME_BYTES)]
            if kind == _PAX:
                long_name, given_size = _pax_name_and_size(text, long_name)
            else:
                long_name = text.rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == _SPARSE:
            raise ValueError("the member is a sparse file, which is not supported")
        position = -(-(start + length) // _BLOCK) * _BLOCK
        if kind not in _IN_FRONT:
            first, long_name, given_size = position, None, None


def _content_size(header: bytes) -> int | None:
    """Return the size of a header's member; None for the end of the archive."""
    # Headers from before 1988 lack this magic string, so their checksum is verified instead.
    if header[257:262] != b"ustar":
        if not any(header):
            return None
        if sum(header) - sum(header[148:156]) + 8 * ord(" ") != _octal(header[148:156]):
            raise ValueError("a header of the tar file is invalid")
    if header[124] & 0x80:
        return int.from_bytes(header[125:136])
    return _octal(header[124:136])


def _octal(digits: bytes) -> int:
    return int(digits.rstrip(b" \0") or b"0", 8)


def _name(header: bytes) -> str:
    end = header.find(b"\0", 0, 100)
    name = header[: 100 if end < 0 else end]
    if header[345] and header[262] == 0:  # GNU headers hold other fields in place of the prefix
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return str(name, "utf-8", "surrogateescape")


def _pax_name_and_size(text: bytes, name: str | None) -> tuple[str | None, int | None]:
    """Return the name and the size in the records `LENGTH KEY=VALUE` of an extended header."""
    size, position = None, 0
    while position < len(text):
        length = int(text[position : position + 20].partition(b" ")[0])
        if length < len("5 a=\n"):
            raise ValueError("an extended header of the tar file is invalid")
        key, _, value = text[position : position + length - 1].partition(b" ")[2].partition(b"=")
        if key == b"path":
            name = str(value, "utf-8", "surrogateescape")
        elif key == b"size":
            size = int(value)
        position += length
    return name, size


def _key_and_suffix(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and suffix; None for members that are not data."""
    first = name.rfind("/") + 1
    dot = name.find(".", first)
    if dot <= first or (name[0] == "_" and _NO_DATA.match(name)):
        return None
    return name[:dot], name[dot + 1 :].lower()


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
