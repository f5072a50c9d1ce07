"""How a rank's process ends: by a signal, an error, or Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import NoReturn

from paceline.cluster.launch_engines import own_engine
from paceline.elastic.failure import ErrorRecord, below
from paceline.files import write_traceback
from paceline.rank_environment import own_rank
from paceline.text import printable


@contextmanager
def stop_signals(note: Callable[[str], None]) -> Iterator[None]:
    """Within this context, make SIGINT and SIGTERM only call `note` with their names."""

    def noted(number: int, _: FrameType | None) -> None:
        note(signal.Signals(number).name)

    before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fail(error: Exception) -> NoReturn:
    """Report the current exception, and end this rank with exit code 1."""
    record = ErrorRecord.of(error, own_rank())
    text = record.cause(ranks=1)  # describe only this rank's error; the engine reports failures of other ranks
    if record.traceback:
        text += f"\n{below(record.traceback, f'rank-{record.rank}')}"
    with suppress(OSError):  # stderr may be closed or its disk full; the exit code still reports the failure
        print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)
        own_engine().tell_failure(text, record.time)
    os._exit(1)  # `os._exit`, because a thread that waits for a peer would keep the process alive


_told = False


def tell_in_one_line(rank: int) -> None:
    """After an uncaught KeyboardInterrupt, end this rank without a traceback on the screen.

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
        # ignore the second SIGINT: the terminal sends one to every rank, and the launcher forwards its own
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
