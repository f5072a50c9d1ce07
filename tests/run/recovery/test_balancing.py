"""A slow replica gets less work, is named, and the training is the one that it would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import events
from paceline.run.record.progress import RecentSteps, event_sentence
from paceline.run.record.run import Run
from paceline.run.recovery.balance import Balance, Move
from ranks import Ranks
from small_jobs import facts, new_run, points, small_job, train_as_rank, train_here
from uneven_jobs import read_in

# sleeping takes most of a step on any machine, and is the slow rank's share of it
SLEEPY = {"factory": "uneven_jobs:Sleepy", "args": {"sample_s": 0.005, "rank": 1, "factor": 5.0}}


def dealt(run: Run, ranks: int) -> list[tuple[int, ...]]:
    """Samples of every rank in each step."""
    return list(zip(*([step["local_samples"] for step in run.steps(rank)] for rank in range(ranks)), strict=True))


@pytest.mark.slow
def test_a_slow_replica_gets_less_work_is_named_and_changes_no_loss(tmp_path: Path, ranks: Ranks) -> None:
    args = {"folder": str(tmp_path), "samples": 120}
    noted = {"kind": "dataset", "held_out": 0, "factory": "uneven_jobs:Noted", "args": args}
    changes: dict[str, Any] = {"global_batch": 24, "data": noted, "precision": "fp64", "stop": {"steps": 40}}
    new_run(tmp_path / "run", small_job(**changes, model=SLEEPY), "dp=2")
    ranks(2, train_as_rank, tmp_path / "run")
    run, folder = Run(tmp_path / "run"), tmp_path / "run"

    told = events(folder, "balance")
    assert [slow["replica"] for slow in told[0]["slow"]] == [1]
    shares = dealt(run, 2)
    assert shares[0] == (12, 12)
    assert shares[told[0]["step"] - 1] == tuple(told[0]["shares"])
    assert shares[-1][1] < 12
    assert all(sum(step) == 24 for step in shares)
    for epoch in range(1, 8):  # before the first step, data is looked at besides
        assert sorted(read_in(tmp_path, epoch)) == list(range(120))
        for rank in range(2):  # each rank reads what it computes, and no other rank's
            computed = [s["local_samples"] for s in run.steps(rank) if s["epoch"] == epoch]
            assert len(read_in(tmp_path, epoch, rank)) == sum(computed)
    alone = train_here(tmp_path / "alone", small_job(**changes, model={"factory": "uneven_jobs:Sleepy"} | no_sleep()))
    assert run.losses == pytest.approx(alone.losses, rel=1e-9)


def no_sleep() -> dict[str, Any]:
    return {"args": {"sample_s": 0.0, "rank": 0, "factor": 1.0}}


def train_with_changes(path: Path, changes: dict[int, tuple[int, ...]]) -> None:
    """Train as a rank that decides after these steps on these shares."""
    Balance.step = lambda self, step, shares, busy_s: (  # type: ignore[method-assign]
        Move(changes[step], (1.0,) * self.replicas, {}, 0.1) if step in changes else None
    )
    train_as_rank(path)


@pytest.mark.parametrize(
    ("plan", "ranks_of_plan", "changes"),
    [
        ("dp=2", 2, {4: (13, 3), 11: (2, 14)}),
        pytest.param("dp=2 microbatches=2", 2, {4: (13, 3), 11: (2, 14)}, marks=pytest.mark.slow),
        pytest.param("dp=2 fsdp=2", 4, {4: (6, 6, 2, 2), 11: (1, 2, 7, 6)}, marks=pytest.mark.slow),
        pytest.param("dp=2 fsdp=2 zero=1 microbatches=2", 4, {4: (6, 5, 2, 3)}, marks=pytest.mark.slow),
        pytest.param("dp=2 tp=2", 4, {4: (13, 3), 11: (2, 14)}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_losses_do_not_depend_on_shares_that_change_and_a_resumed_run_keeps_them_bit_for_bit(
    tmp_path: Path, ranks: Ranks, plan: str, ranks_of_plan: int, changes: dict[int, tuple[int, ...]], num_workers: int
) -> None:
    job: dict[str, Any] = {
        "data": points(samples=120) | {"num_workers": num_workers},
        "partition": "stratified",
        "global_batch": 16,
        "precision": "fp64",
        "clip_norm": 0.5,
    }

    def trained(name: str, steps: int) -> Run:
        new_run(tmp_path / name, small_job(**job, stop={"steps": steps}), plan)
        ranks(ranks_of_plan, train_with_changes, tmp_path / name, changes)
        return Run(tmp_path / name)

    run = trained("undisturbed", 24)
    trained("resumed", 13)
    resumed = trained("resumed", 24)
    for rank in range(ranks_of_plan):
        assert facts(resumed, rank) == facts(run, rank)
    assert len({facts(run, 0)[i][-1] for i in (3, 10, 23)}) >= 2, "shares did change"
    alone = train_here(tmp_path / "alone", small_job(**job, stop={"steps": 24}))
    assert run.losses == pytest.approx(alone.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        ("dp=2 balance=off", {}, "the plan says balance=off."),
        ("dp=2 sync=local:2", {}, "replicas that take separate steps"),
        ("dp=2", {"partition": "hierarchical"}, "hosts that read their own part"),
        ("dp=2", {"partition": {"weights": [1, 2]}}, "uses the weights"),
        ("dp=2 balance=on", {"partition": {"weights": [1, 2]}}, None),
    ],
)
def test_where_shares_do_not_follow_speeds_the_record_says_why(plan: str, changes: Any, reason: str | None) -> None:
    from paceline.planning.plan import Plan
    from paceline.run.recovery.balance import why_off

    found = why_off(Plan.parse(plan), small_job(**changes))
    assert (reason in found) if reason else found == ""


def test_people_are_told_who_is_slow_since_when_and_what_it_gets() -> None:
    slow = {"replica": 1, "ranks": [2, 3], "host": 1, "speed": 0.5, "share": 0.3333, "since_step": 51}
    event = {"event": "balance", "step": 67, "shares": [8, 8, 4, 4], "slow": [slow], "slow_changed": True}
    assert event_sentence(event | {"slow_changed": False}) is None
    assert event_sentence(event) == (
        "replica 1 (ranks 2 to 3, host 1) has computed at 0.50 of the usual speed since step 51 and gets 33.3% of the "
        "batch (shares from step 67 on: 8, 8, 4, 4 samples)"
    )
    over = event | {"slow": [], "shares": [6, 6, 6, 6], "step": 90}
    assert event_sentence(over) == (
        "the shares of the batch follow the replicas' speeds from step 90 on: 6, 6, 6, 6 samples"
    )
    recent = RecentSteps(None)
    recent.add({"step": 1, "epoch": 0, "loss": 1.0, "samples": 24, "step_s": 0.1, "compute_s": 0.1})
    assert "slow" not in recent.sentence()
    recent.told(event)
    assert "slow: replica 1 (ranks 2 to 3, host 1) at 0.50" in recent.sentence()
    recent.told(over)
    assert "slow" not in recent.sentence()
