"""HTML pages about a run, a benchmark, a plan or links, which open offline.

Read `page.py` first (the blocks of every page), then `run_page.py` and its template. Other packages write pages for
the kinds of directory that they add (`PAGES`).
"""

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
