"""Folders of images: one folder per class, and one row per file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.corpus.rows import Format, Offsets


class ImageRow:
    """The single row `{"image": bytes, "label": class number}` of an image file.

    The image is not decoded. The file is open only during a read. `offsets` holds one number, the label.
    """

    def __init__(self, path: Path, offsets: Offsets | None) -> None:
        assert offsets is not None
        self._path, self._label = path, int(offsets[0])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self._path.read_bytes(), "label": self._label}

    def close(self) -> None:
        """Do nothing, because no file stays open."""


def _one_row(path: Path) -> int:
    return 1


IMAGES = Format(
    "images", (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"), _one_row, ImageRow
)
