"""The error that ends a command: cause on the screen, traceback in a file."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

from paceline.errors import PacelineError
from paceline.printable import printable

_shows_traceback = False
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_OWN_FILES = str(Path(__file__).parents[1])


def show_traceback(wanted: bool) -> None:
    """Choose whether tracebacks are shown on the screen, as `--traceback` says."""
    global _shows_traceback
    _shows_traceback = wanted


def show(error: Exception) -> None:
    """Print an error on stderr, the cause first.

    Its traceback is shown with `--traceback`, or if it cannot be written to a file.
    """
    text, frames = _parts(error)
    print(f"paceline: {printable(text)}", file=sys.stderr)
    if not frames:
        return
    file = None if _shows_traceback else _written(frames)
    if file is None:
        print(f"\n{printable(frames)}", file=sys.stderr)
        return
    places = [
        place for place in _FRAME.findall(frames) if "site-packages" not in place[0] and _OWN_FILES not in place[0]
    ]
    where = f"raised in {places[-1][0]}, line {places[-1][1]}, in {places[-1][2]}; " if places else ""
    print(printable(f"{where}traceback in {file}, or on the screen with --traceback"), file=sys.stderr)


def _parts(error: Exception) -> tuple[str, str]:
    """The message of an error, and its traceback; empty if the message says all."""
    if isinstance(error, PacelineError):
        from paceline.launch.failure import traceback_of_users_code

        if error.traceback:
            lines = str(error).replace(error.traceback, "").strip().splitlines()
            return "\n".join(line for line in lines if line.strip()), error.traceback
        return str(error), traceback_of_users_code(error).rstrip()
    cause = "".join(traceback.format_exception_only(error)).strip()
    return cause, "".join(traceback.format_exception(error)).rstrip()


def _written(frames: str) -> Path | None:
    """The file of this user's newest traceback; None if it cannot be written."""
    from paceline.files import made_cache_folder, write_whole

    try:
        file = made_cache_folder("traceback") / "newest.txt"
        write_whole(file, f"{frames}\n")
    except OSError:
        return None
    return file
