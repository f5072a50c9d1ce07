"""Folders of images: one folder per class, and one row per file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.corpus.rows import Format, Offsets


class ImageRow:
    """The row `{"image": bytes, "label": number of the class}` of an image file.

    Images are not decoded, and the file is open only while it is read. The only offset is the label.
    """

    def __init__(self, path: Path, offsets: Offsets | None) -> None:
        assert offsets is not None
        self._path, self._label = path, int(offsets[0])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self._path.read_bytes(), "label": self._label}

    def close(self) -> None:
        """Do nothing."""


def _one_row(path: Path) -> int:
    return 1


IMAGES = Format(
    "images", (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"), _one_row, ImageRow
)
