"""Newest lines of a file of steps that grows, without parsing those between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.files import opened_to_read
from paceline.report.run_record import is_step
from paceline.run.record.progress import parsed

_MOST_BYTES = 2**16  # read at a look: hundreds of lines
_READING = b'"use":'  # in the lines with a reading of the machine, one in a second
_MOST_READINGS = 8


class NewestSteps:
    """Newest lines of a rank's steps.

    A look parses few of those that were added: a run of 64 ranks with steps of 10 ms writes 6,400 lines a second.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: int | None = None

    def look(self, most: int) -> tuple[list[dict[str, Any]], bool]:
        """Newest lines that were added, `most` of them, behind those with readings of the machine.

        The second value is False where something was passed over unread, so that a reading may be missing.
        """
        added, unbroken = self._added()
        until = added.rfind(b"\n") + 1  # what follows is still being written
        if self._place is not None:
            self._place += until
        newest = added[:until].rsplit(b"\n", most + 1)
        readings = _lines_with(_READING, newest[0]) if len(newest) > most + 1 else []
        found = []
        for line in [*readings, *(newest[1:] if len(newest) > most + 1 else newest)]:
            # what does not parse was cut short, by a crash or where the look begins
            if line and is_step(step := parsed(line)):
                found.append(step)
        return found, unbroken

    def _added(self) -> tuple[bytes, bool]:
        """Bytes behind the last look's, and whether none of them was left out."""
        try:
            size = self.path.stat(follow_symlinks=False).st_size
            if size == self._place:
                return b"", True
            with opened_to_read(self.path) as file:
                before = self._place or 0
                self._place = max(before, size - _MOST_BYTES)
                file.seek(self._place)
                return file.read(_MOST_BYTES), self._place == before
        except OSError:  # none yet, or what no run has
            return b"", True


def _lines_with(mark: bytes, text: bytes) -> list[bytes]:
    """The newest lines that hold `mark`, in order."""
    found: list[bytes] = []
    end = len(text)
    while len(found) < _MOST_READINGS and (at := text.rfind(mark, 0, end)) >= 0:
        begin = text.rfind(b"\n", 0, at) + 1
        line_end = text.find(b"\n", at)
        found.append(text[begin : line_end if line_end >= 0 else None])
        end = begin
    return found[::-1]
