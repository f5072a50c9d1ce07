"""Ctrl-C in a user's own loop: one line on the screen, tracebacks in files."""

from __future__ import annotations

import signal
import sys
import traceback
from types import TracebackType

from paceline.files import write_traceback

_told = False


def tell_in_one_line(rank: int) -> None:
    """End this rank without a traceback on the screen after an uncaught KeyboardInterrupt.

    The user's `finally` and `except KeyboardInterrupt` still run first, and the rank still ends by SIGINT.
    """
    global _told
    if _told:
        return
    _told, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, frames)
            return
        # the launcher forwards the terminal's signal, so it arrives twice
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
