"""Ctrl-C in a loop of one's own: one line, tracebacks in files."""

from __future__ import annotations

import signal
import sys
import traceback
from types import TracebackType

from paceline.files import write_traceback

_told = False


def tell_in_one_line(rank: int) -> None:
    """Have an uncaught KeyboardInterrupt end this rank without a traceback on the screen.

    The code of the user's `finally` and `except KeyboardInterrupt` runs before, and the rank still ends by SIGINT.
    """
    global _told
    if _told:
        return
    _told, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, frames)
            return
        # a launcher passes the terminal's signal on, so it comes twice
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        file = write_traceback("".join(traceback.format_exception(kind, error, frames)), f"rank-{rank}")
        if file is None:
            before(kind, error, frames)
        elif rank == 0:
            print(
                f"paceline: stopped by Ctrl-C; each rank's traceback is in {file.parent}, rank 0's in {file.name}",
                file=sys.stderr,
            )

    sys.excepthook = hook
