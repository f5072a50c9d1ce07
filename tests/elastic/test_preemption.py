"""Notices in the metadata of a cloud become SIGTERM for the command, which saves and ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from commands import ended, events, started, wait_for_step, write_job
from paceline.elastic.preemption import SOURCES, preemption_notices
from paceline.errors import LaunchError
from refusals import raises

AWS, GCP = "/latest/meta-data/spot/instance-action", "/computeMetadata/v1/instance/preempted"


class Metadata(BaseHTTPRequestHandler):
    """Metadata server of either cloud, which answers only requests with the right headers."""

    noticed = False

    def do_PUT(self) -> None:
        lasts = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(*((200, "token") if self.path == "/latest/api/token" and lasts else (400, "")))

    def do_GET(self) -> None:
        if self.path == GCP and self.headers["Metadata-Flavor"] == "Google":
            self._answer(200, "TRUE" if type(self).noticed else "FALSE")
        elif self.path == AWS and self.headers["X-aws-ec2-metadata-token"] == "token":
            self._answer(*((200, '{"action": "terminate"}') if type(self).noticed else (404, "")))
        else:
            self._answer(401, "")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def metadata() -> Iterator[tuple[type[Metadata], dict[str, str]]]:
    """Start a metadata server; yield its handler and the variables that name the server."""
    handler = type("Handler", (Metadata,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"127.0.0.1:{server.server_port}"
        yield handler, {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{address}", "GCE_METADATA_HOST": address}
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_a_source_is_pending_once_the_metadata_have_a_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    with metadata() as (handler, variables):
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        assert not SOURCES[name].is_pending()
        handler.noticed = True
        assert SOURCES[name].is_pending()
    with pytest.raises(OSError, match="refused"):
        SOURCES[name].is_pending()


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_a_run_with_a_notice_saves_and_ends(name: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 100_000})
    with (
        metadata() as (handler, variables),
        started(
            *("paceline", "train", job, "--plan", "dp=2", "--run", "run"),
            folder=tmp_path,
            environment={"PACELINE_PREEMPTION": name, **variables},
        ) as process,
    ):
        wait_for_step(5, tmp_path / "run", process)
        handler.noticed = True
        outcome = ended(process)
    assert outcome.code == 143, outcome.err
    assert events(tmp_path / "run", "end")[0]["reason"] == "SIGTERM"


def test_a_source_that_does_not_answer_ends_no_run(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    environment = {"PACELINE_PREEMPTION": "gcp", "GCE_METADATA_HOST": "127.0.0.1:9"}
    with started("paceline", "train", job, "--plan", "dp=1", folder=tmp_path, environment=environment) as process:
        assert ended(process).code == 0


def test_an_unknown_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PREEMPTION", "azur")
    with raises(LaunchError, "extension.unknown", name="azur"), preemption_notices():
        pass
