"""Processes of a run's trackers, each of which follows the run's record.

`RunTrackers` starts `python -m paceline.run.trackers.follow RUN NUMBER` for each tracker; NUMBER is the tracker's index
in the job. A line on stdin reports how the run has ended. If stdin closes without a line, the launcher has died.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, cast

from paceline.engine.meter import PARTS
from paceline.files import write_whole
from paceline.job.job import Job
from paceline.run.record.progress import NewLines
from paceline.run.record.run import JsonLines, Run
from paceline.run.trackers import CLOSE_S, Status, TrackedRun, check, make, told_of
from paceline.text import printable

EVERY_S = 1.0  # seconds between logs; only the newest step of each interval is logged
_NICE = 10  # nice value of the tracker process, so that training has priority
_LONGEST_CLOSE_S = 300  # maximum seconds for a tracker to store its data; then this process ends


def main() -> None:
    """Follow a run to its end."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # ignore signals, because the launcher reports the end of the run
        signal.signal(stop, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICE)
    run, number = Run(sys.argv[1]), int(sys.argv[2])
    name = run.job.trackers[number].name
    try:
        Follower(run, number).follow()
    except Exception as error:  # noqa: BLE001 - nothing that a tracker does ends the training
        said = f"failed: {type(error).__name__}: {error}. Training goes on without it."
        print(printable(f'tracker "{name}" {said}'), file=sys.stderr, flush=True)
        with closing(JsonLines(run.path / "events.jsonl", lossy=True)) as events:
            events.event("tracker", {"name": name, "said": said})


class Follower:
    """Logger of a run's new steps and evaluations.

    Attributes:
        logged: newest logged step; steps that are repeated after a restart are not logged again.
        evaluated: step of the newest logged evaluation.
        tested: step of the newest logged test-set evaluation.
    """

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        spec = run.job.trackers[number]
        folder = state_folder(run.path)
        self._state_file = folder / f"{number}-{spec.name}.json"
        kept = json.loads(self._state_file.read_text()) if self._state_file.exists() else {}
        self.logged, self.evaluated = int(kept.get("step", 0)), int(kept.get("evaluated", -1))
        self.tested = int(kept.get("tested", -1))
        self._steps, self._events = NewLines(run.path / "steps" / "rank-0.jsonl"), NewLines(run.path / "events.jsonl")
        self._interrupted = False
        tracked = TrackedRun(run.path.resolve().name, run.job.name, config_of(run), folder, str(kept.get("id", "")))
        self.tracker = make(spec.name, tracked, spec.args)
        self._keep()

    def follow(self) -> None:
        """Log until the run is over."""
        last = _LastWord()
        while (word := last.within(EVERY_S)) is None:
            self.log_new()
        self.log_new()
        self.tracker.close("interrupted" if self._interrupted and word == "finished" else word)

    def log_new(self) -> None:
        """Log all new evaluations, the newest step and the newest gradient norm."""
        newest: dict[str, Any] | None = None
        norm: dict[str, Any] | None = None
        use: dict[str, float] = {}
        for line in self._steps:
            use = {f"use/{name}": value for name, value in line.get("use", {}).items()} or use
            if line["step"] > self.logged:
                newest = line
                norm = norm if line["grad_norm"] is None else line
        for event in self._events:
            if event["event"] in ("start", "resume", "end"):
                self._interrupted = bool(event.get("interrupted"))
            if event["event"] == "evaluation" and event["step"] > self.evaluated:
                self.evaluated = event["step"]
                self._log(event["step"], {f"val/{name}": value for name, value in event["metrics"].items()})
            if event["event"] == "test" and event["step"] > self.tested:
                self.tested = event["step"]
                self._log(event["step"], {f"test/{name}": value for name, value in event["metrics"].items()})
        if newest is not None:
            if norm is not None and newest["grad_norm"] is None:  # some steps with sparse gradients have no norm
                self._log(norm["step"], {"train/grad_norm": norm["grad_norm"]})
            self._log(newest["step"], {**values_of(newest), **use})

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self.tracker.log(step, values)
        self.logged = max(self.logged, step)
        self._keep()

    def _keep(self) -> None:
        with suppress(OSError):  # if the disk is full, the service shows a separate run after a restart
            state = {"id": self.tracker.id, "step": self.logged, "evaluated": self.evaluated, "tested": self.tested}
            write_whole(self._state_file, json.dumps(state))


def values_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a step's record, by their names for trackers.

    NaN and Inf are omitted.
    """
    values = {"train/loss": line["loss"], "train/lr": line["lr"], "train/grad_norm": line["grad_norm"]}
    values["train/epoch"] = line["epoch"]
    if line["step_s"] > 0:
        values["speed/samples_per_s"] = line["samples"] / line["step_s"]
        values |= {f"step_s/{part}": line[f"{part}_s"] for part in PARTS}
    return {name: value for name, value in values.items() if value is not None}


def config_of(run: Run) -> dict[str, Any]:
    """Return a run's job, plan and environment as JSON values."""
    environment = json.loads((run.path / "environment.json").read_text())
    job = run.job.model_dump(mode="json", exclude_defaults=True, exclude={"trackers"})
    return {"job": job, "plan": {"text": str(run.plan), **asdict(run.plan)}, "environment": told_of(environment)}


def state_folder(run: Path) -> Path:
    """Return the folder of a run for trackers' files; create it if needed."""
    folder = run / "trackers"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class _LastWord(threading.Thread):
    """Thread that waits for the line on stdin, which reports how the run ended."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.said: SimpleQueue[Status] = SimpleQueue()
        self.start()

    def run(self) -> None:
        word = sys.stdin.readline().strip() or "failed"
        signal.alarm(_LONGEST_CLOSE_S)  # end this process even if the tracker hangs
        self.said.put(cast(Status, word))

    def within(self, wait_s: float) -> Status | None:
        try:
            return self.said.get(timeout=wait_s)
        except Empty:
            return None


def check_trackers(job: Job) -> None:
    """Raise JobError if a job's trackers are unknown or not installed."""
    for spec in job.trackers:
        check(spec.name)


class RunTrackers:
    """Processes that follow a run's record, one per tracker of its job.

    Trackers do not run in ranks. If a tracker fails or hangs, only its own log is affected.

    Args:
        say: function that shows a line to the user.
        shows: whether trackers write to the screen; otherwise they write to files in the run directory.
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
            with suppress(OSError):  # the process has already ended
                process.stdin.write("failed\n" if kind else "finished\n")
                process.stdin.close()
        # A failed rank does not wait for trackers.
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


if __name__ == "__main__":
    main()
