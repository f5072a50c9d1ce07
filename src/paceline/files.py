"""Safe files: atomic, private, and never written through another user's links.

Another user who may write to a folder can put a link at the path of a future file, or a pipe at the path of a file to
read. Therefore paceline writes all files with guessable names through this module.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_SCRATCH = "paceline-scratch-"
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # used if TMPDIR is too long
_SOCKET_BYTES = 107  # maximum length of a socket's path
_NEWBORN_S = 60.0  # age below which a folder without a lock may still be in creation
LINE_LIMIT = 2**20  # maximum bytes of a line to read; paceline's lines are much shorter
TEXT_LIMIT = 2**28  # maximum bytes of a file to read whole
LINES_LIMIT = 2**31  # maximum bytes of a file of lines: some million steps


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file of mode 0600 atomically.

    A crash leaves either the old or the new content.

    A link at `path` is replaced, never followed.

    Args:
        durable: True to return only when the content is on the disk.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f".{short_name(path, 200)}.{secrets.token_hex(8)}"
    try:
        with os.fdopen(_create(temporary, folder), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(folder)


def short_name(path: Path, limit_bytes: int) -> str:
    """Shorten a file name for use in a temporary name. File systems limit the bytes of a name, not its characters."""
    return os.fsdecode(os.fsencode(path.name)[:limit_bytes])


def create_private(path: Path) -> IO[bytes]:
    """Create a file of mode 0600, open for writing.

    An existing path is an error, even if it is a link.

    Raises:
        FileExistsError: `path` exists.
        OSError: the file cannot be created.
    """
    return os.fdopen(_create(path), "wb")


def private_opener(path: str, flags: int) -> int:
    """Open files with mode 0600; pass this function to `open` as `opener`."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


def open_to_append(path: Path) -> int:
    """Return a descriptor that appends to a file of mode 0600.

    The file is created if missing; a link or a pipe is an error.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _regular(os.open(path, flags, PRIVATE_FILE), path)


def private_folder(path: Path) -> None:
    """Make a folder of mode 0700, whatever the umask.

    If the folder exists and belongs to this user, it also gets this mode.

    Raises:
        PermissionError: the folder belongs to another user, who could put links into it or read its files.
        OSError: the folder cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    try:
        path.mkdir(mode=PRIVATE_FOLDER)
    except FileExistsError:
        if os.geteuid() != 0:  # root takes over the folder of a container's volume
            must_not_be_anothers(path)
    with suppress(PermissionError):  # a file system without modes, or a folder that root keeps for this user
        path.chmod(PRIVATE_FOLDER)


def home_folder() -> Path:
    """Return this user's paceline folder: PACELINE_HOME if set, otherwise ~/.paceline."""
    return Path(os.environ.get("PACELINE_HOME") or Path.home() / ".paceline").absolute()


def sockets_fit(folder: str) -> bool:
    """Return True if the path is short enough for multiprocessing's sockets."""
    return _fits(f"{folder}/listener-12345678")


def temporary_folder(below: str) -> str:
    """Return a folder for temporary files, with a path short enough for sockets.

    The result is TMPDIR, or a shorter folder if TMPDIR is too long and a shorter one exists.
    """
    chosen = tempfile.gettempdir()
    found = (folder for folder in (chosen, *_SHORT) if os.access(folder, os.W_OK) and _fits(f"{folder}/{below}"))
    return next(found, chosen)


def _fits(socket: str) -> bool:
    return len(os.fsencode(socket)) <= _SOCKET_BYTES


def cache_folder() -> Path:
    """Return the folder of paceline's cache.

    The folder is not writable if the user has no home folder.
    """
    home = os.path.expanduser("~")
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or (os.devnull if home.startswith("~") else Path(home, ".cache")))
        / "paceline"
    )


def made_cache_folder(name: str) -> Path:
    """Return a folder of the cache, private to the user; create it if missing.

    Raises:
        OSError: the folder cannot be created, or belongs to another user.
    """
    private_folder(cache_folder())
    private_folder(cache_folder() / name)
    return cache_folder() / name


def write_traceback(text: str, name: str, folder: Path | None = None) -> Path | None:
    """Write a traceback to a file, and return the file; None if writing fails.

    Args:
        text: the traceback.
        name: name of the file, without `.txt`.
        folder: folder of the file; None means the traceback folder in the user's cache.
    """
    try:
        file = (folder or made_cache_folder("traceback")) / f"{name}.txt"
        write_whole(file, f"{text.rstrip()}\n")
    except OSError:
        return None
    return file


def must_not_be_anothers(path: Path) -> None:
    """Raise an error if a folder belongs to another user, except root.

    Raises:
        PermissionError: another user owns the folder, and could put links into it or change its files.
    """
    try:
        owner = os.stat(path).st_uid
    except FileNotFoundError:
        return
    if owner not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, f"the folder belongs to {user_name(owner)}", str(path))


def user_name(uid: int) -> str:
    """Return the name of a user of this machine, for messages."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


@contextmanager
def scratch_folder(below: str = "") -> Iterator[Path]:
    """Create a private folder for temporary files, and remove it on exit.

    Folders that killed processes left behind are removed as well.

    Args:
        below: path of a socket inside the folder. The folder is chosen so that the socket's path is short enough.
    """
    parent = temporary_folder(f"{_SCRATCH}12345678/{below}") if below else tempfile.gettempdir()
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # held until this process ends, even if it is killed
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_abandoned(parent: str) -> None:
    for folder in Path(parent).glob(f"{_SCRATCH}*"):
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # the folder belongs to another user, or was just removed
            continue
        try:
            about = os.fstat(held)
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > _NEWBORN_S:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # a running process holds the lock
            continue
        finally:
            os.close(held)


@contextmanager
def opened_to_read(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file for reading.

    A pipe, a device or a link raises an error instead of blocking.

    Raises:
        OSError: the file is missing, cannot be read, or is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(_regular(os.open(path, flags), path), "rb") as file:
        yield file


def read_text(path: Path, limit: int = TEXT_LIMIT) -> str:
    """Read the text of a regular file that another user may have written.

    Raises:
        OSError: see `opened_to_read`; or the file has more than `limit` bytes.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with opened_to_read(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
    return content.decode()


def kernel_text(path: Path) -> str:
    """Return the stripped text of a kernel file; empty if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def whole_lines(path: Path, limit: int = LINES_LIMIT) -> Iterator[bytes]:
    """Return the lines of a regular file, each cut at `LINE_LIMIT` bytes.

    Only the beginning of a longer line is returned, so parsers treat it as a broken line.

    At most `limit` bytes are read. Raises OSError like `opened_to_read`.
    """
    with opened_to_read(path) as file:
        while file.tell() < limit and (line := file.readline(LINE_LIMIT)):
            yield line
            while not line.endswith(b"\n") and file.tell() < limit:  # skip the rest of a line that is too long
                line = file.readline(LINE_LIMIT)
                if not line:
                    return


def _create(path: str | Path, folder: int | None = None) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, PRIVATE_FILE, dir_fd=folder)


def _regular(descriptor: int, path: Path) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return descriptor
