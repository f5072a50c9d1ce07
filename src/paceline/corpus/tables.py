"""Arrow files, which are read in place; Parquet and CSV files, which are converted once.

pyarrow parses the metadata of an Arrow file. Rows are then read from the mapped file by position, because creating a
pyarrow scalar per row would be too slow for rows of tokens.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np

from paceline.corpus.rows import Damaged, Format, Offsets
from paceline.extensions import optional_package

_FILE_MAGIC, _STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
_BATCH_ROWS, _BATCH_BYTES = 1 << 16, 64 << 20  # largest record batch of a converted file
_CSV_BLOCK_BYTES = 64 << 20  # pyarrow infers the types of columns from the first block
_COMPRESSED = "its buffers are compressed, so rows cannot be read in place. Write it uncompressed, or as Parquet"

_CODES = {
    **{f"int{8 * size}": f"<{code}" for size, code in zip((1, 2, 4, 8), "bhiq", strict=True)},
    **{f"uint{8 * size}": f"<{code}" for size, code in zip((1, 2, 4, 8), "BHIQ", strict=True)},
    **{f"float{8 * size}": f"<{code}" for size, code in zip((2, 4, 8), "efd", strict=True)},
}

# Reads one value: number of the batch, row within the batch -> value.
_Read = Callable[[int, int], Any]
_Bounds = Callable[[int, int], tuple[int, int]]


class ArrowRows:
    """Rows of an Arrow file or stream, mapped into memory.

    Lists of numbers are numpy arrays, other lists are lists, structs are dicts, and nulls are None.

    The mapping uses the page cache and no other memory. If a file becomes shorter while it is mapped, the kernel ends
    the process with SIGBUS.
    """

    def __init__(self, path: Path, offsets: Offsets | None) -> None:
        self._path = str(path)
        with _decoding(path):
            whole, batches = _batches(path)
            mapped = _Mapped(whole)
            schema = batches[0].schema if batches else None
            self._columns: list[tuple[str, _Read]] = [
                (name, mapped.reader([batch.column(n) for batch in batches]))
                for n, name in enumerate(schema.names if schema else ())
            ]
        self._starts = [0, *accumulate(len(batch) for batch in batches)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        batch = bisect_right(self._starts, row) - 1
        row_of_batch = row - self._starts[batch]
        try:
            return {name: read(batch, row_of_batch) for name, read in self._columns}
        except UnicodeDecodeError as error:
            raise Damaged(self._path, row, f"the text is not valid UTF-8 ({error.reason})") from error
        except (ValueError, struct.error) as error:
            raise Damaged(self._path, row, f"the position of a value in the file is invalid ({error})") from error

    def close(self) -> None:
        """Release the mapping."""
        self._columns = []


class _Mapped:
    """Readers of columns in a mapped file."""

    def __init__(self, whole: Any) -> None:
        self._pa = optional_package("pyarrow", "pyarrow")
        self._whole, self._view = whole, memoryview(whole)

    def reader(self, arrays: list[Any]) -> _Read:
        """Return a function that reads a column's values, given its array of each batch."""
        read = self._reader_without_nulls(arrays)
        if not any(array.null_count for array in arrays):
            return read
        view, bits = self._view, [self._position(array.buffers()[0]) if array.null_count else -1 for array in arrays]

        def read_nullable(batch: int, row: int) -> Any:
            start = bits[batch]
            if start >= 0 and not view[start + (row >> 3)] >> (row & 7) & 1:
                return None
            return read(batch, row)

        return read_nullable

    def _reader_without_nulls(self, arrays: list[Any]) -> _Read:
        types, kind = self._pa.types, arrays[0].type
        if types.is_null(kind):
            return lambda batch, row: None
        if types.is_boolean(kind):
            return self._booleans(arrays)
        if _is_number(types, kind):
            return self._numbers(arrays)
        if any(is_kind(kind) for is_kind in (types.is_string, types.is_large_string)):
            return self._texts(arrays, lambda view: str(view, "utf-8"))
        if any(is_kind(kind) for is_kind in (types.is_binary, types.is_large_binary)):
            return self._texts(arrays, bytes)
        if types.is_struct(kind):
            fields = [
                (kind.field(n).name, self.reader([array.field(n) for array in arrays])) for n in range(kind.num_fields)
            ]
            return lambda batch, row: {name: read(batch, row) for name, read in fields}
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return self._lists(arrays)
        for buffer in (buffer for array in arrays for buffer in array.buffers()):
            self._position(buffer)
        # Other types, such as timestamps, decimals and dictionaries, are rare, so pyarrow reads them.
        return lambda batch, row: arrays[batch][row].as_py()

    def _booleans(self, arrays: list[Any]) -> _Read:
        view, data = self._view, [self._position(array.buffers()[1]) for array in arrays]
        return lambda batch, row: bool(view[data[batch] + (row >> 3)] >> (row & 7) & 1)

    def _numbers(self, arrays: list[Any]) -> _Read:
        number = struct.Struct(_CODES[np.dtype(arrays[0].type.to_pandas_dtype()).name])
        view, unpack, width = self._view, number.unpack_from, number.size
        data = [self._position(array.buffers()[1]) for array in arrays]
        return lambda batch, row: unpack(view, data[batch] + row * width)[0]

    def _texts(self, arrays: list[Any], convert: Callable[[memoryview], Any]) -> _Read:
        view, bounds = self._view, self._bounds(arrays)
        data = [self._position(array.buffers()[2]) for array in arrays]

        def read(batch: int, row: int) -> Any:
            start, end = bounds(batch, row)
            first = data[batch]
            return convert(view[first + start : first + end])

        return read

    def _lists(self, arrays: list[Any]) -> _Read:
        types, kind, children = self._pa.types, arrays[0].type, [array.values for array in arrays]
        if types.is_fixed_size_list(kind):
            bounds = _fixed_bounds(kind.list_size)
        else:
            bounds = self._bounds(arrays)
        if not _is_number(types, kind.value_type) or any(child.null_count for child in children):
            one = self.reader(children)

            def read_each(batch: int, row: int) -> list[Any]:
                start, end = bounds(batch, row)
                return [one(batch, nth) for nth in range(start, end)]

            return read_each
        whole, from_buffer, dtype = self._whole, np.frombuffer, np.dtype(kind.value_type.to_pandas_dtype())
        width, data = dtype.itemsize, [self._position(child.buffers()[1]) for child in children]

        def read(batch: int, row: int) -> Any:
            start, end = bounds(batch, row)
            return from_buffer(whole, dtype, end - start, data[batch] + start * width).copy()

        return read

    def _bounds(self, arrays: list[Any]) -> _Bounds:
        """Return a function that reads the start and end of a value of variable length."""
        types, kind = self._pa.types, arrays[0].type
        is_large = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
        pair = struct.Struct("<2q" if is_large else "<2i")
        view, unpack, width = self._view, pair.unpack_from, pair.size // 2
        offsets = [self._position(array.buffers()[1]) for array in arrays]
        is_list = types.is_list(kind) or types.is_large_list(kind)
        ends = [len(array.values) if is_list else _size(array.buffers()[2]) for array in arrays]

        def bounds(batch: int, row: int) -> tuple[int, int]:
            start, end = unpack(view, offsets[batch] + row * width)
            if not 0 <= start <= end <= ends[batch]:
                raise ValueError(f"{start} to {end} of {ends[batch]}")
            return start, end

        return bounds

    def _position(self, buffer: Any) -> int:
        """Return the position of a buffer in the file."""
        if not _size(buffer):
            return 0
        position = int(buffer.address - self._whole.address)
        if not 0 <= position <= self._whole.size - buffer.size:
            raise ValueError(_COMPRESSED)
        return position


