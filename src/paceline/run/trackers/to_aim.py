"""Aim: a repository in a folder, or a server of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aim import Run

from paceline.run.trackers.tracker import Status, TrackedRun

_SUBSETS = ("train", "val")  # Aim tells them apart by context, and compares values of one name


class ToAim:
    """Logs to a run of Aim: `train/loss` is its metric `loss` in the context `subset: train`.

    The experiment is named as the job; `hparams` are job, plan and environment. A run that goes on is the same one.

    Args:
        repo: folder or address of the repository; None: Aim's default, which is found from the current folder.
        experiment: name of the experiment.
        settings: others of `aim.Run`.
    """

    def __init__(self, run: TrackedRun, *, repo: str | None = None, experiment: str = "", **settings: Any) -> None:
        own = {"system_tracking_interval": None, "capture_terminal_logs": False}
        self._run = Run(
            run.id or None,
            repo=repo,
            experiment=experiment or run.project or None,
            force_resume=bool(run.id),
            **(own | settings),
        )
        self.id = str(self._run.hash)
        if run.name:
            self._run.name = run.name
        if run.config:
            self._run["hparams"] = dict(run.config)
        self._run["status"] = "running"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            group, _, rest = name.partition("/")
            subset = group in _SUBSETS
            context = {"subset": group} if subset else {}
            self._run.track(value, name=rest if subset else name, step=step, context=context)

    def close(self, status: Status) -> None:
        """See `Tracker`."""
        self._run["status"] = status
        if status == "finished":
            self._run.report_successful_finish()
        self._run.close()
