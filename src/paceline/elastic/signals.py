"""Ctrl-C and SIGTERM as requests to the launcher; SIGTERM as an exit before and after."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from paceline.errors import LaunchError


class StopSignals:
    """While entered, SIGINT and SIGTERM are counted instead of ending this process.

    `first` is the name of the first that came, or None. `kill` is set by a SIGINT after that. A signal that was ignored
    before stays ignored (as under nohup), and outside the main thread, where Python takes no signals, nothing changes.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self.kill = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number).name
        elif number == signal.SIGINT:
            self.kill = True


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Within it, SIGTERM unwinds this process, which ends with exit code 143. A launch has its own answer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # schedulers send it more than once, and what is unwound is not to be cut off
    with suppress(OSError):
        os.write(2, b"paceline: ended by SIGTERM\n")
    raise SystemExit(128 + number)


def stopped_before(what: str, name: str) -> LaunchError:
    """The error of a run that a signal stopped before something happened."""
    error = LaunchError(f"{name} stopped the run before {what}.")
    error.exit_code = 128 + signal.Signals[name]
    return error


def exit_code_of(error: BaseException) -> int:
    """Exit code of a command that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = getattr(error, "code", None) if isinstance(error, SystemExit) else getattr(error, "exit_code", None)
    return code if isinstance(code, int) else 0 if isinstance(error, SystemExit) and code is None else 1
