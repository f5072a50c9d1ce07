"""Text files: JSON Lines, lines of text, and whole files as rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.corpus.rows import Damaged, Format, Offsets, OpenFile, RowsByOffset

_CHUNK_BYTES = 1 << 20  # fits a core's cache
_NEWLINE, _RETURN = ord("\n"), ord("\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines(RowsByOffset):
    """Rows of a JSON Lines file: each line is an object.

    The decoder is msgspec, which is 3 times as fast as Python's and validates UTF-8.
    """

    def __init__(self, path: Path, offsets: Offsets | None) -> None:
        super().__init__(path, offsets)
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode

    def __getitem__(self, row: int) -> dict[str, Any]:
        line = self._bytes(row)
        try:
            return self._decode(line)
        except UnicodeDecodeError as error:
            raise Damaged(self._file.path, row, _not_utf8(error)) from error
        except msgspec.ValidationError as error:
            whole = ". The file is one JSON array; write one object per line" if line.lstrip()[:1] == b"[" else ""
            raise Damaged(self._file.path, row, f"the line is not a JSON object ({error}){whole}") from error
        except msgspec.DecodeError as error:
            whole = ". Write one object per line" if line.strip() in (b"{", b"[") else ""
            raise Damaged(self._file.path, row, f"the line is not valid JSON: {error}{whole}") from error


class TextLines(RowsByOffset):
    """Rows `{"text": line}` of a text file. Empty lines are rows; line endings are removed."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        line = self._bytes(row)
        try:
            return {"text": line.removesuffix(b"\n").removesuffix(b"\r").decode()}
        except UnicodeDecodeError as error:
            raise Damaged(self._file.path, row, _not_utf8(error)) from error


class WholeText:
    """A text file as one row `{"text": content}`."""

    def __init__(self, path: Path, offsets: Offsets | None) -> None:
        self._file = OpenFile(path)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        content = self._file.read(0, self._file.size, row)
        try:
            return {"text": content.removeprefix(_BYTE_ORDER_MARK).decode()}
        except UnicodeDecodeError as error:
            raise Damaged(self._file.path, row, _not_utf8(error)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line_offsets(path: Path) -> Offsets:
    """Return the start of each line, and the end of the last line."""
    ends = []
    buffer = bytearray(_CHUNK_BYTES)
    chunk = np.frombuffer(buffer, np.uint8)
    with open(path, "rb", buffering=0) as file:
        position = len(_BYTE_ORDER_MARK) if file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK else 0
        first = file.seek(position)
        while read := file.readinto(buffer):
            ends.append(np.flatnonzero(chunk[:read] == _NEWLINE) + (position + 1))
            position += read
    offsets = np.concatenate([[first], *ends])
    # The last line may have no newline.
    return np.append(offsets, position if position > offsets[-1] else []).astype(np.uint64)


def object_offsets(path: Path) -> Offsets:
    """Return the start of each non-empty line, and the end of the file.

    Empty lines become part of the row before them, because JSON allows white space after a value.
    """
    offsets = line_offsets(path)
    lengths = np.diff(offsets)
    empty = lengths <= 1
    short = np.flatnonzero(lengths == len("\r\n"))
    if len(short):
        content = np.memmap(path, np.uint8, mode="r")
        starts = offsets[short]
        empty[short] = (content[starts] == _RETURN) & (content[starts + np.uint64(1)] == _NEWLINE)
    if len(lengths) and lengths[-1] == 1:
        # A last line of length 1 may be a character without a newline.
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            empty[-1] = file.read() == b"\n"
    return np.concatenate([offsets[:-1][~empty], offsets[-1:]])


def _one_row(path: Path) -> int:
    return 1


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"the text is not valid UTF-8 (byte {error.start}: {error.reason})"


JSONL = Format("jsonl", (".jsonl", ".ndjson"), object_offsets, JsonLines)
LINES = Format("lines", (".txt",), line_offsets, TextLines)
TEXT = Format("text", (".txt",), _one_row, WholeText)
