"""Interfaces of file formats: how a file is indexed and how its rows are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.uint64]


class Damaged(Exception):
    """Error for a file whose content contradicts its index or its format.

    Attributes:
        shard: path or URL of the file.
        row: number of the row within the file; None if the file cannot be read at all.
        reason: what is wrong, without a full stop.
    """

    def __init__(self, shard: str, row: int | None, reason: str) -> None:
        super().__init__(shard, row, reason)
        self.shard, self.row, self.reason = shard, row, reason

    def __str__(self) -> str:
        return f"{self.shard}{'' if self.row is None else f', row {self.row}'}: {self.reason}"


def unreadable(shard: str, error: OSError) -> Damaged:
    """Return the error for a file that the system cannot read.

    Raises:
        OSError: this process lacks descriptors or memory, so the file may be intact.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error
    return Damaged(shard, None, f"the file cannot be read ({error.strerror or error})")


class Rows(Protocol):
    """An open file of rows. A row maps column names to values.

    Values are strings, bytes, numbers, None, numpy arrays, and lists and dicts of these. They do not share memory with
    the file.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        suffixes: file name endings that select this format, with the dot.
        index: function that returns the byte offsets of a file's rows, or only the number of rows if the file has an
            index of its own. There is one more offset than rows: the last offset is the end of the last row.
        open: function that opens a file for reading, with the offsets that `index` returned, if any.
        prepare: function that writes a readable copy of a file into a new file, such as an Arrow copy of a CSV file;
            None if files are read in place. `index` and `open` then get the copy. The third argument names the columns
            that the copy needs, if the file has all of them; it is empty for all columns.
        count: function that reads the number of rows from the header or footer of the original file, before `prepare`;
            None if files of this format do not store the number.
    """

    name: str
    suffixes: tuple[str, ...]
    index: Callable[[Path], Offsets | int]
    open: Callable[[Path, Offsets | None], Rows]
    prepare: Callable[[Path, Path, Collection[str]], None] | None = None
    count: Callable[[IO[bytes]], int] | None = None


class OpenFile:
    """A file that is read with pread, so threads and processes share no position."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, start: int, end: int, row: int | None = None) -> bytes:
        """Read the bytes from `start` to `end`, which belong to `row`.

        Raises:
            Damaged: the file ends before `end`.
        """
        found = os.pread(self._descriptor, end - start, start)
        if len(found) == end - start:
            return found
        parts = [found]
        # The kernel reads at most 2 GiB at once.
        while found and (start := start + len(found)) < end:
            found = os.pread(self._descriptor, end - start, start)
            parts.append(found)
        if start < end:
            raise Damaged(self.path, row, "the file ends within the row")
        return b"".join(parts)

    def close(self) -> None:
        """Close the file; further reads fail."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


class RowsByOffset:
    """Rows that are the bytes between two offsets of a file."""

    def __init__(self, path: Path, offsets: Offsets | None) -> None:
        assert offsets is not None
        self._file, self._offsets = OpenFile(path), offsets.data

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def _bytes(self, row: int) -> bytes:
        return self._file.read(self._offsets[row], self._offsets[row + 1], row)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
