"""A real Ray cluster with two nodes: a run on both, one of them lost, and all started again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from commands import BIN, events, losses, wait_for_step, write_job
from ray_cluster import ENGINES, RayCluster, ray_cluster

pytestmark = [
    *(pytest.mark.slow, pytest.mark.needs_engines, pytest.mark.needs_root, pytest.mark.needs_iproute2),
    pytest.mark.timeout(900),
]
STEPS = 300


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path, nodes=2) as cluster:
        yield cluster


def submit(ray: RayCluster, here: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    options = ("--hosts", "2", "--plan", "dp=2", "--run", "run", "--set", f"python={ENGINES / 'python'}")
    return subprocess.Popen(
        [*ray.inside(0), BIN / "paceline", "submit", "job.yaml", "--on", "ray", *options],
        cwd=here,
        env={**environment, **ray.environment, "PACELINE_HOME": str(here / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_run_that_loses_a_host_starts_again_on_those_that_are_there(ray: RayCluster, tmp_path: Path) -> None:
    write_job(
        tmp_path / "job.yaml",
        data={"kind": "synthetic", "samples": 4_800, "held_out": 0},
        optimizer={"name": "sgd", "lr": 0.001},
        stop={"steps": STEPS},
        checkpoint={"every_steps": 20},
    )
    with submit(ray, tmp_path, os.environ) as followed:
        wait_for_step(60, tmp_path / "run", followed)
        ray.kill(2)
        ray.start(2)
        shown, _ = followed.communicate(timeout=600)
    assert followed.returncode == 0, shown
    assert "Ray has lost host" in shown
    assert "is done, exit code 0" in shown
    assert "PRIVATE" not in shown
    assert len(events(tmp_path / "run", "resume")) == 1
    assert sorted(losses(tmp_path / "run")) == list(range(1, STEPS + 1))
