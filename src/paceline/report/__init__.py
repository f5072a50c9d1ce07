"""HTML pages about runs, benchmarks, plans and links, for reading offline.

Read `page.py` first, which has the building blocks of every page, then `run_page.py` and its template. Other packages
register pages for their own kinds of directory in `PAGES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunError
from paceline.extensions import ExtensionPoint


@dataclass(frozen=True)
class DirectoryPage:
    """Report page for one kind of directory. Registering a page imports no heavy modules.

    Attributes:
        recognizes: function that returns True if a directory is of this kind.
        write: function that writes the page and returns its path. It raises RunError if a file in the directory cannot
            be read.
    """

    recognizes: Callable[[Path], bool]
    write: Callable[[Path], Path]


PAGES = ExtensionPoint[DirectoryPage]("page", "paceline.report_views", DirectoryPage, {}, RunError)
