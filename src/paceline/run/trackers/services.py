"""Built-in trackers: TensorBoard, Weights & Biases, MLflow and OpenTelemetry.

Each class imports its service's package only in the constructor.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.files import private_opener
from paceline.run.trackers import Status, TrackedRun


class ToTensorBoard:
    """Tracker that writes TensorBoard events into `folder`, or into the run's folder."""

    id = ""

    def __init__(self, run: TrackedRun, folder: str | Path = "") -> None:
        self._board = TensorBoard(Path(folder) if folder else run.folder / "tensorboard")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._board.scalars(step, dict(values))

    def close(self, status: Status) -> None:
        self._board.close()


class ToWandb:
    """Tracker that logs to a W&B run.

    `settings` are arguments of `wandb.init`, and take precedence over paceline's. The project is named after the job,
    and the run after the run directory. The configuration has job, plan and environment. A continued run keeps its id.
    """

    def __init__(self, run: TrackedRun, **settings: Any) -> None:
        import wandb

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
        self._run.log(dict(values), step=step)

    def close(self, status: Status) -> None:
        """See `Tracker`.

        For any status except `finished`, the exit code is 1, which W&B shows as failed.
        """
        self._run.finish(exit_code=0 if status == "finished" else 1)


_ENDS: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_LONGEST_PARAM, _PARAMS_AT_ONCE = 6000, 100  # limits of MLflow


class ToMLflow:
    """Tracker that logs to an MLflow run, without MLflow's global state.

    The experiment is named after the job, and the run after the run directory. Parameters are the flattened job, plan
    and environment, such as `job.optimizer.lr`. A continued run remains the same MLflow run.

    Args:
        tracking_uri: address of the MLflow store; None takes MLFLOW_TRACKING_URI, or MLflow's default.
        experiment: name of the experiment.
        tags: tags of the run.
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
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(tracking_uri), Metric
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
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.id, metrics=[self._metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self, status: Status) -> None:
        self._client.set_terminated(self.id, _ENDS[status])


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


_LAST_WORD_MS = 10_000


class ToOpenTelemetry:
    """Tracker that exports gauges over OTLP/HTTP.

    Examples of gauges are `paceline.train.loss` and `paceline.step.duration{part=compute}`. The resource attributes are
    `paceline.job`, `paceline.run` and `service.name`, which is `paceline` unless `OTEL_SERVICE_NAME` is set. Numbers
    are exported every `OTEL_METRIC_EXPORT_INTERVAL` ms, and at the end.
    """

    id = ""

    def __init__(self, run: TrackedRun) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        facts = {"paceline.job": run.project, "paceline.run": run.name}
        if "OTEL_SERVICE_NAME" not in os.environ:
            facts["service.name"] = "paceline"
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter())],
            Resource.create({key: value for key, value in facts.items() if value}),
            shutdown_on_exit=False,
        )
        self._meter = self._provider.get_meter("paceline")
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._set("paceline.step", "{step}", step)
        for name, value in values.items():
            group, _, rest = name.partition("/")
            if group == "step_s":
                self._set("paceline.step.duration", "s", value, {"part": rest})
            else:
                unit = "{sample}/s" if rest == "samples_per_s" else "By" if rest.endswith("_bytes") else "1"
                self._set(f"paceline.{name.replace('/', '.')}", unit, value)

    def close(self, status: Status) -> None:
        self._set("paceline.run.end", "1", 1, {"status": status})
        self._provider.shutdown(_LAST_WORD_MS)

    def _set(self, name: str, unit: str, value: float, attributes: Mapping[str, str] | None = None) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name, unit=unit)
        self._gauges[name].set(value, dict(attributes or {}))


class TensorBoard:
    """TensorBoard event file in `folder`.

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
        """Write a step's numbers by tag; `at` is the Unix time, by default now.

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
        return RunError(
            "tracker.unwritable",
            "{path} cannot be written: {reason}. Free some space, then continue with --resume.",
            path=self.path,
            reason=error.strerror,
        )
