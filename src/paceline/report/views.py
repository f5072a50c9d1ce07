"""Pages of directories that other packages write, for `paceline report`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunError
from paceline.extensions import ExtensionPoint


@dataclass(frozen=True)
class DirectoryPage:
    """The page of one kind of directory. Loads nothing heavy.

    Attributes:
        recognizes: True if a directory is of this kind.
        write: writes the page and returns its path; raises RunError if a file of the directory cannot be read.
    """

    recognizes: Callable[[Path], bool]
    write: Callable[[Path], Path]


PAGES = ExtensionPoint[DirectoryPage]("page", "paceline.report_views", DirectoryPage, {}, RunError)
