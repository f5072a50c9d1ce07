"""A store that cannot be reached: the run waits, then saves, stops, and can go on bit for bit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import (
    Outcome,
    ended,
    ended_well,
    events,
    in_a_process,
    losses,
    paceline,
    training,
    wait_for,
    wait_for_events,
    wait_for_step,
    write_job,
)
from paceline.job.partition import Partition, PartitionSpec
from paceline.state.manifest import checkpoints
from simulated.environment import Simulated
from small_jobs import Points

SAMPLES, BATCH = 70, 8  # 9 steps an epoch, the last one of 6 samples
STEPS_PER_EPOCH = 9


def index_at(epoch: int, step: int, replica: int, replicas: int) -> int:
    """A sample that this replica reads in this batch (both count from 0)."""
    partition = Partition(
        PartitionSpec(), samples=SAMPLES, global_batch=BATCH, seed=0, replica=replica, replicas=replicas
    )
    return int(next(iter(partition.batches(epoch, step)))[-1])


def written(
    folder: Path, lost: dict[str, int], *, model: str = "with_dropout", of: str = "factory", **changes: Any
) -> None:
    """A job of 20 steps whose data set `of` is lost while there is a file `outage`."""
    args: dict[str, Any] = {"samples": SAMPLES, "lost": lost, "while_exists": str(folder / "outage")}
    args |= {key: changes.pop(key) for key in ("times", "may_pass") if key in changes}
    job: dict[str, Any] = {
        "model": {"factory": f"small_jobs:{model}"},
        "data": {"kind": "dataset", "factory": "small_jobs:near_points", "held_out": 0, "args": args}
        | {of: "small_jobs:Stored"},
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


@pytest.mark.parametrize(("plan", "rank"), [("dp=1", 0), ("dp=1 num_workers=2", 0), ("dp=2 balance=off", 1)])
def test_a_batch_is_read_again_until_the_store_is_back(tmp_path: Path, plan: str, rank: int) -> None:
    lost = {"index": index_at(0, 5, rank, rank + 1), "epoch": 0, "rank": rank}
    written(tmp_path, lost, times=2, may_pass=True)
    assert train(tmp_path, plan, "run").code == 0
    [retry] = events(tmp_path / "run", "data_retry")
    assert (retry["rank"], retry["step"], retry["data"]) == (rank, 6, "training")
    assert retry["seconds"] > 0
    (tmp_path / "outage").unlink()
    assert train(tmp_path, plan, "undisturbed").code == 0
    assert not events(tmp_path / "undisturbed", "data_retry")
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


def test_a_store_that_stays_away_stops_the_run_before_its_deadline(tmp_path: Path) -> None:
    lost = {"index": index_at(0, 5, 1, 2), "epoch": 0, "rank": 1}
    written(tmp_path, lost, may_pass=True, deadline_s=12)
    assert train(tmp_path, "dp=2", "run").fails_with("storage.batch_unreadable", step=5)
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [5]


def test_a_batch_after_the_last_step_is_not_needed(tmp_path: Path) -> None:
    written(tmp_path, {"index": index_at(0, 5, 0, 1), "epoch": 0, "rank": 0}, stop={"steps": 5})
    assert train(tmp_path, "dp=1", "run").code == 0


@pytest.mark.parametrize(
    ("plan", "epoch", "step", "saved"),
    [
        ("dp=2 sync=diloco:4", 0, 5, 4),
        pytest.param("dp=2 sync=local:4", 0, 7, 4, marks=pytest.mark.slow),
        pytest.param("dp=2 sync=local:4", 1, 0, 9, marks=pytest.mark.slow),  # the first batch of an epoch
    ],
)
def test_under_a_local_rule_all_ranks_save_at_the_synchronization_before_the_batch(
    tmp_path: Path, plan: str, epoch: int, step: int, saved: int
) -> None:
    written(tmp_path, {"index": index_at(epoch, step, 1, 2), "epoch": epoch, "rank": 1})
    train(tmp_path, plan, "run").fails_with("storage.batch_unreadable", step=saved)
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [saved]
    (tmp_path / "outage").unlink()
    assert train(tmp_path, plan, "run", "--resume").code == 0
    assert train(tmp_path, plan, "undisturbed").code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


def test_with_loader_processes_a_local_rule_ends_the_run_with_its_newest_checkpoint(tmp_path: Path) -> None:
    lost = {"index": index_at(0, 5, 1, 2), "epoch": 0, "rank": 1}
    written(tmp_path, lost, checkpoint={"every_steps": 4})
    plan = "dp=2 sync=diloco:4 num_workers=1"
    assert train(tmp_path, plan, "run").fails_with("test.away", url="s3://bucket/shard")
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [4]


def evaluations(run: Path) -> dict[int, Any]:
    return {event["step"]: event["metrics"] for event in events(run, "evaluation")}


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 balance=off",
        "tp=2",
        "dp=2 sync=diloco:4",
        pytest.param("dp=2 sync=local:4", marks=pytest.mark.slow),
        pytest.param("pp=2 microbatches=2", marks=pytest.mark.slow),
        pytest.param("fsdp=2", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_save_if_one_cannot_read_the_data_of_an_evaluation(tmp_path: Path, plan: str) -> None:
    model = "plain" if plan.startswith(("tp", "pp", "fsdp")) else "with_dropout"
    lost = {"index": 40, "epoch": 0, "rank": 1}
    written(tmp_path, lost, model=model, of="held_out_factory", evaluate={"every_steps": 8})
    assert "s3://bucket/shard is away" in train(tmp_path, plan, "run").fails_with("storage.batch_unreadable", step=8)
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [8]
    assert not evaluations(tmp_path / "run")
    (tmp_path / "outage").unlink()
    assert train(tmp_path, plan, "run", "--resume").code == 0
    assert train(tmp_path, plan, "undisturbed").code == 0
    assert evaluations(tmp_path / "run").keys() == {8, 16, 20}
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "undisturbed")
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")


@pytest.mark.parametrize("of", ["held_out_factory", "test"])
def test_the_weights_are_saved_if_the_data_of_the_last_evaluation_cannot_be_read(tmp_path: Path, of: str) -> None:
    written(tmp_path, {"index": 40, "epoch": 0, "rank": 0}, of=of, evaluate={"every_epochs": 5})
    train(tmp_path, "dp=1", "run").fails_with("storage.batch_unreadable", step=20)
    assert [at for at, _ in checkpoints(tmp_path / "run" / "checkpoints")] == [20]
    (tmp_path / "outage").unlink()
    assert train(tmp_path, "dp=1", "run", "--resume").code == 0
    assert len(events(tmp_path / "run", "test" if of == "test" else "evaluation")) == 1


class Server:
    """A process that serves the points of `small_jobs:Served`, and can stop to answer."""

    def __init__(self, folder: Path) -> None:
        (folder / "points").mkdir()
        for i, point in enumerate(Points(SAMPLES).inputs):
            (folder / "points" / str(i)).write_bytes(point.numpy().tobytes())
        command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, "--directory", folder / "points"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        port = re.search(r"port (\d+)", self.process.stdout.readline())
        assert port is not None
        self.url, self.unanswered = f"http://127.0.0.1:{port[1]}", folder / "unanswered"
        write_job(
            folder / "job.yaml",
            model={"factory": "small_jobs:plain"},
            data={
                "kind": "dataset",
                "factory": "small_jobs:slow_points",
                "held_out_factory": "small_jobs:Served",
                "held_out": 0,
                "args": {"url": self.url, "note": str(self.unanswered)},
            },
            global_batch=BATCH,
            stop={"steps": 20},
            checkpoint={"every_steps": 1000},
            evaluate={"every_steps": 5},
            deadline_s=12,
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()


def test_an_evaluation_waits_for_a_server_that_does_not_answer(tmp_path: Path, server: Server) -> None:
    with training(tmp_path / "job.yaml", tmp_path, "dp=2") as (process, run):
        wait_for_step(1, run, process)
        wait_for_events(run, "evaluation", 1, process)
        server.stop()
        wait_for(server.unanswered.exists, process)
        server.go_on()
        ended_well(process)
    assert evaluations(run).keys() == {5, 10, 15, 20}
    retries = events(run, "data_retry")
    assert retries
    assert {retry["data"] for retry in retries} == {"evaluation"}
    assert {retry["step"] for retry in retries} <= {10, 15, 20}


def test_a_server_that_never_answers_again_ends_the_run_after_an_evaluation(tmp_path: Path, server: Server) -> None:
    with training(tmp_path / "job.yaml", tmp_path, "dp=2") as (process, run):
        wait_for_step(1, run, process)
        wait_for_events(run, "evaluation", 1, process)
        server.stop()
        ended(process).fails_with("storage.batch_unreadable")
    [saved] = [at for at, _ in checkpoints(run / "checkpoints")]
    assert saved in (10, 15, 20)
    assert max(evaluations(run)) < saved
    server.go_on()
    assert train(tmp_path, "dp=2", "run", "--resume").code == 0
    assert evaluations(run).keys() == {5, 10, 15, 20}
