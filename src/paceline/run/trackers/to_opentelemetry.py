"""OpenTelemetry: gauges over OTLP, to where its own variables say (`OTEL_EXPORTER_OTLP_ENDPOINT`, …)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from paceline.run.trackers.tracker import Status, TrackedRun

_LAST_WORD_MS = 10_000


class ToOpenTelemetry:
    """Gauges `paceline.train.loss`, `paceline.step.duration{part=compute}` and the like, exported over OTLP/HTTP.

    The resource is `service.name=paceline` (`OTEL_SERVICE_NAME` is before it) with `paceline.job` and `paceline.run`.
    Numbers are exported every `OTEL_METRIC_EXPORT_INTERVAL` ms, and at the end.
    """

    id = ""

    def __init__(self, run: TrackedRun) -> None:
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
        """See `Tracker`."""
        self._set("paceline.step", "{step}", step)
        for name, value in values.items():
            group, _, rest = name.partition("/")
            if group == "step_s":
                self._set("paceline.step.duration", "s", value, {"part": rest})
            else:
                unit = "{sample}/s" if rest == "samples_per_s" else "By" if rest.endswith("_bytes") else "1"
                self._set(f"paceline.{name.replace('/', '.')}", unit, value)

    def close(self, status: Status) -> None:
        """See `Tracker`."""
        self._set("paceline.run.end", "1", 1, {"status": status})
        self._provider.shutdown(_LAST_WORD_MS)

    def _set(self, name: str, unit: str, value: float, attributes: Mapping[str, str] | None = None) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name, unit=unit)
        self._gauges[name].set(value, dict(attributes or {}))