def _fixed_bounds(size: int) -> _Bounds:
    return lambda batch, row: (row * size, (row + 1) * size)


def _size(buffer: Any) -> int:
    return 0 if buffer is None else int(buffer.size)


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _batches(path: Path) -> tuple[Any, list[Any]]:
    """Map an Arrow file or stream; return its bytes, and its batches as views."""
    pa = optional_package("pyarrow", "pyarrow")
    if not path.stat().st_size:
        raise ValueError("the file is empty")
    with pa.memory_map(str(path)) as file:
        whole = file.read_buffer()
    if whole[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC:
        reader = pa.ipc.open_file(whole)
        return whole, [reader.get_batch(n) for n in range(reader.num_record_batches)]
    if whole[-len(_STREAM_END) :].to_pybytes() != _STREAM_END:
        raise ValueError("the file is truncated, or is not an Arrow file")
    return whole, list(pa.ipc.open_stream(whole))


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Convert pyarrow's errors for invalid content to Damaged."""
    pa = optional_package("pyarrow", "pyarrow")
    try:
        yield
    except (pa.ArrowException, ValueError, OSError) as error:
        # pyarrow raises OSError without an errno for invalid content.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(str(path), None, str(error).rstrip(".").splitlines()[0]) from error


def _count_batches(path: Path) -> int:
    with _decoding(path):
        return sum(len(batch) for batch in _batches(path)[1])


def parquet_to_arrow(path: Path, into: Path, columns: Collection[str] = ()) -> None:
    """Convert columns of a Parquet file to an uncompressed Arrow file of 64 MB batches."""
    with _decoding(path), optional_package("pyarrow.parquet", "pyarrow").ParquetFile(path) as file:
        about = file.metadata
        bytes_of_groups = sum(about.row_group(n).total_byte_size for n in range(about.num_row_groups))
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * about.num_rows // max(1, bytes_of_groups)))
        needed = _needed(file.schema_arrow, columns)
        _write(file.schema_arrow, file.iter_batches(batch_size=rows, columns=needed), into, needed)


def csv_to_arrow(path: Path, into: Path, columns: Collection[str] = ()) -> None:
    """Convert columns of a CSV file to an uncompressed Arrow file. The first line names the columns."""
    with _decoding(path):
        csv = optional_package("pyarrow.csv", "pyarrow")
        reader = csv.open_csv(
            path,
            read_options=csv.ReadOptions(block_size=_CSV_BLOCK_BYTES),
            parse_options=csv.ParseOptions(newlines_in_values=True),
        )
        _write(reader.schema, reader, into, _needed(reader.schema, columns))


def _needed(schema: Any, columns: Collection[str]) -> list[str] | None:
    """Return these columns in the order of the file.

    Returns None, which means all columns, if none are given or one is missing.
    """
    if not columns or not {*columns} <= {*schema.names}:
        return None
    return [name for name in schema.names if name in columns]


def _write(schema: Any, batches: Any, into: Path, needed: list[str] | None) -> None:
    pa = optional_package("pyarrow", "pyarrow")
    if needed is not None:
        schema = pa.schema([field for field in schema if field.name in needed])
        batches = (batch.select(needed) for batch in batches)
    # An Arrow file cannot replace the dictionary of an earlier batch, so columns with dictionaries become plain ones.
    plain = pa.schema(
        [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema]
    )
    with pa.ipc.new_file(into, plain) as writer:
        for batch in batches:
            writer.write(batch.cast(plain) if plain != schema else batch)


def _count_parquet(file: IO[bytes]) -> int:
    parquet = optional_package("pyarrow.parquet", "pyarrow")
    with _decoding(Path(getattr(file, "name", ""))):
        return int(parquet.read_metadata(file).num_rows)


ARROW = Format("arrow", (".arrow", ".feather"), _count_batches, ArrowRows)
PARQUET = Format("parquet", (".parquet",), _count_batches, ArrowRows, parquet_to_arrow, _count_parquet)
CSV = Format("csv", (".csv",), _count_batches, ArrowRows, csv_to_arrow)
