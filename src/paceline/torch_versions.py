"""The tested versions of torch; pyproject.toml, docs/tutorials/install.md and continuous integration follow them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = (2, 13)
NEWEST = (2, 14)


def release(torch: str) -> tuple[int, int]:
    """Return the major and minor version: (2, 14) for `2.14.1+cu130`."""
    major, minor = re.findall(r"\d+", torch)[:2]
    return int(major), int(minor)


def untested() -> str | None:
    """Return a note if the installed torch is newer than the tested versions, else None. Does not import torch."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    return newer_than_tested(installed)


def newer_than_tested(torch: str) -> str | None:
    """Return a note if this torch is newer than the tested versions, else None."""
    if release(torch) <= NEWEST:
        return None
    newest = ".".join(map(str, NEWEST))
    return (
        f"torch {torch} is newer than {newest}, the newest version tested with this paceline. "
        f"If something fails: pip install 'torch<{NEWEST[0]}.{NEWEST[1] + 1}'"
    )
