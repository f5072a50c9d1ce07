"""A real Ray cluster with two nodes: a run on both, one of them lost, and all started again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from commands import BIN, events, losses, wait_for, wait_for_step, write_job, write_late_job
from paceline.wire.key import RunKey, write_key
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


def submit(ray: RayCluster, here: Path, environment: Mapping[str, str], *more: str) -> subprocess.Popen[str]:
    options = (
        "--num-hosts",
        "2",
        "--plan",
        "dp=2",
        "--run",
        "run",
        "--scheduler-option",
        f"python={ENGINES / 'python'}",
        *more,
    )
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


def test_a_cancelled_run_has_saved_and_goes_on_with_a_key_that_ray_never_carried(
    ray: RayCluster, tmp_path: Path
) -> None:
    job = {"data": {"kind": "synthetic", "samples": 4_800, "held_out": 0}, "optimizer": {"name": "sgd", "lr": 0.001}}
    write_job(tmp_path / "job.yaml", **job, stop={"steps": 1_000_000})
    with submit(ray, tmp_path, os.environ) as followed:
        wait_for_step(30, tmp_path / "run", followed)
        cancel(ray, tmp_path)
        shown, _ = followed.communicate(timeout=300)
    assert followed.returncode == 143, shown
    assert "the run saves and ends" in shown
    assert "is cancelled" in shown
    [end] = events(tmp_path / "run", "end")
    assert end["reason"] == "SIGTERM"

    write_job(tmp_path / "job.yaml", **job, stop={"steps": end["step"] + 5})
    write_key(RunKey.make(), tmp_path / "run.key")
    with submit(ray, tmp_path, os.environ, "--scheduler-option", f"key={tmp_path / 'run.key'}") as followed:
        shown, _ = followed.communicate(timeout=600)
    assert followed.returncode == 0, shown
    assert "in plaintext" not in shown
    assert len(events(tmp_path / "run", "resume")) == 1
    assert max(losses(tmp_path / "run")) == end["step"] + 5


def test_a_run_that_is_cancelled_before_its_first_step_ends_everywhere(ray: RayCluster, tmp_path: Path) -> None:
    write_late_job(tmp_path)
    with submit(ray, tmp_path, os.environ) as followed:
        wait_for((tmp_path / "importing").exists, followed)
        cancel(ray, tmp_path)
        shown, _ = followed.communicate(timeout=300)
    assert followed.returncode == 143, shown
    assert "SIGTERM" in shown
    assert "is cancelled" in shown
    assert "Traceback" not in shown
    assert losses(tmp_path / "run") == {}


def cancel(ray: RayCluster, here: Path) -> None:
    """Cancel the one run that was submitted."""
    [record] = here.glob("home/submitted/*.json")
    variables = {**os.environ, **ray.environment, "PACELINE_HOME": str(here / "home")}
    words = [*ray.inside(0), str(BIN / "paceline"), "cancel", record.stem]
    subprocess.run(words, env=variables, check=True, capture_output=True, timeout=200)
