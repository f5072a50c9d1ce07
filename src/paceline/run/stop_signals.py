"""Signals that have a run save and end, in place of ending its process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which SIGINT and SIGTERM only call `note` with their names."""

    def noted(number: int, _: FrameType | None) -> None:
        note(signal.Signals(number).name)

    before = {number: signal.signal(number, noted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
