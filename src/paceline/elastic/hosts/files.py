"""File transfer between hosts without a shared disk, and digests to compare files."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from paceline.elastic.hosts.link import Link
from paceline.elastic.hosts.messages import CHUNK_BYTES, Look, Looked, Put
from paceline.errors import CheckpointError, LaunchError
from paceline.files import open_to_append, private_opener
from paceline.rank_environment import FOLDER_IS_COPY

_PARTIAL = re.compile(r"\.step-\d+\.partial")
_SHARD, _RECEIPT = ".safetensors", ".receipt.json"
_ARRIVING = ".arriving"


class WrittenFiles:
    """Files that ranks write to a host's private copy of the attempt's folder.

    Each file is sent once it is complete. A rank's shard of a checkpoint is sent when the receipt for the shard exists.
    The receipt follows, and both files are then deleted on this host.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._theirs: set[Path] = set()
        self._sent: dict[Path, tuple[int, int]] = {}  # size and modification time
        self._lines: dict[Path, int] = {}  # number of bytes that were sent

    def receive(self, part: Put) -> None:
        """Write a chunk of a file from the coordinator. Such a file is never sent back.

        Raises the errors of the module's function `receive`.
        """
        self._theirs.add(place_in(self.folder, part.path))
        receive(part, self.folder)

    def parts(self) -> Iterator[Put]:
        """Yield, in chunks, the files and lines that are new since the last call."""
        for path in sorted(self._files(), key=lambda path: path.suffix != ".jsonl"):
            with suppress(FileNotFoundError):  # a rank has removed the file
                yield from self._parts_of(path)

    def _parts_of(self, path: Path) -> Iterator[Put]:
        if path.suffix == ".jsonl":
            yield from self._new_lines(path)
        elif _PARTIAL.fullmatch(path.parent.name):
            if path.name.endswith(_RECEIPT):
                yield from self._shard(path)
        elif self._sent.get(path) != (about := _about(path)):
            self._sent[path] = about
            yield from parts_of(path, self.folder)

    def _shard(self, receipt: Path) -> Iterator[Put]:
        for path in (receipt.with_name(shard_of(receipt.name)), receipt):
            if path.exists():
                yield from parts_of(path, self.folder)
                path.unlink(missing_ok=True)

    def _new_lines(self, path: Path) -> Iterator[Put]:
        with path.open("rb") as file:
            file.seek(self._lines.get(path, 0))
            while lines := b"".join(_whole(file.readlines(CHUNK_BYTES))):
                self._lines[path] = self._lines.get(path, 0) + len(lines)
                yield Put(str(path.relative_to(self.folder)), -1, lines, last=False)
                file.seek(self._lines[path])

    def _files(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".") or _PARTIAL.fullmatch(name)]
            # a leading dot marks a file that is still being written
            paths = (Path(folder, name) for name in names if not name.startswith("."))
            yield from (path for path in paths if path not in self._theirs)


def parts_of(path: Path, folder: Path) -> Iterator[Put]:
    """Yield a file as messages, with its path relative to `folder`."""
    name = str(path.relative_to(folder))
    with path.open("rb") as file:
        data, offset = file.read(CHUNK_BYTES), 0
        while True:
            following = file.read(CHUNK_BYTES)
            yield Put(name, offset, data, last=not following)
            if not following:
                return
            data, offset = following, offset + len(data)


def receive(part: Put, folder: Path) -> None:
    """Write a received chunk to its file.

    A shard is written under its final name, so that rank 0 sees the progress. Any other file gets its final name once
    it is complete.

    Raises:
        LaunchError: the path lies outside the folder, or the file cannot be written.
    """
    path = place_in(folder, part.path)
    try:
        _write(part, path)
    except OSError as error:
        raise LaunchError(
            "hosts.file_unwritable",
            "{path}, which another host sent, cannot be written: {reason}",
            path=path,
            reason=error.strerror,
        ) from error


