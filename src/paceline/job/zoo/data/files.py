"""Finding and opening the files of a data set, and saying plainly what is missing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from paceline.errors import DataError

# a Python installation's folder holds other projects' files as well
_NOT_DATA = {"__pycache__", "site-packages", "dist-packages"}


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Turn a missing or unreadable file in the block into a DataError.

    It names the file (or else `path`) and what was expected.
    """
    try:
        yield
    except OSError as error:
        place = Path(os.fsdecode(error.filename or path)).absolute()
        raise DataError(f"{place}: {error.strerror or error}. Expected: {expected}") from error


def folder_entries(folder: Path) -> list[Path]:
    """The visible entries of a folder, sorted by name.

    Raises:
        OSError: no such folder, or not readable.
    """
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def files_below(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """The visible files under a folder with one of the suffixes (any case), sorted by path.

    Raises:
        OSError: the folder or one below it is not readable.
    """

    def fail(error: OSError) -> None:
        raise error

    endings = tuple(suffix.lower() for suffix in suffixes)
    found = []
    for place, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [f for f in folders if f not in _NOT_DATA and not f.startswith(".")]
        found += [os.path.join(place, f) for f in files if f.lower().endswith(endings) and not f.startswith(".")]
    return sorted(found)


def optional_package(module: str, package: str) -> ModuleType:
    """Import a module of a package that only some data needs.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"this data needs {package}, which cannot be imported ({error}); run: pip install 'paceline[data]'"
        ) from error
