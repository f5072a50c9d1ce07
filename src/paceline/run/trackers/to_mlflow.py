"""MLflow: a tracking server, or a database or folder of its own (`MLFLOW_TRACKING_URI`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from paceline.run.trackers.tracker import Status, TrackedRun

_ENDS: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_LONGEST_PARAM, _PARAMS_AT_ONCE = 6000, 100  # limits of MLflow


class ToMLflow:
    """Logs to a run of MLflow, without its global state.

    The experiment is named as the job, the run as paceline's; parameters are job, plan and environment, flattened:
    `job.optimizer.lr`. A run that goes on is the same one.

    Args:
        tracking_uri: where it is stored; None: MLFLOW_TRACKING_URI, or MLflow's default.
        experiment: name of the experiment.
        tags: of the run.
    """

    def __init__(
        self,
        run: TrackedRun,
        *,
        tracking_uri: str | None = None,
        experiment: str = "",
        run_name: str = "",
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._client = MlflowClient(tracking_uri)
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            self.id = run.id
            return
        name = experiment or run.project or "Default"
        found = self._client.get_experiment_by_name(name)
        where = found.experiment_id if found else self._client.create_experiment(name)
        made = self._client.create_run(where, run_name=run_name or run.name or None, tags=dict(tags or {}))
        self.id = str(made.info.run_id)
        params = [Param(key, value[:_LONGEST_PARAM]) for key, value in _flat(run.config)]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self.id, params=params[start : start + _PARAMS_AT_ONCE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        now = int(time.time() * 1000)
        self._client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self, status: Status) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self.id, _ENDS[status])


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested values as text, by their path: `job.optimizer.lr`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)
