"""Prometheus: an endpoint to scrape, or a text file for the node exporter's textfile collector."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, start_http_server, write_to_textfile

from paceline.errors import JobError
from paceline.run.trackers.tracker import Status, TrackedRun

_STATUSES = ("running", "finished", "failed", "interrupted")


class ToPrometheus:
    """Gauges with the newest numbers: `paceline_train_loss`, `paceline_step_seconds{part="compute"}`.

    All have the labels `job` and `run`. `paceline_run_status{status=…}` is 1 for the one that holds.

    Args:
        port: of the endpoint, `http://ADDRESS:PORT/metrics`; None: no endpoint. 0: a free one; it is printed.
        address: where it listens; whoever reaches it can read it.
        textfile: a file that is replaced as a whole, `….prom`; "": none.

    Raises:
        JobError: neither port nor textfile is given.
    """

    id = ""

    def __init__(
        self, run: TrackedRun, *, port: int | None = None, address: str = "127.0.0.1", textfile: str = ""
    ) -> None:
        if port is None and not textfile:
            raise JobError('the tracker "prometheus" needs port= (to be scraped) or textfile= (for the node exporter)')
        self._labels = {"job": run.project, "run": run.name}
        self._registry, self._gauges, self._textfile = CollectorRegistry(), dict[str, Gauge](), textfile
        self._server = None
        if port is not None:
            self._server, self._thread = start_http_server(port, address, self._registry)
            print(f"Prometheus' metrics: http://{address}:{self._server.server_port}/metrics", flush=True)
        self._tell("running")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._set("paceline_step", "Optimizer steps so far.", step)
        self._set("paceline_last_step_timestamp_seconds", "Unix time of the newest step.", time.time())
        for name, value in values.items():
            metric, labels = metric_name(name)
            self._set(metric, f"{name} of the newest step.", value, labels)
        self._write()

    def close(self, status: Status) -> None:
        """See `Tracker`. A text file stays, with the end of the run; an endpoint goes."""
        self._tell(status)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _tell(self, status: str) -> None:
        for known in _STATUSES:
            self._set("paceline_run_status", "1 for the status of the run.", known == status, {"status": known})
        self._write()

    def _set(self, metric: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        labels = self._labels | dict(labels or {})
        if metric not in self._gauges:
            self._gauges[metric] = Gauge(metric, text, [*labels], registry=self._registry)
        self._gauges[metric].labels(**labels).set(value)

    def _write(self) -> None:
        if self._textfile:
            Path(self._textfile).parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(self._textfile, self._registry)


def metric_name(name: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a metric by Prometheus' conventions.

    Base units are in the name; parts of a whole are labels.
    """
    group, _, rest = name.partition("/")
    if group == "step_s":
        return "paceline_step_seconds", {"part": rest}
    words = name.replace("samples_per_s", "samples_per_second")
    return "paceline_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in words), {}
