"""Journal of a server on the disk: every operation, on it before it is answered.

A file is a sequence of entries, each its length, its CRC-32 and its bytes. What a crash left of the last entry is cut
off when the journal is read again. Now and then the whole state is written, and the entries before it are removed.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ServerLost, ServerRefused
from paceline.files import create_private, open_to_append, opened_to_read, private_folder, write_whole
from paceline_server.values import pack, unpack

_HEAD = struct.Struct("!QI")  # length and CRC-32 of an entry
_TREE = struct.Struct("!Q")
_STATE, _ENTRIES = "state", "journal"
MOST_BYTES = 2**30  # of entries, before the state is written


class Journal:
    """Entries of one server in a folder of its own.

    Args:
        folder: made if missing, private to the user.
        most_bytes: of entries, after which `due` asks for the state.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        private_folder(folder)
        self._folder, self._most_bytes = folder, most_bytes
        self._lock = threading.Lock()
        self._generation = max([0, *(number for number, _ in self._files(_STATE))])
        self._file = self._length = self._synced = -1

    @property
    def length(self) -> int:
        """Position behind the last entry."""
        return self._length

    @property
    def due(self) -> bool:
        """True if the state is to be written."""
        return self._length > self._most_bytes

    def replay(self, load: Callable[[Any], object], apply: Callable[[Any], object]) -> int:
        """Hand over the last state and each entry after it; then open for more.

        Returns:
            The number of entries.

        Raises:
            ServerLost: the state is damaged.
        """
        if self._generation:
            path = self._path(_STATE, self._generation)
            with opened_to_read(path) as file:
                content = file.read()
            body = _checked(content[: _HEAD.size], content[_HEAD.size :])
            if body is None:
                raise ServerLost(
                    f"{path}: the state of the server is damaged. Go on from a checkpoint, in a new folder"
                )
            load(_unpacked(body))
        count = whole = 0
        path = self._path(_ENTRIES, self._generation)
        if path.exists():
            for whole, body in _entries(path):  # noqa: B007 - the end of the last one is used below
                apply(_unpacked(body))
                count += 1
        self._file = open_to_append(path)
        os.ftruncate(self._file, whole)
        os.fsync(self._file)
        _sync_folder(self._folder)
        self._length = self._synced = whole
        return count

    def add(self, entry: Any) -> int:
        """Write an entry; returns the position that `sync` waits for.

        Raises:
            ServerRefused: the disk is full, or fails. The journal is as before.
        """
        body = _packed(entry)
        try:
            _write(self._file, [_HEAD.pack(len(body), zlib.crc32(body)), body])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._length)
            raise ServerRefused(
                f"{self._folder}: the server's journal cannot be written: {error.strerror}. Nothing of the push was "
                "applied. Make room, and push again"
            ) from error
        self._length += _HEAD.size + len(body)
        return self._length

    def sync(self, position: int) -> None:
        """Return when everything up to a position is on the disk. One call to the disk serves all that wait.

        Raises:
            ServerLost: the disk fails; what it holds is not known.
        """
        with self._lock:
            if self._synced >= position:
                return
            length = self._length
            try:
                os.fdatasync(self._file)
            except OSError as error:
                raise ServerLost(f"{self._folder}: the disk of the server's journal fails: {error.strerror}") from error
            self._synced = length

    def write_state(self, state: Any) -> None:
        """Write the state, and go on with no entries.

        On a full disk the entries stay, and the state is written later.
        """
        with self._lock:
            after, body = self._generation + 1, _packed(state)
            new = self._path(_ENTRIES, after)
            try:
                new.unlink(missing_ok=True)
                create_private(new).close()
                write_whole(self._path(_STATE, after), _HEAD.pack(len(body), zlib.crc32(body)) + body, durable=True)
            except OSError:
                self._most_bytes *= 2
                return
            _sync_folder(self._folder)
            os.close(self._file)
            self._file, self._generation = open_to_append(new), after
            self._length = self._synced = 0
        for kind in (_STATE, _ENTRIES):
            for number, path in self._files(kind):
                if number < self._generation:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _path(self, kind: str, generation: int) -> Path:
        return self._folder / f"{kind}-{generation}"

    def _files(self, kind: str) -> Iterator[tuple[int, Path]]:
        for path in self._folder.glob(f"{kind}-*"):
            number = path.name.rpartition("-")[2]
            if number.isdecimal():
                yield int(number), path


def _entries(path: Path) -> Iterator[tuple[int, bytes]]:
    """Entries, each with the position behind it; the first that is torn ends them."""
    with opened_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, _ = _HEAD.unpack(head)
            if length > size - file.tell():
                return
            body = _checked(head, file.read(length))
            if body is None:
                return
            yield file.tell(), body


def _checked(head: bytes, body: bytes) -> bytes | None:
    """The body, if it is whole and what was written."""
    if len(head) < _HEAD.size:
        return None
    length, crc = _HEAD.unpack(head)
    return body if len(body) == length and zlib.crc32(body) == crc else None


def _write(descriptor: int, parts: list[bytes]) -> None:
    """Write all of it, or raise."""
    left = [memoryview(part) for part in parts]
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def _packed(value: Any) -> bytes:
    """The value as bytes: the length of its tree, the tree, and its large tensors."""
    packed = pack(value)
    tree = msgspec.msgpack.encode(packed.tree)
    return b"".join([_TREE.pack(len(tree)), tree, *packed.parts])


def _unpacked(body: bytes) -> Any:
    (length,) = _TREE.unpack_from(body)
    block = memoryview(bytearray(body))[_TREE.size + length :]
    return unpack(msgspec.msgpack.decode(body[_TREE.size : _TREE.size + length]), block if len(block) else None)


def _sync_folder(folder: Path) -> None:
    """Return when the folder's names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
