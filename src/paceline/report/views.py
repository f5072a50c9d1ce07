"""Report pages of other packages, for the directories that these packages write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunError
from paceline.extensions import ExtensionPoint


@dataclass(frozen=True)
class DirectoryPage:
    """Report page of one kind of directory. Loads nothing heavy.

    Attributes:
        recognizes: returns True if a directory is of this kind.
        write: writes the page and returns its path; raises RunError if a file of the directory cannot be read.
    """

    recognizes: Callable[[Path], bool]
    write: Callable[[Path], Path]


PAGES = ExtensionPoint[DirectoryPage]("page", "paceline.report_views", DirectoryPage, {}, RunError)
