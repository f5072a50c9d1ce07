"""Interfaces of file formats: how a file is indexed and how its rows are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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


class Rows(Protocol):
    """An open file of rows. A row maps column names to values."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        suffixes: file name endings that select this format, with the dot.
        prepare: function that writes a readable copy of a file into a new file, such as an Arrow copy of a CSV file;
            None if files are read in place.
        index: function that returns the byte offsets of a file's rows, or the number of rows if the file has an index
            of its own.
        open: function that opens a file for reading, with the offsets that `index` returned, if any.
    """

    name: str
    suffixes: tuple[str, ...]
    prepare: Callable[[Path, Path], None] | None
    index: Callable[[Path], Offsets | int]
    open: Callable[[Path, Offsets | None], Rows]
