"""Streams in jobs (`data: {kind: iterable}`): each sample once per epoch, on any ranks, through kills and resumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import own_streams
from commands import ended_well, paceline, processes_of, rank_of, training, wait_for_events, wait_for_step, write_job
from own_streams import KINDS, SAMPLES, SEEN, Resumable
from paceline.errors import DataError, JobError
from paceline.job.job import Job
from paceline.job.streams import Stream
from paceline.run.record.run import Run
from ranks import RankError, Ranks
from refusals import raises
from small_jobs import facts, new_run, small_job, train_as_rank, train_here

OWN = own_streams.__file__

pytestmark = pytest.mark.usefixtures("loader_processes_end")


def job(kind: str = "sharded", **changes: Any) -> Job:
    data = {"kind": "iterable", "factory": "own_streams:of", "args": {"kind": kind}, "collate": "own_streams:seen"}
    return small_job(**({"data": data | changes.pop("data", {}), "stop": {"epochs": 2}, "global_batch": 8} | changes))


def fast_only(cases: Iterable[tuple[Any, ...]], *fast: tuple[Any, ...]) -> list[Any]:
    """The cases, of which all but `fast` are slow tests."""
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def counted(folder: Path) -> Counter[int]:
    return Counter(int(n) for file in folder.iterdir() if file.name.isdigit() for n in file.read_text().split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SEEN, str(tmp_path / "seen"))
    (tmp_path / "seen").mkdir()
    return tmp_path


@pytest.mark.parametrize(("kind", "workers"), fast_only(product(KINDS, (0, 2)), *product(KINDS, (0,)), ("workers", 2)))
def test_one_process_trains_each_sample_once_per_epoch(folder: Path, kind: str, workers: int) -> None:
    run = train_here(folder / "run", job(kind, data={"num_workers": workers}))
    assert counted(folder / "seen") == dict.fromkeys(range(SAMPLES), 2)
    assert sum(step["samples"] for step in run.steps(0)) == 2 * SAMPLES
    assert {step["epoch"] for step in run.steps(0)} == {0, 1}


@pytest.mark.parametrize(
    ("kind", "count", "workers"), fast_only(product(KINDS, (2, 3), (0, 2)), ("plain", 2, 0), ("files", 3, 2))
)
def test_ranks_train_each_sample_once_per_epoch(
    folder: Path, ranks: Ranks, kind: str, count: int, workers: int
) -> None:
    run = new_run(folder / "run", job(kind, data={"num_workers": workers}), f"dp={count}")
    ranks(count, train_as_rank, folder / "run", backend="shm")
    assert counted(folder / "seen") == dict.fromkeys(range(SAMPLES), 2)
    of_ranks = [run.steps(rank) for rank in range(count)]
    assert sum(step["samples"] for step in of_ranks[0]) == 2 * SAMPLES
    for steps in zip(*of_ranks, strict=True):
        assert sum(step["local_samples"] for step in steps) == steps[0]["samples"] <= 8
        assert len({step["loss"] for step in steps}) == 1


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["event"] == name]


def said(run: Run) -> list[str]:
    return [text for event in events(run, "stream") for text in event["said"]]


def test_a_stream_without_help_costs_what_its_warning_says(folder: Path, ranks: Ranks) -> None:
    run = new_run(folder / "run", job("plain"), "dp=2")
    ranks(2, train_as_rank, folder / "run", backend="shm")
    assert len(said(run)) == 2
    last = events(run, "stream_read")[-1]
    assert last["read_per_used"] == 2.0
    assert last["read_s"] > 0
    other = new_run(folder / "other", job("resumable"), "dp=2")
    ranks(2, train_as_rank, folder / "other", backend="shm")
    assert not said(other)
    assert events(other, "stream_read")[-1]["read_per_used"] == 1.0


def stream_of(job: Job) -> Stream:
    found = job.data.build(input_shape=None, seed=0).train
    assert isinstance(found, Stream)
    return found


@pytest.mark.parametrize(
    ("kind", "reason"), [("plain", "indivisible"), ("one file", "file"), ("files", None), ("sharded", None)]
)
def test_a_stream_knows_why_it_has_one_part(kind: str, reason: str | None) -> None:
    assert stream_of(job(kind)).one_part == reason
    assert stream_of(job("files", data={"parts": 1})).one_part == "setting"


def test_each_reason_for_one_part_has_its_own_advice(folder: Path, ranks: Ranks) -> None:
    advice = set()
    for kind, data in {"plain": {}, "one file": {}, "files": {"parts": 1}}.items():
        run = new_run(folder / kind, job(kind, data=data, stop={"steps": 1}), "dp=2")
        ranks(2, train_as_rank, folder / kind, backend="shm")
        advice.add(said(run)[0])
    assert len(advice) == 3


@pytest.mark.parametrize(
    ("kind", "workers"), fast_only(product(KINDS, (0, 2)), ("plain", 0), ("resumable", 0), ("files", 2))
)
def test_a_run_resumes_in_mid_epoch_bit_for_bit(folder: Path, kind: str, workers: int) -> None:
    values: dict[str, Any] = {"data": {"num_workers": workers}, "checkpoint": {"every_steps": 3}}
    whole = train_here(folder / "whole", job(kind, stop={"steps": 12}, **values))
    train_here(folder / "run", job(kind, stop={"steps": 5}, **values))
    assert facts(train_here(folder / "run", job(kind, stop={"steps": 12}, **values))) == facts(whole)


def test_a_state_spares_reading_again_what_was_used(folder: Path) -> None:
    for kind in ("resumable", "whole resumable"):
        train_here(folder / kind, job(kind, stop={"steps": 5}))
        Resumable.reads = 0
        run = train_here(folder / kind, job(kind, stop={"epochs": 1}))
        assert not any("read_again" in event for event in events(run, "stream_read"))
        assert sum(event["read"] for event in events(run, "stream_read")[-1:]) == SAMPLES - 40


# a stream that is divided by `get_worker_info` refuses more ranks than it began with, see below
RANK_CHANGES = [
    (kind, counts)
    for kind in KINDS
    for counts in ((2, 1), (1, 2), (2, 3))
    if kind != "workers" or counts[1] < counts[0]
]


@pytest.mark.parametrize(
    ("kind", "counts"), fast_only(RANK_CHANGES, ("files", (2, 3)), ("plain", (1, 2)), ("workers", (2, 1)))
)
def test_an_epoch_goes_on_on_another_number_of_ranks(
    folder: Path, ranks: Ranks, kind: str, counts: tuple[int, int]
) -> None:
    for count, stop in zip(counts, ({"steps": 4}, {"epochs": 2}), strict=True):
        new_run(folder / "run", job(kind, stop=stop), f"dp={count}")
        ranks(count, train_as_rank, folder / "run", backend="shm")
    assert counted(folder / "seen") == dict.fromkeys(range(SAMPLES), 2)


def test_fewer_parts_than_ranks_are_refused_before_training(folder: Path, ranks: Ranks) -> None:
    new_run(folder / "run", job("workers", stop={"steps": 4}), "dp=2")
    ranks(2, train_as_rank, folder / "run", backend="shm")
    new_run(folder / "run", job("workers"), "dp=3")
    with raises(RankError, "data.parts_too_few", parts=2, replicas=3):
        ranks(3, train_as_rank, folder / "run", backend="shm")
    new_run(folder / "other", job("files", data={"parts": 2}), "dp=3")
    with raises(RankError, "data.parts_too_few", parts=2, replicas=3):
        ranks(3, train_as_rank, folder / "other", backend="shm")


def not_trained(run: Path) -> list[int]:
    """The samples that moved no weight."""
    outcome = paceline("export", run, "tally.safetensors", folder=run)
    assert outcome.code == 0, outcome.err
    [weights] = load_file(run / "tally.safetensors").values()
    return [number for number, weight in enumerate(weights.tolist()) if weight == 0]


@pytest.mark.parametrize(
    ("kind", "workers"), fast_only(product(("sharded", "resumable", "plain", "files"), (0, 2)), ("files", 0))
)
def test_others_take_over_the_parts_of_a_killed_rank(kind: str, workers: int, tmp_path: Path) -> None:
    """Each sample moves one weight, and the numbers of samples of the steps add up, so each was trained once."""
    data = {"kind": "iterable", "factory": f"{OWN}:of", "args": {"kind": kind, "sleep_s": 0.03}, "num_workers": workers}
    values = {"model": {"factory": f"{OWN}:Tally"}, "loss": f"{OWN}:mean_output", "global_batch": 4}
    sgd = {"optimizer": {"name": "sgd", "lr": 0.1}, "stop": {"epochs": 1}, "deadline_s": 60}
    job = write_job(tmp_path / "job.yaml", data=data, **values, **sgd)
    with training(job, tmp_path, "dp=3") as (process, run):
        wait_for_step(4, run, process)
        # loader processes have the title of their rank
        min((p for p in processes_of(process) if rank_of(p) == 1), key=lambda p: p.create_time()).kill()
        wait_for_events(run, "lost", 1, process)
        ended_well(process)
    assert sum(step["samples"] for step in Run(run).steps()) == SAMPLES
    assert not not_trained(run)
    assert not events(Run(run), "resume"), "nothing was read from the disk"


PLANS = ("fsdp=2", "tp=2", "pp=2 microbatches=2", "dp=2 fsdp=2", "dp=2 sync=local:4")


@pytest.mark.parametrize(
    ("kind", "plan"),
    fast_only(product(("sharded", "plain"), PLANS), ("plain", "tp=2"), ("sharded", "dp=2 sync=local:4")),
)
def test_every_plan_trains_on_a_stream(folder: Path, ranks: Ranks, kind: str, plan: str) -> None:
    run = new_run(folder / "run", job(kind), plan)
    ranks(run.plan.ranks, train_as_rank, folder / "run", backend="shm")
    trained = counted(folder / "seen")
    # before training, some plans look at the shape of a batch of the first sample
    assert trained.pop(0) >= 2
    assert trained == dict.fromkeys(range(1, SAMPLES), 2 * run.plan.tp * run.plan.pp)
    assert sum(step["samples"] for step in run.steps()) == 2 * SAMPLES


def test_the_epoch_ends_before_the_first_batch_that_is_not_full(folder: Path, ranks: Ranks) -> None:
    run = new_run(folder / "run", job("files", drop_last=True), "dp=2")
    ranks(2, train_as_rank, folder / "run", backend="shm")
    assert {step["samples"] for step in run.steps()} == {8}


@pytest.mark.parametrize("kind", ["sharded", "plain"])
def test_a_limit_is_the_number_of_samples_of_an_epoch(folder: Path, kind: str) -> None:
    run = train_here(folder / "run", job(kind, data={"limit": 13}))
    assert sum(step["samples"] for step in run.steps()) == 2 * 13


def test_evaluations_count_the_epochs_of_a_stream(folder: Path) -> None:
    data = {"held_out_factory": "own_streams:of", "test": "own_streams:of"}
    run = train_here(folder / "run", job("sharded", data=data, evaluate={"every_epochs": 2}, stop={"epochs": 4}))
    assert [(event["step"], event["epoch"]) for event in events(run, "evaluation")] == [(16, 2.0), (32, 4.0)]
    assert run.test_metrics.keys() == {"loss"}


def test_a_run_that_rewinds_in_a_stream_goes_on_at_its_position(folder: Path) -> None:
    values = {"model": {"factory": "own_streams:BadOnce"}, "nonfinite": "rewind", "stop": {"epochs": 2}}
    run = train_here(folder / "run", job("resumable", **values))
    assert len(events(run, "rewind")) == 1
    # the skipped step is in the record as well
    assert sum(step["samples"] for step in run.steps()) == 2 * SAMPLES
    assert len(run.steps()) == 16


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"data": {"held_out": 0.1}}, "data.share_of_stream"),
        ({"data": {"test": 0.1}}, "data.share_of_stream"),
        ({"partition": "stratified"}, "partition.of_stream"),
        ({"partition": {"weights": [1, 2]}}, "partition.of_stream"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_in_the_job(changes: dict[str, Any], code: str) -> None:
    with raises(JobError, code):
        job(**changes)


@pytest.mark.parametrize(
    ("kind", "data", "code"),
    [
        ("plain", {"parts": 4}, "data.stream_indivisible"),
        ("equal parts", {}, "data.parts_equal"),
        ("own iterator", {}, "data.own_iterator"),
        ("large state", {}, "data.stream_state_invalid"),
        ("plain", {"args": {"kind": "plain", "samples": 0}}, "data.stream_without_samples"),
        ("raises", {}, "data.stream_raised"),
        ("points", {}, "data.not_iterable"),
    ],
)
def test_a_stream_that_cannot_be_read_is_refused_before_training(kind: str, data: dict[str, Any], code: str) -> None:
    with raises(DataError, code):
        job(kind, data=data).data.build(input_shape=None, seed=0)


def test_a_stream_under_kind_dataset_is_told_its_kind() -> None:
    with raises(DataError, "data.iterable_factory", factory="own_streams:of"):
        job("plain", data={"kind": "dataset"}).data.build(input_shape=None, seed=0)


def test_a_stream_that_comes_once_ends_the_run_with_its_reason(folder: Path) -> None:
    with raises(DataError, "data.stream_over", epoch=1):
        train_here(folder / "run", job("once"))


def test_parity_is_checked_on_the_first_samples_of_a_stream(tmp_path: Path) -> None:
    changes = {"data": {"kind": "iterable", "factory": f"{OWN}:of", "args": {"kind": "sharded"}}}
    small = write_job(tmp_path / "job.yaml", **changes, global_batch=8, model={"factory": f"{OWN}:net"})
    assert paceline("check", small, "--plan", "dp=2", folder=tmp_path).says("parity holds")
    paceline("train", small, "--plan", "dp=2 sync=server:staleness=2", folder=tmp_path).fails_with(
        "plan.servers_and_job"
    )
