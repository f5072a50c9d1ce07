"""Shards of MosaicML Streaming (`.mds`).

The header of a shard holds the number of rows, their positions and the columns, so `index.json` is only needed to list
the shards. The reader of mosaicml-streaming is not used, because it opens the file for each row, imports torch and
torchvision, and installs the clients of six clouds.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from paceline.corpus.rows import Damaged, Format, Offsets, OpenFile
from paceline.extensions import optional_package

_WORD = 4  # the header's numbers are uint32
_MOST_HEADER_BYTES = 1 << 30
_Decode = Callable[[bytes], Any]


class MdsRows:
    """Rows of an MDS shard. Compressed images (jpeg, png) stay bytes; raw images (pil) become uint8 arrays."""

    def __init__(self, path: Path, offsets: Offsets | None) -> None:
        self._file = OpenFile(path)
        try:
            self._offsets, columns = _header(self._file)
            self._columns = [(name, size, _decoder(encoding)) for name, encoding, size in columns]
        except ValueError as error:
            raise Damaged(str(path), None, str(error)) from error

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        content = self._file.read(self._offsets[row], self._offsets[row + 1], row)
        lacking = sum(size is None for _, size, _ in self._columns)
        sizes = iter(np.frombuffer(content, "<u4", min(lacking, len(content) // _WORD)).tolist())
        start, found = lacking * _WORD, {}
        try:
            for name, size, decode in self._columns:
                end = start + (next(sizes) if size is None else size)
                found[name] = decode(content[start:end])
                start = end
        except (ValueError, ArithmeticError, LookupError, StopIteration) as error:
            raise Damaged(self._file.path, row, f"the column {name!r} cannot be decoded ({error})") from error
        if start != len(content):
            raise Damaged(self._file.path, row, f"the row has {len(content)} bytes, but its columns have {start}")
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _header(file: OpenFile) -> tuple[memoryview, list[tuple[str, str, int | None]]]:
    """Return the positions of all rows, and each column's name, encoding and fixed size."""
    rows = _number_of_rows(file.read(0, min(_WORD, file.size)))
    end = _WORD * (rows + 2)
    if end > file.size:
        raise ValueError("the file ends within its header")
    offsets = np.frombuffer(file.read(_WORD, end), "<u4")
    if not end <= offsets[0] < _MOST_HEADER_BYTES or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise ValueError("the positions of the rows are invalid")
    if offsets[-1] != file.size:
        raise ValueError(f"the file has {file.size:,} bytes, but its header says {offsets[-1]:,}")
    about = msgspec.json.decode(file.read(end, int(offsets[0])), type=_Columns)
    return offsets.data, list(zip(about.column_names, about.column_encodings, about.column_sizes, strict=True))


class _Columns(msgspec.Struct):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]


def _number_of_rows(start: bytes) -> int:
    if len(start) < _WORD:
        raise ValueError("the file ends within its header")
    return int.from_bytes(start, "little")


def _count(file: IO[bytes]) -> int:
    try:
        return _number_of_rows(file.read(_WORD))
    except ValueError as error:
        raise Damaged(getattr(file, "name", ""), None, str(error)) from error


def _count_rows(path: Path) -> int:
    return len(MdsRows(path, None))


def _decoder(encoding: str) -> _Decode:
    name, _, arguments = encoding.partition(":")
    if name == "ndarray":
        return _array_decoder(arguments)
    if name in _NUMBERS:
        dtype = np.dtype(name).newbyteorder("<")
        return lambda content: np.frombuffer(content, dtype, 1)[0].item()
    if name not in _DECODERS:
        advice = "Unpickling would run code from the file. " if name == "pkl" else ""
        raise ValueError(
            f"a column has the encoding {encoding!r}, which is not supported. {advice}Supported are "
            f"{', '.join([*_DECODERS, *_NUMBERS, 'ndarray'])}"
        )
    return _DECODERS[name]


def _array_decoder(arguments: str) -> _Decode:
    """Return a decoder for `ndarray`, `ndarray:DTYPE` and `ndarray:DTYPE:SIZE,SIZE`.

    If the encoding omits the type or the shape, each value starts with them.
    """
    dtype_name, _, shape_text = arguments.partition(":")
    fixed_dtype = np.dtype(dtype_name) if dtype_name else None
    fixed_shape = tuple(int(size) for size in shape_text.split(",")) if shape_text else None

    def decode(content: bytes) -> Any:
        position, dtype, shape = 0, fixed_dtype, fixed_shape
        if dtype is None:
            dtype, position = np.dtype(_DTYPES[content[0]]), 1
        if shape is None:
            dims, width = content[position] >> 2, 1 << (content[position] & 3)
            shape = tuple(np.frombuffer(content, f"<u{width}", dims, position + 1).tolist())
            position += 1 + dims * width
        return np.frombuffer(content, dtype, offset=position).reshape(shape).copy()

    return decode


def _raw_image(content: bytes) -> Any:
    width, height, mode_bytes = np.frombuffer(content, "<u4", 3).tolist()
    mode_end = 3 * _WORD + mode_bytes
    image = optional_package("PIL.Image", "Pillow")
    return np.array(image.frombytes(content[3 * _WORD : mode_end].decode(), (width, height), content[mode_end:]))


# The byte in front of an array that encodes its type.
_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_NUMBERS = sorted(_DTYPES.values())
_DECODERS: dict[str, _Decode] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda content: int(np.frombuffer(content, "<i8", 1)[0]),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda content: Decimal(content.decode()),
    "json": msgspec.json.decode,
    "jpeg": bytes,
    "png": bytes,
    "pil": _raw_image,
}

MDS = Format("mds", (".mds",), _count_rows, MdsRows, count=_count)
