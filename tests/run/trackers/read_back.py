"""What trackers have stored, read by their own packages: `read_back.py TRACKER WHERE`; prints JSON."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb(where: str) -> list[dict[str, Any]]:
    """Each offline run under a folder, in the order of their starts."""
    return [_wandb_run(file) for file in sorted(Path(where).glob("offline-run-*/run-*.wandb"))]


def _wandb_run(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"history": {}}
    for record in _wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run" and not found.get("id"):
            run = record.run
            config = {item.key: json.loads(item.value_json) for item in run.config.update}
            found |= {"id": run.run_id, "name": run.display_name, "project": run.project, "config": config}
        if kind == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            found["history"].setdefault(str(record.history.step.num), {}).update(values)
        if kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found


def _wandb_records(file: Path) -> Iterator[Any]:
    """Records of a file in LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the last part of a record
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def mlflow(where: str) -> list[dict[str, Any]]:
    """Each run of the experiment `small`."""
    from mlflow import MlflowClient

    client = MlflowClient(where)
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    found = []
    for run in client.search_runs([experiment.experiment_id]):
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        steps = {
            name: [[metric.step, metric.value] for metric in sorted(all_, key=_step)] for name, all_ in history.items()
        }
        info = {"id": run.info.run_id, "name": run.info.run_name, "status": run.info.status}
        found.append({**info, "params": run.data.params, "metrics": steps})
    return found


def _step(metric: Any) -> int:
    return int(metric.step)


def opentelemetry(where: str) -> dict[str, Any]:
    """The newest value of each gauge in bodies of OTLP requests, which are the files of a folder."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    found: dict[str, Any] = {"values": {}}
    for file in sorted(Path(where).iterdir()):
        request = ExportMetricsServiceRequest()
        request.ParseFromString(file.read_bytes())
        for resource in request.resource_metrics:
            found["resource"] = {a.key: a.value.string_value for a in resource.resource.attributes}
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in metric.gauge.data_points:
                    labels = ",".join(f"{a.key}={a.value.string_value}" for a in point.attributes)
                    number = point.as_double if point.HasField("as_double") else point.as_int
                    found["values"][f"{metric.name}{{{labels}}} {metric.unit}"] = number
    return found


print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
