"""Ranks are killed while a run trains: the others go on within the same run, exactly, and let a replacement in."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from commands import (
    DEADLINE_S,
    checkpoints,
    ended,
    ended_well,
    events,
    kill_rank,
    losses,
    losses_of,
    no_new_processes,
    paceline,
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
STEPS = 120


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 steps of some milliseconds, 6 in an epoch, with an evaluation after each epoch."""
    return write_job(tmp_path_factory.mktemp("job") / "job.yaml", **long_job())


def long_job(**changes: object) -> dict[str, object]:
    data = points(0.15, sleep_s=0.003, samples=112)
    return {
        "model": {"factory": f"{WHAT}:normed_net"},
        "data": data,
        "optimizer": {"name": "adamw", "lr": 0.01},
        "batch_norm": "sync",
        "stop": {"steps": STEPS},
        "checkpoint": {"every_steps": 20},
        "deadline_s": 60,
        **changes,
    }


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> dict[int, float]:
    """The losses of the job when nothing happens."""
    return losses_of(job)


def test_a_killed_rank_costs_no_step_and_is_back_soon(job: Path, undisturbed: dict[int, float], tmp_path: Path) -> None:
    with training(job, tmp_path, "dp=3") as (process, run):
        for count, (rank, step) in enumerate([(2, 8), (0, 30)], 1):
            wait_for_step(step, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "generation", 2 * count, process)
        ended_well(process)
    assert [(e["rank"], e["code"]) for e in events(run, "lost")] == [(n, "launch.rank_killed") for n in (2, 0)]
    assert [event["rank"] for event in events(run, "healed")] == [2, 0]
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)
    assert [(e["replicas"]) for e in events(run, "generation")] == [2, 3, 2, 3]
    assert not events(run, "resume"), "nothing was read from the disk"
    assert checkpoints(run)[-1] == f"step-{STEPS:08d}"


def test_the_loss_scale_of_fp16_is_that_of_the_run_also_on_a_replacement(tmp_path: Path) -> None:
    still = {"optimizer": {"name": "sgd", "lr": 1e-4}, "batch_norm": "local", "stop": {"steps": 60}}
    job = write_job(tmp_path / "job.yaml", **long_job(**still, precision="fp16", model={"factory": f"{WHAT}:Steep"}))
    with training(job, tmp_path, "dp=2") as (process, run):
        wait_for_step(12, run, process)
        kill_rank(0, process)
        wait_for_events(run, "generation", 2, process)
        ended_well(process)
    expected = paceline("train", job, "--plan", "dp=2", "--run", tmp_path / "undisturbed", folder=tmp_path)
    assert expected.code == 0, expected.err
    left_out = [event["step"] for event in events(tmp_path / "undisturbed", "nonfinite")]
    assert left_out
    assert [event["step"] for event in events(run, "nonfinite")] == left_out
    assert losses(run) == pytest.approx(losses(tmp_path / "undisturbed"), rel=1e-2)
    assert not events(run, "resume"), "nothing was read from the disk"