def _write(part: Put, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if part.offset < 0:
        descriptor = open_to_append(path)
        with os.fdopen(descriptor, "ab") as file:
            file.write(part.data)
        return
    target = path if path.suffix == _SHARD else path.with_name(f".{path.name}{_ARRIVING}")
    with open(target, "r+b" if part.offset else "wb", opener=private_opener) as file:
        file.seek(part.offset)
        file.write(part.data)
        if part.last:
            file.flush()
            os.fsync(file.fileno())
    if part.last and target != path:
        target.replace(path)


def place_in(folder: Path, name: str) -> Path:
    """Return the local path for a file name that another host has sent.

    Raises:
        LaunchError: the name is not a plain relative path, or lies outside the folder.
    """
    parts = PurePosixPath(name).parts
    path = folder.joinpath(*parts)
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or not _inside(path.parent, folder):
        raise LaunchError(
            "hosts.file_outside_run",
            "another host sent the file name {name!r:.200}, which lies outside the run's folder",
            name=name,
        )
    return path


def shard_of(receipt: str) -> str:
    """Return the name of the shard that belongs to a receipt."""
    return receipt.removesuffix(_RECEIPT) + _SHARD


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _whole(lines: list[bytes]) -> list[bytes]:
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def _about(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


# folder in the copy with one empty file per requested folder; its name is the folder's path with | instead of /
WANTED = ".wanted"
_LOOK_EVERY_S = 0.02


def fetch(wanted: Path, copy: Path, deadline_s: float) -> None:
    """Copy a folder from host 0 to this host, if the hosts share no disk.

    Args:
        wanted: path of the requested folder within `copy`.
        deadline_s: longest time in seconds without new data.

    Raises:
        CheckpointError: no new data arrived within the deadline.
    """
    if os.environ.get(FOLDER_IS_COPY) != "1":
        return
    asked = copy / WANTED / str(wanted.relative_to(copy)).replace("/", "|")
    asked.parent.mkdir(mode=0o700, exist_ok=True)
    asked.touch(mode=0o600)
    arrived, since = -1, time.monotonic()
    while asked.exists():
        if (size := _size(wanted)) != arrived:
            arrived, since = size, time.monotonic()
        if time.monotonic() - since > deadline_s:
            raise CheckpointError(
                "hosts.file_timeout",
                "host 0 did not send {wanted} within {deadline_s:g} s",
                wanted=wanted.name,
                deadline_s=deadline_s,
            )
        time.sleep(_LOOK_EVERY_S)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder.is_dir() else 0


_NOT_DATA = {"__pycache__", "site-packages", "dist-packages"}
_END_BYTES = 2**20  # number of bytes that are read at each end of a file
# approximate number of files in a folder whose content is read; only the names of all other files are compared
_FILES_READ = 64


def differences(look: Look, link: Link, answer: Looked) -> list[str]:
    """Describe modules and files of another host that differ from this host's copies."""
    found = []
    for name, digest in digests(look).items():
        if digest and digest != (theirs := answer.digests.get(name, "")):
            found.append(f"{link.who} has {'another' if theirs else 'no'} {name}")
    return found


def digests(look: Look) -> dict[str, str]:
    """Compute the digest of each module and file on this host.

    The digest of a missing file or module is "".
    """
    found = {}
    for name in [*look.modules, *look.files]:
        try:
            file = Path(name) if name in look.files or name.endswith(".py") else _file_of(name)
            found[name] = "" if file is None else _digest(file, tuple(look.suffixes))
        except OSError:
            found[name] = ""
    return found


def _file_of(module: str) -> Path | None:
    """Find the source file of a module without importing the module."""
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [str(Path.cwd()), *sys.path])
    if spec is None:
        return None
    below = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for path in below for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return files[0] if files else Path(spec.origin) if spec.origin and not rest else None


def _digest(path: Path, suffixes: tuple[str, ...]) -> str:
    """Compute a digest of a file or a folder. Large files are read only at both ends."""
    if not path.is_dir():
        return _of_file(path)
    names = sorted(_below(path, suffixes))
    every = max(1, len(names) // _FILES_READ)
    digest = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    for name in names[::every]:
        digest.update(_of_file(path / name).encode())
    return digest.hexdigest()


def _below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """List the files below a folder that are not hidden, as relative paths."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_DATA]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes or ("",)):
                yield os.path.relpath(os.path.join(place, name), folder)


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for start in {0, max(0, size - _END_BYTES)}:
            file.seek(start)
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest()
