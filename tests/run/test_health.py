"""Hosts that are checked before a run. A mistake here trains on a host that is known to be faulty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from commands import in_a_process
from paceline.cluster.health import HealthFinding, HealthReport
from paceline.elastic.ssh import read_hosts
from paceline.errors import ClusterError
from paceline.run.health import CheckedCluster, chosen_hosts
from small_jobs import small_job

FINDING = HealthFinding("device.slow", "problem", (1,), "host-0 cpu:1 is slow", "Leave it out.")


@pytest.mark.parametrize(
    ("bad", "spares", "left"),
    [(set(), 1, ["a b", "c"]), ({1}, 1, ["a c", ""]), ({0}, 2, ["b", "c"]), ({0, 2}, 2, ["b", ""])],
)
def test_unhealthy_hosts_are_left_out_first(bad: set[int], spares: int, left: list[str]) -> None:
    chosen = chosen_hosts(read_hosts("a,b,c"), bad, spares)
    assert [" ".join(map(str, hosts)) for hosts in chosen] == left


def test_more_unhealthy_hosts_than_spares_are_refused() -> None:
    with pytest.raises(ClusterError) as refused:
        chosen_hosts(read_hosts("a,b,c"), {0, 1}, 1)
    assert refused.value.code == "health.too_few_spares"
    assert refused.value.fields["names"] == ["a", "b"]


def test_an_unhealthy_device_is_refused_before_the_run_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = HealthReport([], [], [FINDING], "shm", 1.0)
    monkeypatch.setattr("paceline.run.train.check_cluster", lambda *_: CheckedCluster(report, [0, 0]))
    with pytest.raises(ClusterError) as refused:
        paceline.train(small_job(stop={"steps": 2}), "dp=2", run=tmp_path / "run", health=True)
    assert refused.value.code == "health.unhealthy"
    assert not (tmp_path / "run").exists()


def test_healthy_devices_train(tmp_path: Path) -> None:
    run = paceline.train(small_job(stop={"steps": 2}), "dp=1", run=tmp_path / "run", health=True)
    assert len(run.steps()) == 2


def test_doctor_checks_every_device_and_a_script_can_read_it(tmp_path: Path) -> None:
    shown = in_a_process("doctor", "--cluster", "--json", folder=tmp_path)
    record = json.loads(shown.out.splitlines()[-1])
    health = record["environment"]["health"]
    assert shown.code == (1 if any(finding["level"] == "problem" for finding in health["findings"]) else 0), shown
    assert len(health["devices"]) >= 1
    assert record["figures"]["rank_0_product_gflops"] > 0


def test_hosts_are_checked_with_cluster_and_spares_are_named_hosts(tmp_path: Path) -> None:
    assert in_a_process("doctor", "--hosts", "localhost", folder=tmp_path).code == 2
    (tmp_path / "job.yaml").write_text(small_job(stop={"steps": 2}).to_yaml())
    assert in_a_process("train", "job.yaml", "--spares", "1", folder=tmp_path).code == 2
