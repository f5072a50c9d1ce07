"""Ctrl-C and SIGTERM as requests that the launcher obeys at its next tick."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


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
