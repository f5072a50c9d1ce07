"""The processes of a run's trackers, which begin and end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType

from paceline.job.job import Job
from paceline.run.record.run import Run
from paceline.run.trackers.follow import state_folder
from paceline.run.trackers.own_loop import CLOSE_S
from paceline.run.trackers.tracker import check


def check_trackers(job: Job) -> None:
    """Refuse a job whose trackers are unknown or not installed. Raises JobError."""
    for spec in job.trackers:
        check(spec.name)


class RunTrackers:
    """Processes that follow a run's record, one for each tracker of its job.

    Ranks do nothing for them. A tracker that fails, hangs or dies costs the run nothing but its own log.

    Args:
        say: shows a line to the user.
        shows: whether what trackers print goes to the screen; else into files of the run.
    """

    def __init__(self, run: Run, say: Callable[[str], object], *, shows: bool = False) -> None:
        self.run, self.say, self.shows = run, say, shows
        self._processes: list[tuple[str, subprocess.Popen[str]]] = []

    def __enter__(self) -> RunTrackers:
        for number, spec in enumerate(self.run.job.trackers):
            command = [sys.executable, "-m", "paceline.run.trackers.follow", str(self.run.path), str(number)]
            with ExitStack() as opened:
                shown = None
                if not self.shows:
                    log = state_folder(self.run.path) / f"{number}-{spec.name}.log"
                    shown = opened.enter_context(log.open("a"))
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=shown, stderr=shown, text=True, start_new_session=True
                )
            self._processes.append((spec.name, process))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _, process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):  # it has ended before
                process.stdin.write("failed\n" if kind else "finished\n")
                process.stdin.close()
        # A rank that has failed keeps nobody waiting.
        until = time.monotonic() + (0.0 if kind and self.shows else CLOSE_S)
        for name, process in self._processes:
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
                if code:
                    self.say(f'note: tracker "{name}" ended by {_how(code)}; what it had not stored is lost')
            except subprocess.TimeoutExpired:
                self.say(f'note: tracker "{name}" still stores what it has, in process {process.pid}')


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
