"""Ranks of divided replicas are killed while a run trains: the other replicas go on, and theirs comes back."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from commands import (
    ended,
    ended_well,
    events,
    kill_rank,
    losses,
    losses_of,
    points,
    processes_of,
    rank_of,
    training,
    wait_for,
    wait_for_events,
    wait_for_step,
    write_job,
)

WHAT = Path(__file__).with_name("what_goes_wrong.py")
STEPS = 40


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps, 6 in an epoch, with an evaluation after each epoch."""
    return write_job(tmp_path_factory.mktemp("job") / "job.yaml", **long_job())


def long_job(**changes: object) -> dict[str, object]:
    data = points(0.15, samples=112)
    return {
        "model": {"factory": f"{WHAT}:net", "args": {"width": 16}},
        "data": data,
        "optimizer": {"name": "adamw", "lr": 0.01},
        "stop": {"steps": STEPS},
        "checkpoint": {"every_steps": 15},
        "deadline_s": 60,
        **changes,
    }


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> dict[int, float]:
    """The losses of the job when nothing happens."""
    return losses_of(job)


def killed_in(run: Path, process: subprocess.Popen[str], kills: list[tuple[int, int]]) -> None:
    """Kill ranks at steps, each after the replica of the one before is back."""
    for count, (rank, step) in enumerate(kills, 1):
        wait_for_step(step, run, process)
        kill_rank(rank, process)
        wait_for_events(run, "generation", 2 * count, process)


@pytest.mark.parametrize("plan", ["dp=2 fsdp=2", "dp=2 tp=2", "dp=2 pp=2 microbatches=2"])
@pytest.mark.slow
def test_a_lost_rank_costs_no_step_whichever_part_it_held(
    plan: str, job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, plan) as (process, run):
        killed_in(run, process, [(3, 4), (0, 10), (2, 16), (1, 22)])
        ended_well(process)
    assert [(e["rank"], e["code"]) for e in events(run, "lost")] == [(n, "launch.rank_killed") for n in (3, 0, 2, 1)]
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert [event["replicas"] for event in events(run, "generation")] == [1, 2] * 4
    assert [event["rank"] for event in events(run, "healed")] == [3, 0, 2, 1]
    assert not events(run, "resume"), "nothing was read from the disk"


@pytest.mark.parametrize(
    ("plan", "model", "more"), [("dp=2 cp=2", "gpt", {}), ("dp=2 ep=2", "moe", {"experts": 4, "top_k": 2})]
)
@pytest.mark.slow
def test_a_lost_rank_of_divided_tokens_or_experts_costs_no_step(
    plan: str, model: str, more: dict[str, int], tmp_path: Path
) -> None:
    args = {"layers": 2, "hidden": 16, "heads": 2, "context": 16, "vocab": 29, **more}
    data = {"kind": "synthetic", "shape": [16], "vocab": 29, "samples": 112, "held_out": 0.15}
    job = write_job(tmp_path / "job.yaml", **long_job(model={"zoo": model, "args": args}, data=data))
    alone = losses_of(job, "dp=1")
    with training(job, tmp_path, plan) as (process, run):
        killed_in(run, process, [(3, 4), (0, 12)])
        ended_well(process)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(alone, rel=1e-4)
    assert [event["replicas"] for event in events(run, "generation")] == [1, 2] * 2
    assert [event["rank"] for event in events(run, "healed")] == [3, 0]
    assert not events(run, "resume"), "nothing was read from the disk"


@pytest.mark.slow
def test_a_replica_that_is_divided_in_two_ways_is_whole_again(
    job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, "dp=2 fsdp=2 tp=2") as (process, run):
        killed_in(run, process, [(5, 4)])
        ended_well(process)
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert [(event["rank"], event["waiting"]) for event in events(run, "lost")] == [(5, [4, 6, 7])]
    assert [event["replicas"] for event in events(run, "generation")] == [1, 2]


@pytest.mark.parametrize(
    ("killed", "resumes"),
    [
        pytest.param((2, 3), 0, id="of one replica"),
        pytest.param((1, 2), 0, id="of both: the others have all parts"),
        pytest.param((0, 2), 1, id="all that had a part"),
    ],
)
@pytest.mark.slow
def test_ranks_that_are_lost_at_once_come_back_from_memory_as_long_as_it_has_all_parts(
    killed: tuple[int, int], resumes: int, job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, "dp=2 fsdp=2") as (process, run):
        wait_for(lambda: (run / "checkpoints" / "step-00000015").exists(), process)
        for lost in [p for p in processes_of(process) if rank_of(p) in killed]:
            lost.send_signal(signal.SIGKILL)
        ended_well(process)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert len(events(run, "resume")) == resumes


@pytest.mark.slow
def test_a_stopped_rank_of_a_divided_replica_is_replaced(undisturbed: dict[int, float], tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", **long_job(deadline_s=6))
    with training(job, tmp_path, "dp=2 fsdp=2") as (process, run):
        wait_for_step(4, run, process)
        [stopped] = [p for p in processes_of(process) if rank_of(p) == 2]
        stopped.send_signal(signal.SIGSTOP)
        ended_well(process)
    assert [(event["rank"], event["code"]) for event in events(run, "lost")] == [(2, "launch.rank_hung")]
    assert [event["rank"] for event in events(run, "healed")] == [2]
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.slow
def test_a_run_ends_once_no_replica_can_be_whole_again(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LOSSES_PER_HOUR", "1")
    with training(job, tmp_path, "dp=2 fsdp=2") as (process, run):
        wait_for_step(4, run, process)
        kill_rank(3, process)
        wait_for_events(run, "generation", 1, process)
        kill_rank(0, process)
        outcome = ended(process)
    assert outcome.code == 1
    assert [(event["rank"], event["again"]) for event in events(run, "lost")][:1] == [(3, False)]
    outcome.fails_with("launch.rank_killed")
    assert "rank 0 (host " in outcome.err


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("dp=2 fsdp=2", marks=pytest.mark.slow)])
def test_steps_of_muon_that_ranks_take_together_survive_a_lost_rank(plan: str, tmp_path: Path) -> None:
    """In float64, because Muon magnifies rounding."""
    muon = {"name": "muon", "lr": 0.01}
    job = write_job(tmp_path / "job.yaml", **long_job(optimizer=muon, precision="fp64", ema=0.9))
    expected = losses_of(job)
    with training(job, tmp_path, plan) as (process, run):
        killed_in(run, process, [(1, 4), (0, 12)])
        ended_well(process)
    assert losses(run) == pytest.approx(expected, rel=1e-6)
    assert not events(run, "resume"), "nothing was read from the disk"
