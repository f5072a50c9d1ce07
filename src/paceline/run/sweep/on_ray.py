"""Sweeps on Ray Tune, which can stop bad runs early.

Ray Tune starts the runs on the hosts of its cluster. Each trial runs `paceline train` in its own process, and reads the
run directory to follow it. The sweep's directory must therefore have the same path on every host.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from paceline.elastic.failure import StopSignals
from paceline.elastic.rank import PR_SET_PDEATHSIG
from paceline.files import write_whole
from paceline.planning.plan import Plan
from paceline.run.record.run import read_lines
from paceline.run.sweep.results import SweepRun
from paceline.run.sweep.sweep import Sweep

_STEP_S, _LOOK_S = 1.0, 0.1  # seconds between reports of a trial, and between checks whether its process has ended
_STOP_S = 120  # seconds that a run may take after SIGTERM, for the last step and a checkpoint
_MOST_EVALUATIONS = 10**6  # maximum number of evaluations per run: ASHA stops runs with more
_ERROR_LINES = 20
_SETTINGS = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # `_Stopper` handles signals, so that trials save checkpoints
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_FORCE_TRIAL_CLEANUP_S": str(2 * _STOP_S),
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


def run_on_ray(sweep: Sweep, scheduler: Literal["asha"] | None) -> None:
    """Run the missing runs of a sweep on Ray.

    The environment variable RAY_ADDRESS selects the Ray cluster. Without it, Ray starts on this machine. A trial gets
    one accelerator per rank of its plan. Without accelerators, a trial gets a whole host, because runs that share cores
    would slow each other down.

    Args:
        scheduler: `asha` stops a run early if its metric is worse than most other runs' (Li et al., 2020,
            arXiv:1810.05934). Runs that were stopped early are not compared.
    """
    if not sweep.missing:
        return
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    artifacts = f"ray-{secrets.token_hex(4)}"
    with sweep.held() as lock:
        trials = [_trial_of(sweep, run) for run in sweep.missing]
        local = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False, "num_cpus": sweep.cluster.devices}
        ray.init(log_to_driver=False, logging_level="ERROR", **local)
        try:
            with StopSignals() as signals:  # after `ray.init`, which installs its own SIGTERM handler
                tune.Tuner(
                    tune.with_resources(Trial, _resources(sweep)),
                    param_space=tune.grid_search([asdict(trial) for trial in trials]),
                    tune_config=tune.TuneConfig(
                        metric="compared",
                        mode="max",
                        scheduler=ASHAScheduler(time_attr="evaluations", max_t=_MOST_EVALUATIONS)
                        if scheduler
                        else None,
                    ),
                    run_config=tune.RunConfig(
                        name=artifacts,
                        storage_path=str(sweep.path.resolve()),
                        callbacks=[_Recorder(sweep)],
                        stop=_Stopper(signals),
                        verbose=0,
                    ),
                ).fit()
        finally:
            ray.shutdown()
            shutil.rmtree(sweep.path / artifacts, ignore_errors=True)
        lock.check()
        for run in sweep.missing:
            if run.state != "failed" and (sweep.path / run.run / "job.yaml").is_file():  # Ray has stopped the trial
                sweep.take(run)
        if not signals.first:
            for run in (run for run in sweep.runs if run.state == "interrupted"):
                run.state = "stopped early"
        sweep.stopped_by = signals.first
        sweep.save()


@dataclass(frozen=True)
class TrialConfig:
    """Settings of a trial; `position` is its run's index in the sweep."""

    position: int
    command: list[str]
    folder: str
    run: str
    log: str
    metric: str
    higher_is_better: bool


def _trial_of(sweep: Sweep, run: SweepRun) -> TrialConfig:
    """Write a run's job to a file, and return the trial that trains it."""
    path = sweep.path.resolve()
    job, directory = path / "jobs" / f"{Path(run.run).name}.yaml", path / run.run
    job.parent.mkdir(exist_ok=True)
    write_whole(job, sweep.job_of(run).to_yaml())
    command = ["train", str(job), "--plan", sweep.request.plan, "--run", str(directory)]
    command += ["--resume"] if (directory / "job.yaml").is_file() else []
    return TrialConfig(
        sweep.runs.index(run),
        command,
        str(Path.cwd()),
        str(directory),
        str(job.with_suffix(".log")),
        sweep.metric,
        sweep.higher_is_better,
    )


def _resources(sweep: Sweep) -> dict[str, float]:
    if not sweep.cluster.has_accelerators:
        return {"cpu": sweep.cluster.devices}
    ranks = sweep.cluster.devices if sweep.request.plan == "auto" else Plan.parse(sweep.request.plan).ranks
    return {"cpu": 1, "gpu": ranks}


class Trial(tune.Trainable):
    """One run as a Ray Tune trial.

    A step of the trial ends after a second, or when the run has ended.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Start the command that trains the run.

        Raises:
            RuntimeError: the sweep's directory is not visible on this host.
        """
        self.trial = TrialConfig(**config)
        if not Path(self.trial.command[1]).is_file():
            raise RuntimeError(
                f"host {socket.gethostname()} has no {self.trial.command[1]}: the directory of a sweep on several "
                "hosts must be on a file system that all of them share (--out)"
            )
        with open(self.trial.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *self.trial.command],
                cwd=self.trial.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
            )

    def step(self) -> dict[str, Any]:
        """Wait a second, and report the newest evaluation."""
        until = time.monotonic() + _STEP_S
        while (code := self.process.poll()) is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        events = Path(self.trial.run) / "events.jsonl"
        evaluations = [event for event in read_lines(events) if event["event"] == "evaluation"]
        value = float(evaluations[-1]["metrics"].get(self.trial.metric, math.nan)) if evaluations else math.nan
        error = "" if not code else "\n".join(Path(self.trial.log).read_text().splitlines()[-_ERROR_LINES:])
        return {
            "compared": value * (1 if self.trial.higher_is_better else -1) if math.isfinite(value) else -math.inf,
            "evaluations": len(evaluations),
            "error": error,
            "done": code is not None,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Save nothing, because the run has its own checkpoints."""
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Restore nothing, because the command resumes its run."""

    def cleanup(self) -> None:
        """If the trial was stopped early, end the run, which saves a checkpoint."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()


class _Stopper(tune.Stopper):
    """Ray Tune stopper that stops all trials after a signal."""

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False, because single trials are not stopped."""
        return False

    def stop_all(self) -> bool:
        """Return True after a signal, to stop all trials."""
        return self._signals.first is not None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes a copy to disk, but never reads it, because the sweep continues from `sweep.json`


class _Recorder(tune.Callback):
    """Callback that records each run when its trial ends."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep

    def __getstate__(self) -> dict[str, Any]:
        return {}  # as in `_Stopper`

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record a run that has ended by itself; a stopped run may still be saving."""
        run, result = self._sweep.runs[trial.config["position"]], trial.last_result
        if result.get("error"):
            self._failed(run, result["error"])
        elif result.get("done") and (self._sweep.path / run.run / "job.yaml").is_file():
            self._sweep.take(run)
            self._record(run)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the failure of a trial that Ray has lost or could not start."""
        self._failed(self._sweep.runs[trial.config["position"]], str(trial.get_error() or "Ray lost the trial"))

    def _failed(self, run: SweepRun, error: str) -> None:
        text = error.rpartition("paceline: ")[2] if "paceline: " in error else error.strip().splitlines()[-1]
        run.state, run.error = "failed", text
        self._record(run)

    def _record(self, run: SweepRun) -> None:
        self._sweep.save()
        self._sweep.tell(run)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
