"""TensorBoard events, written where they arise.

torch's `SummaryWriter` leaves the writing to a thread, whose own traceback a full disk puts on the screen before ours.
A few numbers a second need no thread.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from paceline.errors import RunError
from paceline.files import private_opener


class TensorBoard:
    """An event file in `folder`.

    Raises:
        ImportError: TensorBoard is not installed.
        RunError: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self.path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(open(self.path, "ab", buffering=0, opener=private_opener))  # noqa: SIM115 - until `close`
        except OSError as error:
            raise self._explained(error) from error
        self._write(time.time(), file_version="brain.Event:2")

    def scalars(self, step: int, values: dict[str, float], at: float | None = None) -> None:
        """Numbers of a step, by tag, of now or of `at` (Unix seconds).

        Raises:
            RunError: the disk is full or gone.
        """
        self._write(
            time.time() if at is None else at,
            step=step,
            summary=self._summary(value=[{"tag": tag, "simple_value": value} for tag, value in values.items()]),
        )

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, at: float, **facts: object) -> None:
        try:
            self._records.write(self._event(wall_time=at, **facts).SerializeToString())
        except OSError as error:
            raise self._explained(error) from error

    def _explained(self, error: OSError) -> RunError:
        return RunError(f"{self.path} cannot be written: {error.strerror}. Make room, then continue with --resume.")
