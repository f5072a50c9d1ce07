"""A store that cannot be reached in mid-epoch: the run waits, then saves, stops, and can go on bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import Outcome, in_a_process, losses, paceline, write_job
from paceline.job.partition import Partition, PartitionSpec
from paceline.state.manifest import checkpoints
from simulated.environment import Simulated

SAMPLES, BATCH = 70, 8  # 9 steps an epoch, the last one of 6 samples
STEPS_PER_EPOCH = 9


def index_at(epoch: int, step: int, replica: int, replicas: int) -> int:
    """A sample that this replica reads in this batch (both count from 0)."""
    partition = Partition(
        PartitionSpec(), samples=SAMPLES, global_batch=BATCH, seed=0, replica=replica, replicas=replicas
    )
    return int(next(iter(partition.batches(epoch, step)))[-1])


def written(folder: Path, lost: dict[str, int], *, model: str = "with_dropout", **changes: Any) -> None:
    """A job of 20 steps whose data set is lost while there is a file `outage`."""
    args: dict[str, Any] = {"samples": SAMPLES, "lost": lost, "while_exists": str(folder / "outage")}
    args |= {key: changes.pop(key) for key in ("times", "may_pass") if key in changes}
    job: dict[str, Any] = {
        "model": {"factory": f"small_jobs:{model}"},
        "data": {"kind": "dataset", "factory": "small_jobs:Stored", "held_out": 0, "args": args},
        "global_batch": BATCH,
        "stop": {"steps": 20},
        "checkpoint": {"every_steps": 1000},
    }
    write_job(folder / "job.yaml", **(job | changes))
    (folder / "outage").touch()


def train(folder: Path, plan: str, run: str, *options: object) -> Outcome:
    return paceline("train", folder / "job.yaml", "--plan", plan, "--run", folder / run, *options, folder=folder)


def weights(run: Path) -> bytes:
    """The newest checkpoint, but for its manifest, which has times."""
    _, newest = checkpoints(run / "checkpoints")[-1]
    return b"".join(file.read_bytes() for file in sorted(newest.glob("*.safetensors")))


CASES = {  # plan, and rank, replica, number of replicas, epoch and step of the lost batch
    "alone": ("dp=1", 0, 0, 1, 1, 3),
    "two replicas": ("dp=2 balance=off", 1, 1, 2, 0, 5),
    "loader processes": ("dp=2 balance=off num_workers=2", 1, 1, 2, 0, 5),
    "the first batch of an epoch": ("dp=2 balance=off", 1, 1, 2, 1, 0),
    "the first batch of all": ("dp=2 balance=off", 0, 0, 2, 0, 0),
    "one of two tensor-parallel ranks": ("tp=2", 1, 0, 1, 1, 3),
    "the last stage": ("pp=2 microbatches=2", 1, 0, 1, 1, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_save_after_the_last_step_and_the_run_goes_on_bit_for_bit(tmp_path: Path, case: str) -> None:
    plan, rank, replica, replicas, epoch, step = CASES[case]
    lost = {"index": index_at(epoch, step, replica, replicas), "epoch": epoch, "rank": rank}
    before = STEPS_PER_EPOCH * epoch + step
    written(tmp_path, lost, model="with_dropout" if "dp" in plan else "plain")
    stopped = train(tmp_path, plan, "run")
    assert stopped.code == 1
    assert "s3://bucket/shard is away" in stopped.fails_with("storage.batch_unreadable", step=before)
    assert max(losses(tmp_path / "run"), default=0) == before
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [before]
    (tmp_path / "outage").unlink()
    assert train(tmp_path, plan, "run", "--resume").code == 0
    assert train(tmp_path, plan, "undisturbed").code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize(("epoch", "step"), [(0, 5), (1, 1)])
def test_ranks_that_run_ahead_of_their_accelerators_stop_at_the_same_step(
    tmp_path: Path, simulated: Simulated, epoch: int, step: int
) -> None:
    written(tmp_path, {"index": index_at(epoch, step, 1, 2), "epoch": epoch, "rank": 1})
    on = simulated.environment()
    train = partial(in_a_process, "train", tmp_path / "job.yaml", "--plan", "dp=2 balance=off", "--run")
    before = STEPS_PER_EPOCH * epoch + (step if step > 1 else 0)
    stopped = train("run", folder=tmp_path, **on)
    assert f"after step {before}," in stopped.fails_with("storage.batch_unreadable")
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [before]
    (tmp_path / "outage").unlink()
    assert train("run", "--resume", folder=tmp_path, **on).code == 0
    assert train("undisturbed", folder=tmp_path, **on).code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_read_again_until_the_store_is_back(tmp_path: Path, workers: int) -> None:
    written(tmp_path, {"index": index_at(0, 5, 0, 1), "epoch": 0, "rank": 0}, times=2, may_pass=True)
    assert train(tmp_path, f"dp=1 num_workers={workers}" if workers else "dp=1", "run").code == 0
    (tmp_path / "outage").unlink()
    assert train(tmp_path, "dp=1", "undisturbed").code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


def test_a_store_that_stays_away_stops_the_run_before_its_deadline(tmp_path: Path) -> None:
    lost = {"index": index_at(0, 5, 1, 2), "epoch": 0, "rank": 1}
    written(tmp_path, lost, may_pass=True, deadline_s=12)
    assert train(tmp_path, "dp=2", "run").fails_with("storage.batch_unreadable", step=5)
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [5]


def test_a_batch_after_the_last_step_is_not_needed(tmp_path: Path) -> None:
    written(tmp_path, {"index": index_at(0, 5, 0, 1), "epoch": 0, "rank": 0}, stop={"steps": 5})
    assert train(tmp_path, "dp=1", "run").code == 0


def test_under_a_local_rule_the_run_ends_with_its_newest_checkpoint(tmp_path: Path) -> None:
    lost = {"index": index_at(0, 5, 1, 2), "epoch": 0, "rank": 1}
    written(tmp_path, lost, checkpoint={"every_steps": 4})
    assert train(tmp_path, "dp=2 sync=diloco:4", "run").fails_with("test.away", url="s3://bucket/shard")
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [4]
