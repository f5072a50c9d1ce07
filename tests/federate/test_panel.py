"""The page of a federated run shows what its clients did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import paceline
from federated_jobs import federated_job
from paceline.report.run_page import run_charts, view_of
from paceline.report.run_record import RunRecord
from paceline.run.record.run import Run


def test_rounds_show_clients_bytes_and_the_spread_over_clients(tmp_path: Path) -> None:
    federate = {"held_out": 0.3, "simulate": {"drop_out": 0.5}, "least": 1, "max_failures": 50}
    (tmp_path / "job.yaml").write_text(federated_job(federate).to_yaml())
    outcome = paceline("federate", "simulate", "job.yaml", "--run", "run", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    found = {chart.name: chart for chart in run_charts(RunRecord.read(Run(tmp_path / "run")))}
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps" / "rank-0.jsonl").read_text().splitlines()]
    shown = {trace.name: list(trace.y) for trace in found["clients"].figure.traces}
    assert shown["counted"] == [line["clients"] for line in lines]
    assert shown["dropped out"] == [line["dropped"] for line in lines]
    assert sum(y or 0.0 for y in shown["dropped out"]) > 0
    sent = {trace.name: list(trace.y) for trace in found["client-bytes"].figure.traces}
    assert sent["by clients"] == pytest.approx([line["up_bytes"] / 2**20 for line in lines])
    assert "client-spread" in found
    assert "privacy" not in found
    page = paceline("report", "run", folder=tmp_path)
    assert page.code == 0, page.err
    text = (tmp_path / "run" / "report.html").read_text()
    assert "Clients of each round" in text
    view = view_of(Run(tmp_path / "run"))
    assert f"Trained {len(lines)} rounds in" in view["verdict"]
    assert view["breakdown"] is None or view["breakdown"].figure.x.title == "ms per round"
    assert f"ended at round {len(lines)}" in text
