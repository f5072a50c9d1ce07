"""Ranks hang in a collective of a layer: the error names the rank, the collective, the layer and the stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import ended_well, events, losses, training, write_job
from hangs import PLANTED, Case, played

CASES = [
    Case("shm", "dp=2", "sleep", layer=1, rank=1, step=3),
    Case("shm", "dp=2", "skip-own", layer=2, rank=1, step=4),
    Case("shm", "tp=2", "sleep", layer=1, rank=0, step=3),
    Case("gloo", "dp=2", "stop", layer=1, rank=1, step=3),
]
SLOW = [
    Case("shm", "dp=3", "mismatch", layer=2, rank=1, step=3),
    Case("shm", "fsdp=2", "stop", layer=1, rank=1, step=4),
    Case("shm", "pp=2 microbatches=2", "sleep", layer=0, rank=0, step=3),
    Case("gloo", "fsdp=2", "sleep", layer=1, rank=1, step=2),
    Case("gloo", "dp=2", "skip-own", layer=1, rank=0, step=3),
    Case("shm", "dp=2", "kill", layer=1, rank=1, step=3),
    Case("sim", "dp=2", "sleep", layer=1, rank=1, step=3),
    Case("sim", "dp=2", "skip-own", layer=2, rank=1, step=3),
    Case("sim", "fsdp=2", "sleep", layer=1, rank=0, step=3),
    Case("sim", "dp=2", "skip", layer=1, rank=0, step=6),
    Case("sim", "fsdp=2", "kill", layer=1, rank=0, step=7),
    Case("sim", "fsdp=2", "stop", layer=1, rank=1, step=8),
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_a_hung_collective_is_named(case: Case, tmp_path: Path) -> None:
    named = played(case, tmp_path)
    assert not named.wrong, named.text


@pytest.mark.slow
def test_a_rank_that_hangs_within_a_divided_replica_is_replaced(tmp_path: Path) -> None:
    args = {"kind": "sleep", "layer": 1, "rank": 1, "step": 4, "folder": str(tmp_path)}
    job = write_job(
        tmp_path / "job.yaml",
        model={"factory": f"{PLANTED}:build", "args": args},
        data={"kind": "synthetic", "samples": 256, "shape": [2, 4, 4], "classes": 10},
        deadline_s=4,
        stop={"steps": 20},
    )
    with training(job, tmp_path, "tp=2") as (process, run):
        ended_well(process)
    assert [(event["rank"], event["code"]) for event in events(run, "lost")] == [(1, "launch.rank_hung")]
    assert sorted(losses(run)) == list(range(1, 21))
