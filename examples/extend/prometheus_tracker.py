"""A tracker: an endpoint for Prometheus, with a gauge for each number, such as `paceline_train_loss`."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.run.trackers import Status, TrackedRun, Tracker, TrackerInfo

INFO = TrackerInfo("prometheus_tracker:start", "prometheus_client")


def start(run: TrackedRun, port: int = 9464) -> Tracker:
    """Serve http://127.0.0.1:PORT/metrics for the run."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry, labels, gauges = CollectorRegistry(), {"job": run.project, "run": run.name}, dict[str, Gauge]()
    start_http_server(port, "127.0.0.1", registry)

    class PrometheusTracker:
        id = ""  # runs have no identity there

        def log(self, step: int, values: Mapping[str, float]) -> None:
            for name, value in {"step": step, **values}.items():
                if name not in gauges:
                    gauges[name] = Gauge(name.replace("/", "_"), name, [*labels], "paceline", registry=registry)
                gauges[name].labels(**labels).set(value)

        def close(self, status: Status) -> None: ...

    return PrometheusTracker()
