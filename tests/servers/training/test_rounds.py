"""Workers that train alone for rounds of steps, and push how far they came."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import ended, events, kill_rank, losses, paceline, training, wait_for_events, wait_for_step, write_job
from paceline_server.training.pieces import Rounds
from servers.training.test_run import job_in as small_job_in
from servers.training.test_run import newest
from servers.training.test_split import job_in, trained

# with the outer step of a plain sum a single worker computes what one process does
ALONE = "server:staleness=1,servers=2,backup=off,period=5,lr=1,momentum=0 precision=fp64"
STEPS = 60  # of the small job, with a boundary after every 6 and 20


@given(period=st.integers(1, 9), begin=st.integers(0, 50), every=st.sets(st.integers(1, 30), min_size=1, max_size=3))
def test_rounds_cover_every_batch_once_and_end_at_each_boundary(period: int, begin: int, every: set[int]) -> None:
    rounds = Rounds(period, begin, lambda step: min((step // n + 1) * n for n in every))
    found = [rounds.batches(number) for number in range(40)]
    assert found[0].start == begin
    assert all(one.stop == other.start for one, other in pairwise(found))
    assert all(0 < len(one) <= period for one in found)
    for number, batches in enumerate(found):
        assert rounds.until(batches.stop) == number + 1
        assert rounds.whole(batches.start + 1) == batches.stop
        if period > 1:
            assert not any(batch % n == 0 for batch in batches[1:] for n in every), "it goes over a boundary"


def test_a_worker_alone_trains_as_one_process(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    alone = trained(job, "dp=1 precision=fp64", "alone")
    assert trained(job, f"dp=1 sync={ALONE}", "served") == pytest.approx(alone, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["", "fsdp=2", "tp=2", "pp=2 microbatches=2"])
def test_a_worker_that_resumes_within_a_round_does_so_too(split: str, tmp_path: Path) -> None:
    job, begun = job_in(tmp_path), job_in(tmp_path, steps=17, name="begun")
    alone = trained(job, "dp=1 precision=fp64", "alone")
    plan = f"dp=1 {split} sync={ALONE}"
    trained(begun, plan, "served")
    assert trained(job, plan, "served", "--resume") == pytest.approx(alone, rel=1e-9)
    assert [event["step"] for event in events(tmp_path / "served", "resume")] == [17]
    [told] = events(tmp_path / "served", "served")[-1]["workers"].values()
    assert told["pushes"] == 2, "the steps from 17 to 24: a round of 5, and what is left"


@pytest.mark.slow
def test_the_outer_momentum_goes_over_to_the_checkpoint_and_back(tmp_path: Path) -> None:
    job, begun = job_in(tmp_path), job_in(tmp_path, steps=12, name="begun")
    plan = "dp=1 sync=server:staleness=1,backup=off,period=5,momentum=0.6 precision=fp64"
    whole = trained(job, plan, "whole")
    trained(begun, plan, "parts")
    assert trained(job, plan, "parts", "--resume") == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("more", ["momentum=0,lr=1,staleness=inf", "staleness=1,servers=2 compress=int8"])
def test_several_workers_learn_by_rounds_and_every_piece_counts_once(more: str, tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job.yaml",
        model={"zoo": "mlp", "args": {"hidden": 32}},
        data="digits",
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch=64,
        stop={"steps": STEPS},
        evaluate={"every_steps": 6},
        checkpoint={"every_steps": 20},
    )
    plan = f"dp=2 sync=server:period=4,backup=off,{more}"
    found = paceline("train", job, "--plan", plan, "--run", "r", folder=tmp_path)
    assert found.code == 0, found.err
    run = tmp_path / "r"
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    told = events(run, "served")[-1]["workers"].values()
    boundaries = sorted({*range(0, STEPS + 1, 6), *range(0, STEPS + 1, 20)})
    rounds = sum(-(-(after - before) // 4) for before, after in pairwise(boundaries))
    assert sum(worker["pushes"] for worker in told) == 2 * rounds
    assert newest(run) < 0.5 * losses(run)[1], "it learns"
    [sentence] = events(run, "sync")[0]["said"]
    assert "workers push how far they came in 4 steps" in sentence


@pytest.mark.slow
def test_workers_and_servers_that_are_killed_cost_no_round(tmp_path: Path) -> None:
    plan = "dp=3 sync=server:staleness=inf,period=4"
    with training(small_job_in(tmp_path, sleep_s=0.01, global_batch=12), tmp_path, plan) as (process, run):
        for number, step in [(2, 5), (0, 15), (3, 25)]:  # two workers, the server
            wait_for_step(step, run, process)
            kill_rank(number, process)
            wait_for_events(run, "lost", [2, 0, 3].index(number) + 1, process)
        outcome = ended(process)
    assert outcome.code == 0, outcome.err
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert not events(run, "resume")
