"""Weights & Biases. `WANDB_MODE=offline` keeps a run here until `wandb sync`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from paceline.run.trackers.tracker import Status, TrackedRun


class ToWandb:
    """Logs to a run of W&B; `settings` are those of `wandb.init`, over what paceline sets.

    Project and run are named as paceline's; the configuration is job, plan and environment. A run that goes on has the
    same id. Steps are W&B's own.
    """

    def __init__(self, run: TrackedRun, **settings: Any) -> None:
        own: dict[str, Any] = {"config": dict(run.config), "dir": str(run.folder), "job_type": "train"}
        if run.project:
            own |= {"project": run.project, "name": run.name, "resume": "allow"}
            own["settings"] = wandb.Settings(console="off", disable_git=True)
        if run.id:
            own["id"] = run.id
        config = own["config"] | dict(settings.pop("config", {}) or {})
        self._run = wandb.init(**(own | settings | {"config": config}))
        self.id = str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def close(self, status: Status) -> None:
        """See `Tracker`. Anything but `finished` is an exit code other than 0, which W&B shows as failed."""
        self._run.finish(exit_code=0 if status == "finished" else 1)
