"""A run between hosts whose link is cut: for a while, it goes on and learns the same.

For good, it ends, and its checkpoint is whole.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import checkpoints, ended, ended_well, losses, points, started, wait_for_step, write_job
from hosts import cut_of, mend_of

WHAT = Path(__file__).with_name("what_goes_wrong.py")
pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2]


def job_of(folder: Path, *, deadline_s: float) -> Path:
    """60 steps of about 20 ms, a checkpoint after every tenth."""
    (folder / "cluster.yaml").write_text("emulate: {hosts: 2, rate: 1gbit}\n")
    return write_job(
        folder / "job.yaml",
        data=points(sleep_s=0.002),
        model={"factory": f"{WHAT}:net", "args": {"width": 100}},
        stop={"steps": 60},
        checkpoint={"every_steps": 10},
        deadline_s=deadline_s,
    )


@contextmanager
def training(job: Path, run: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    options = ["--cluster", "cluster.yaml", "--plan", "dp=2 transport=tcp balance=off", "--run", run, *more]
    off = {"PACELINE_RECOVERY": "off"}  # or the run would go on without the host
    with started("paceline", "train", job, *options, folder=job.parent, environment=off) as process:
        yield process


@pytest.mark.slow
def test_a_link_that_is_cut_for_two_seconds_in_the_middle_changes_no_loss(tmp_path: Path) -> None:
    job = job_of(tmp_path, deadline_s=60)
    with training(job, "undisturbed") as process:
        assert ended(process).code == 0
    with training(job, "run") as process:
        wait_for_step(15, tmp_path / "run", process)
        cut_of(process.pid, host=1)
        at = len(losses(tmp_path / "run"))
        time.sleep(2)
        stood_at = len(losses(tmp_path / "run"))
        mend_of(process.pid, host=1)
        ended_well(process)
    assert at <= stood_at <= at + 2 < 60, "it stood still"
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_link_that_is_cut_for_good_ends_the_run_within_its_deadline_and_the_checkpoint_is_whole(
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path, deadline_s=8)
    with training(job, "run") as process:
        wait_for_step(25, tmp_path / "run", process)
        cut_of(process.pid, host=1)
        since = time.monotonic()
        outcome = ended(process)
        took_s = time.monotonic() - since
    assert outcome.code == 1
    assert took_s < 30, "8 s, and the end of the processes"
    for host in (0, 1):
        assert f"rank {host} (host host-{host}, " in outcome.fails_with("ranks.operation_failed")
    assert checkpoints(tmp_path / "run")
    with training(job, "run", "--resume") as process:
        resumed = ended(process)
    assert resumed.code == 0, resumed.err
    with training(job, "undisturbed") as process:
        assert ended(process).code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
