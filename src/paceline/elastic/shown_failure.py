"""The error that ends a command: cause on the screen, traceback in a file."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

from paceline.elastic.failure import OWN_FILES, traceback_of_users_code
from paceline.errors import PacelineError
from paceline.files import write_traceback
from paceline.printable import printable

_shows_traceback = False
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def show_traceback(wanted: bool) -> None:
    """Set whether tracebacks are shown on the screen (`--traceback`)."""
    global _shows_traceback
    _shows_traceback = wanted


def show(error: Exception) -> None:
    """Print an error on stderr, the cause first.

    The traceback is shown with `--traceback`, or if it cannot be written to a file.
    """
    cause, frames = cause_and_traceback(error)
    print(f"paceline: {printable(cause)}", file=sys.stderr)
    if frames:
        print(printable(below(frames)), file=sys.stderr)


def cause_and_traceback(error: Exception) -> tuple[str, str]:
    """Return the message of an error, and its traceback; empty if the message is enough."""
    if isinstance(error, PacelineError):
        if error.traceback:
            lines = str(error).replace(error.traceback, "").strip().splitlines()
            return "\n".join(line for line in lines if line.strip()), error.traceback
        return str(error), traceback_of_users_code(error).rstrip()
    cause = "".join(traceback.format_exception_only(error)).strip()
    return cause, "".join(traceback.format_exception(error)).rstrip()


def below(frames: str, name: str = "newest", folder: Path | None = None) -> str:
    """Return the lines below the cause of an error.

    These lines name the place of the error and the file with the traceback, or are the traceback itself.

    Args:
        frames: the traceback.
        name: name of the file, without `.txt`.
        folder: folder of the file; None is a folder in the user's cache.
    """
    file = None if _shows_traceback else write_traceback(frames, name, folder)
    if file is None:
        return f"\n{frames}"
    places = [
        place
        for place in _FRAME.findall(frames)
        if "site-packages" not in place[0] and not place[0].startswith(OWN_FILES)
    ]
    where = f"raised in {places[-1][0]}, line {places[-1][1]}, in {places[-1][2]}; " if places else ""
    return f"{where}traceback in {file}; --traceback shows it on the screen"