@pytest.mark.parametrize("sync", ["allreduce", "server:staleness=2,backup=off"])
def test_a_rank_for_which_there_is_no_process_is_left_out_until_there_is_one(sync: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", **long_job(stop={"steps": 2 * STEPS}, batch_norm="local"))
    with training(job, tmp_path, f"dp=2 sync={sync}") as (process, run):
        wait_for_step(8, run, process)
        [first, second] = sorted(
            (p for p in processes_of(process) if rank_of(p) in (0, 1)), key=lambda p: rank_of(p) or 0
        )
        forkserver = first.parent()
        assert forkserver is not None
        with no_new_processes(forkserver):
            held = forkserver.num_fds()
            second.kill()
            wait_for_events(run, "lost", 1, process)
            paceline("scale", run, "+1", folder=tmp_path).fails_with("launch.rank_not_started")
            wait_for_step(max(losses(run)) + 10, run, process)
            assert forkserver.num_fds() == held
        assert paceline("scale", run, "+1", folder=tmp_path).code == 0
        wait_for(lambda: any(rank_of(p) == 1 for p in processes_of(process)), process)
        ended_well(process)
    assert [event["again"] for event in events(run, "lost")] == [False]
    assert sorted(losses(run)) == list(range(1, 2 * STEPS + 1))
    assert checkpoints(run)[-1] == f"step-{2 * STEPS:08d}"


@pytest.mark.slow
def test_a_rank_that_sees_many_generations_keeps_nothing_of_those_before(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", **long_job(stop={"steps": 4 * STEPS}))
    boards = []
    with training(job, tmp_path, "dp=3") as (process, run):
        for count, rank in enumerate((1, 2, 1, 2), 1):
            wait_for_step(30 * count, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "generation", 2 * count, process)
            wait_for_step(30 * count + 20, run, process)
            [survivor] = [p for p in processes_of(process) if rank_of(p) == 0]
            boards.append(boards_of(survivor))
        ended_well(process)
    assert boards == [boards[0]] * 4


def boards_of(process: psutil.Process) -> int:
    """Number of times that a process has its launcher's status board open."""
    links = []
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(descriptor))
    return sum(link.endswith("/status") for link in links)


@pytest.mark.slow
def test_two_at_once_and_one_while_the_others_meet(job: Path, undisturbed: dict[int, float], tmp_path: Path) -> None:
    with training(job, tmp_path, "dp=4") as (process, run):
        wait_for_step(10, run, process)
        kill_rank(1, process)
        kill_rank(3, process)
        wait_for_events(run, "lost", 2, process)
        kill_rank(0, process)
        wait_for_events(run, "joins", 1, process)
        kill_rank(2, process)
        ended_well(process)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_under_way_when_a_rank_comes_back_is_whole(undisturbed: dict[int, float], tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", **long_job(checkpoint={"every_steps": 1}))
    with training(job, tmp_path, "dp=3") as (process, run):
        wait_for_step(8, run, process)
        kill_rank(0, process)
        ended_well(process)
    assert events(run, "healed")
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_when_all_ranks_are_killed_they_go_on_from_the_disk(
    job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, "dp=2") as (process, run):
        wait_for(lambda: (run / "checkpoints" / "step-00000020").exists(), process)
        for rank in (0, 1):
            kill_rank(rank, process)
        ended_well(process)
    assert events(run, "resume")
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_a_rank_that_is_killed_again_and_again_is_left_out_and_named(
    job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, "dp=3") as (process, run):
        for count in range(3):
            wait_for_step(5 + 10 * count, run, process)
            wait_for_events(run, "generation", 2 * count, process)
            kill_rank(1, process)
            wait_for_events(run, "lost", count + 1, process)
        ended_well(process)
    assert [event["again"] for event in events(run, "lost")] == [True, True, False]
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_when_all_ranks_are_left_out_the_run_fails_and_says_so(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LOSSES_PER_HOUR", "1")
    with training(job, tmp_path, "dp=2") as (process, run):
        wait_for_step(5, run, process)
        kill_rank(1, process)
        wait_for_events(run, "lost", 1, process)
        kill_rank(0, process)
        outcome = ended(process)
    assert outcome.code == 1, outcome.err
    outcome.fails_with("launch.rank_killed")
    assert "rank 0 (host " in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_a_stopped_rank_is_told_apart_and_replaced(undisturbed: dict[int, float], tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", **long_job(deadline_s=3))
    with training(job, tmp_path, "dp=2") as (process, run):
        wait_for_step(10, run, process)
        [stopped] = [p for p in processes_of(process) if rank_of(p) == 1]
        stopped.send_signal(signal.SIGSTOP)
        ended_well(process)
    assert [(event["rank"], event["code"]) for event in events(run, "lost")] == [(1, "launch.rank_hung")]
    assert [event["rank"] for event in events(run, "healed")] == [1]
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_ctrl_c_while_a_rank_is_replaced_saves_and_ends(
    job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, "dp=2") as (process, run):
        wait_for_step(10, run, process)
        kill_rank(1, process)
        wait_for_events(run, "lost", 1, process)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert outcome.code == 130, outcome.err
    assert "Traceback" not in outcome.err
    saved = max(losses(run))
    assert checkpoints(run)[-1] == f"step-{saved:08d}"
    again = paceline("train", job, "--plan", "dp=2", "--run", "run", "--resume", folder=tmp_path)
    assert again.code == 0, again.err
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)


@pytest.mark.slow
def test_what_a_forward_pass_wrote_into_parameters_is_undone_with_its_step(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", **long_job(model=f"{WHAT}:MomentumNet"))
    alone = losses_of(job, "dp=1")
    with training(job, tmp_path, "dp=3") as (process, run):
        for count, (rank, step) in enumerate([(2, 8), (0, 30), (1, 60)], 1):
            wait_for_step(step, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "generation", 2 * count, process)
        ended_well(process)
    assert losses(run) == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_a_rank_whose_memory_flips_is_counted_over_all_generations(tmp_path: Path) -> None:
    data = long_job()["data"] | {"held_out": 0}  # type: ignore[operator]
    job = write_job(tmp_path / "job.yaml", **long_job(model=f"{WHAT}:FlippingNet", data=data, compare_every=1))
    with training(job, tmp_path, "dp=4") as (process, run):
        wait_for_step(1, run, process)
        for count in (1, 2):
            wait_for_events(run, "corruption", count, process)
            kill_rank(0, process)
            wait_for_events(run, "generation", 2 * count, process)
        outcome = ended(process)
    assert outcome.code == 1
    assert [(event["rank"], event["times"]) for event in events(run, "corruption")] == [(1, 1), (1, 2)]
    assert "layer.0.weight" in outcome.fails_with("ranks.state_corrupted")


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_run_as_before(tmp_path: Path) -> None:
    data = points(trouble="raise")
    job = write_job(tmp_path / "job.yaml", model=f"{WHAT}:net", data=data)
    outcome = paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path)
    assert outcome.code == 1
    outcome.fails_with("data.sample_raised", kind="ValueError")
    assert not events(tmp_path / "run", "lost")


@pytest.mark.slow
def test_a_rank_that_raises_is_named_after_another_was_lost_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LOSSES_PER_HOUR", "1")
    data = points(trouble="raise", at=2000, sleep_s=0.001)
    job = write_job(tmp_path / "job.yaml", model=f"{WHAT}:net", data=data, stop={"steps": 100_000})
    with training(job, tmp_path, "dp=3") as (process, run):
        wait_for_step(3, run, process)
        kill_rank(2, process)
        outcome = ended(process)
    assert outcome.code == 1
    assert [event["rank"] for event in events(run, "lost")] == [2]
    outcome.fails_with("data.sample_raised")


def test_a_rank_that_hangs_is_named_and_the_others_finish_the_run(tmp_path: Path) -> None:
    data = points(trouble="hang")
    job = write_job(tmp_path / "job.yaml", model=f"{WHAT}:net", data=data, deadline_s=3, stop={"steps": 12})
    outcome = paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    [lost] = events(tmp_path / "run", "lost")
    assert (lost["rank"], lost["code"], lost["again"]) == (1, "launch.rank_hung", True)
    assert "data of step 4" in lost["reason"]
    assert "in come_to_grief" in lost["stack"]
    assert sorted(losses(tmp_path / "run")) == list(range(1, 13))


@pytest.mark.slow
def test_a_rank_that_hangs_in_short_steps_is_replaced_long_before_the_deadline(tmp_path: Path) -> None:
    model = {"factory": f"{WHAT}:HangingNet", "args": {"again": str(tmp_path / "hung")}}
    job = write_job(tmp_path / "job.yaml", **long_job(model=model, deadline_s=100 * DEADLINE_S))
    with training(job, tmp_path, "dp=2") as (process, run):
        ended_well(process)
    [lost] = events(run, "lost")
    assert (lost["rank"], lost["code"]) == (1, "launch.rank_hung")
    assert "compute of step" in lost["reason"]
    assert [event["rank"] for event in events(run, "healed")] == [1]
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_steps_longer_than_the_deadline_are_taken(tmp_path: Path) -> None:
    deadline_s = 8.0
    model = {"factory": f"{WHAT}:SlowNet", "args": {"seconds": 1.5 * deadline_s}}
    data = points()
    job = write_job(tmp_path / "job.yaml", model=model, data=data, deadline_s=deadline_s, stop={"steps": 3})
    outcome = paceline("train", job, "--plan", "dp=2", "--run", "run", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert not events(tmp_path / "run", "lost")


@pytest.mark.slow
def test_a_run_shrinks_and_grows_after_steps_and_its_losses_stay(
    job: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    with training(job, tmp_path, "dp=3") as (process, run):
        wait_for_step(5, run, process)
        assert paceline("scale", run, "-1", folder=tmp_path).says("rank 2")
        wait_for_events(run, "scaled", 1, process)
        wait_for_events(run, "generation", 1, process)
        assert paceline("scale", run, "+1", folder=tmp_path).says("rank 2")
        wait_for_events(run, "generation", 2, process)
        refused = paceline("scale", run, "+1", folder=tmp_path)
        ended_well(process)
    refused.fails_with("scale.all_take_part")
    assert [(event["by"], event["ranks"]) for event in events(run, "scaled")] == [(-1, [2]), (1, [2])]
    assert [event["rank"] for event in events(run, "healed")] == [2]
    assert not events(run, "lost")
    assert [event["replicas"] for event in events(run, "generation")] == [2, 3]
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4)
    assert not list(run.glob("scale-*"))
    paceline("scale", run, "-1", folder=tmp_path).fails_with("run.not_training")


@pytest.mark.slow
def test_a_run_that_does_not_recover_in_place_refuses_to_shrink_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RECOVERY", "off")
    job = write_job(tmp_path / "job.yaml", **long_job())
    with training(job, tmp_path, "dp=2") as (process, run):
        wait_for_step(2, run, process)
        refused = paceline("scale", run, "-1", folder=tmp_path)
        outcome = ended(process)
    refused.fails_with("scale.not_elastic")
    assert outcome.code == 0, outcome.err
