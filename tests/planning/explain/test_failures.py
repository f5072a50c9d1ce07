"""Failures in the explanation of a plan: said only where a rate is given, with advice where it changes something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from handmade_search import candidate, cluster, found, job
from paceline.planning.cost.failures import failure_costs
from paceline.planning.explain.explain import FailureOutlook, explain, outlook
from paceline.planning.search.result import Candidate


def told(
    rate: float = 1.0, every_steps: int | None = None, best: Candidate | None = None, **of_checkpoints: Any
) -> FailureOutlook:
    values = ({"every_steps": every_steps} if every_steps else {}) | of_checkpoints
    checkpoint: dict[str, Any] = {"checkpoint": values} if values else {}
    on = cluster(failures_per_host_day=rate)
    plans = found(best=(best,)) if best else found()
    outlook = explain(job(**checkpoint), on, plans, what_would_help=False).failures
    assert outlook is not None
    return outlook


SHARDED = candidate("fsdp=16", compute=1.0)


@pytest.mark.parametrize("rate", [None, 0.0])
def test_without_failures_nothing_is_said_of_them(rate: float | None) -> None:
    explanation = explain(job(), cluster(failures_per_host_day=rate), found(), what_would_help=False)
    assert explanation.failures is None
    assert explanation.to_json()["failures"] is None


def test_replicas_on_several_hosts_recover_in_place() -> None:
    outlook = told()
    names = [name for name, _, _ in outlook.rows]
    assert names == ["restart, checkpoints as in the job", "restart, the best interval", "in place, by the replicas"]
    now, best, in_place = (goodput for _, goodput, _ in outlook.rows)
    assert now < best < in_place == pytest.approx(1 - 2 / 43_200, rel=1e-3), "two seconds in twelve hours"
    assert outlook.goodput == pytest.approx(in_place, rel=1e-3)


def test_a_plan_without_replicas_says_that_it_restarts() -> None:
    outlook = told(best=SHARDED)
    assert len(outlook.rows) == 2
    assert outlook.to_json()["goodput_in_place"] is None
    assert any("nothing recovers in place" in line for line in outlook.lines)
    assert any(line.startswith("assumed: 1.00 GB/s of storage for each host") for line in outlook.lines)


def test_one_replica_with_copies_in_memory_goes_back_a_few_steps_and_not_to_the_disk() -> None:
    copied = replace(SHARDED, prediction=replace(SHARDED.prediction, memory={"parameters": 8e9, "copies": 48e9}))
    on_disk, in_memory = told(rate=50.0, best=SHARDED), told(rate=50.0, best=copied)
    assert [name for name, _, _ in in_memory.rows][2:] == ["in place, from copies in memory"]
    assert in_memory.goodput > on_disk.goodput
    assert in_memory.to_json()["goodput_in_place"] == in_memory.goodput
    assert not any("nothing recovers in place" in line for line in in_memory.lines)
    often = told(rate=50.0, best=copied, memory_every_steps=1)
    assert often.costs.copied_s == often.costs.step_s


def test_copies_on_the_lost_host_itself_are_of_no_use() -> None:
    one = candidate("tp=8", compute=1.0)
    assert failure_costs(one.layout, 1.0, 0.01, [8, 0], copied=True).copied_s == 0.0


def test_an_interval_far_from_the_best_is_told_with_the_best_one() -> None:
    rare = told(rate=20.0, every_steps=1000, best=SHARDED)
    best = rare.costs.best_every_steps
    assert any(
        f"every_steps: 1000 loses {100 * (rare.best_goodput - rare.goodput):.1f} points" in x for x in rare.lines
    )
    assert any(line.endswith(f"checkpoint.every_steps: {best}") for line in rare.lines)
    by_the_clock = told(rate=20.0, best=SHARDED)
    assert any(line.startswith("checkpoint.every_seconds: 300 loses") for line in by_the_clock.lines)
    assert not any("loses" in line for line in told(rate=20.0, every_steps=best, best=SHARDED).lines)
    assert not any("loses" in line for line in told(rate=20.0, every_steps=1000).lines), "replicas lose no steps"


def test_a_plan_with_replicas_is_named_where_failures_make_it_the_better_one() -> None:
    plans = (candidate("fsdp=16", compute=1.0), candidate("dp=2 fsdp=8", compute=1.02))
    [rarely, often] = (
        outlook(job(checkpoint={"every_steps": 50}), cluster(failures_per_host_day=rate), plans)
        for rate in (0.001, 200.0)
    )
    assert rarely is not None
    assert often is not None
    assert rarely.better is None
    assert str(often.better) == "dp=2 fsdp=8"
    assert any(line.startswith("with these failures dp=2 fsdp=8 trains more") for line in often.lines)
    assert often.to_json()["better_plan"] == "dp=2 fsdp=8"


def test_a_rate_that_is_none_is_refused() -> None:
    for rate in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="failures_per_host_day"):
            cluster(failures_per_host_day=rate)


def test_hosts_without_ranks_do_not_count() -> None:
    one = replace(candidate("tp=8", compute=1.0), why="")
    alone = outlook(job(), cluster(failures_per_host_day=1.0), (one,))
    assert alone is not None
    assert (alone.hosts, alone.costs.between_s) == (1, 86_400.0)
