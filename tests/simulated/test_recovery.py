"""Ranks on accelerators are killed, or lose their device, during a run: the other ranks continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

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
    wait_for_events,
    wait_for_step,
    write_job,
)
from simulated.environment import Simulated

WHAT = Path(__file__).parents[1] / "faults" / "what_goes_wrong.py"
STEPS = 100


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a job of 100 steps, 6 in an epoch, with an evaluation after each epoch."""
    return write_job(
        tmp_path_factory.mktemp("job") / "job.yaml",
        model={"factory": f"{WHAT}:net", "args": {"width": 16}},
        data=points(0.15, samples=112, sleep_s=0.003),
        optimizer={"name": "adamw", "lr": 0.01},
        stop={"steps": STEPS},
        checkpoint={"every_steps": 1000},
        deadline_s=10,
    )


@pytest.fixture(scope="module")
def undisturbed(job: Path) -> dict[int, float]:
    """Return the losses of the undisturbed job."""
    return losses_of(job)


@pytest.fixture
def devices(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give simulated devices to every process that starts from now on."""

    def give(**settings: object) -> None:
        for name, value in simulated.environment(devices=8, **settings).items():  # type: ignore[arg-type]
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize(
    ("plan", "kills"),
    [
        ("dp=3", [(2, 4), (0, 12)]),
        pytest.param("dp=2 fsdp=2", [(3, 4), (0, 12)], marks=pytest.mark.slow),
        pytest.param("dp=2 tp=2", [(3, 4), (0, 12)], marks=pytest.mark.slow),
        pytest.param("dp=2 pp=2 microbatches=2", [(3, 4), (0, 12)], marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_costs_no_step_and_survivors_keep_their_process(
    plan: str,
    kills: list[tuple[int, int]],
    job: Path,
    undisturbed: dict[int, float],
    devices: Callable[..., None],
    tmp_path: Path,
) -> None:
    devices()
    with training(job, tmp_path, plan) as (process, run):
        wait_for_step(1, run, process)
        before = {rank_of(rank): rank.pid for rank in processes_of(process)}
        for count, (rank, step) in enumerate(kills, 1):
            wait_for_step(step, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "generation", 2 * count, process)
        after = {rank_of(rank): rank.pid for rank in processes_of(process)}
        ended_well(process)
    assert {rank for rank in before if before[rank] != after[rank]} == {rank for rank, _ in kills}
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert [event["rank"] for event in events(run, "healed")] == [rank for rank, _ in kills]
    assert not events(run, "resume"), "nothing was read from the disk"


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "dp=3 sync=local:4",
        "dp=3 sync=diloco:4",
        "dp=3 sync=diloco:6,fragments=2,overlap=2 compress=topk:0.2",
        "dp=3 compress=topk:0.2",
        "dp=3 compress=powersgd:2",
    ],
)
def test_a_killed_rank_with_local_steps_or_compression_is_replaced(
    plan: str, job: Path, undisturbed: dict[int, float], devices: Callable[..., None], tmp_path: Path
) -> None:
    devices()
    with training(job, tmp_path, plan) as (process, run):
        wait_for_step(1, run, process)
        before = {rank_of(rank): rank.pid for rank in processes_of(process)}
        for count, (rank, step) in enumerate([(2, 9), (0, 40)], 1):
            wait_for_step(step, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "generation", 2 * count, process)
        after = {rank_of(rank): rank.pid for rank in processes_of(process)}
        ended_well(process)
    assert {rank for rank in before if before[rank] != after[rank]} == {0, 2}
    assert [event["rank"] for event in events(run, "healed")] == [2, 0]
    assert not events(run, "resume"), "nothing was read from the disk"
    found = losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    late = range(STEPS - 29, STEPS + 1)
    assert mean(found[step] for step in late) == pytest.approx(mean(undisturbed[step] for step in late), abs=0.15)


def test_a_step_whose_times_were_unknown_when_its_rank_was_killed_stays_in_the_record(
    devices: Callable[..., None], tmp_path: Path
) -> None:
    devices()
    optimizer = {"name": f"{WHAT}:KilledInStep", "lr": 0.1, "args": {"at": 9, "again": str(tmp_path / "again")}}
    job = write_job(
        tmp_path / "job.yaml",
        model=f"{WHAT}:net",
        data=points(sleep_s=0.003),
        optimizer=optimizer,
        stop={"steps": 40},
        deadline_s=10,
    )
    with training(job, tmp_path, "dp=2") as (process, run):
        ended_well(process)
    assert [event["rank"] for event in events(run, "lost")] == [0]
    assert sorted(losses(run)) == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp=2", "pp=2 microbatches=2"])
def test_a_rank_of_the_only_replica_comes_back_from_copies_in_the_hosts_memory(
    plan: str, job: Path, undisturbed: dict[int, float], devices: Callable[..., None], tmp_path: Path
) -> None:
    devices()
    with training(job, tmp_path, plan) as (process, run):
        wait_for_step(8, run, process)
        kill_rank(1, process)
        wait_for_events(run, "generation", 1, process)
        ended_well(process)
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert len(events(run, "went_back")) == 1
    assert not events(run, "resume"), "nothing was read from the disk"


def test_a_device_that_is_lost_again_and_again_is_left_out_and_no_step_is_lost(
    job: Path, undisturbed: dict[int, float], devices: Callable[..., None], tmp_path: Path
) -> None:
    devices(fault="lost:1:400")
    with training(job, tmp_path, "dp=2") as (process, run):
        ended_well(process)
    lost = events(run, "lost")
    assert {(event["rank"], event["code"]) for event in lost} == {(1, "launch.device_failed")}
    assert [event["again"] for event in lost][-1:] == [len(lost) < 3]
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert not events(run, "resume")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "plan", "code"),
    [
        ("ecc:1:400:once", "dp=2", "launch.device_failed"),
        ("lost:3:900:once", "dp=2 fsdp=2", "launch.device_failed"),
        ("hang:1:777:once", "dp=2", "launch.rank_hung"),
    ],
)
def test_a_rank_whose_device_fails_or_hangs_is_replaced(
    fault: str,
    plan: str,
    code: str,
    job: Path,
    undisturbed: dict[int, float],
    devices: Callable[..., None],
    tmp_path: Path,
) -> None:
    devices(fault=fault)
    with training(job, tmp_path, plan) as (process, run):
        ended_well(process)
    rank = int(fault.split(":")[1])
    assert [(event["rank"], event["code"], event["again"]) for event in events(run, "lost")] == [(rank, code, True)]
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert not events(run, "resume")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["failure:1:400", "memory:1:400", "lost:1:1"])
def test_an_error_that_the_users_code_may_have_caused_ends_the_run(
    fault: str, job: Path, devices: Callable[..., None], tmp_path: Path
) -> None:
    devices(fault=fault)
    with training(job, tmp_path, "dp=2") as (process, run):
        assert ended(process).code == 1
    assert not events(run, "lost")
