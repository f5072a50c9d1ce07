"""The space of plans is what `paceline check --all` tries.

A plan that is missing is never tested, one that cannot run stops it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Host
from paceline.planning.check.rules import reasons_against
from paceline.planning.legal_plans import legal_plans
from paceline.planning.plan import Plan
from planner_jobs import job_on_tokens as job

CPUS = Cluster(name="this machine", hosts=(Host(name="a", cores=8, memory_bytes=2**34),))


def texts(plans: list[Plan]) -> list[str]:
    return [str(plan) for plan in plans]


def test_every_division_into_two_is_there_with_its_variants_and_no_other() -> None:
    assert texts(legal_plans(job(), CPUS, range(1, 3))) == [
        "dp=1",
        "dp=2",
        "fsdp=2",
        "fsdp=2 zero=2",
        "fsdp=2 zero=1",
        "tp=2",
        "tp=2 sequence=on",
        "pp=2 microbatches=2",
        "pp=2 schedule=gpipe microbatches=2",
        "pp=2 schedule=interleaved microbatches=2",
        "pp=2 schedule=zero-bubble microbatches=2",
        "pp=2 schedule=dualpipe microbatches=4",
        "cp=2",
    ]


def test_plans_pass_every_check_once_each_and_small_ones_come_first() -> None:
    found = legal_plans(job(model="moe"), CPUS, range(1, 9))
    assert not any(reasons_against(plan, job(model="moe"), CPUS) for plan in found)
    assert max(Counter(found).values()) == 1
    assert [plan.ranks for plan in found] == sorted(plan.ranks for plan in found)
    assert {"dp=2 tp=2 pp=2 microbatches=2", "ep=8", "fsdp=2 cp=2 ep=2", "tp=4 pp=2 sequence=on microbatches=2"} <= set(
        texts(found)
    )
    assert found == legal_plans(job(model="moe"), CPUS, range(1, 9))


def test_what_no_degree_gives_a_meaning_does_not_vary() -> None:
    for plan in legal_plans(job(), CPUS, range(1, 9)):
        assert plan.zero == 3 or (plan.fsdp > 1 and plan.pp == 1)
        assert plan.tp > 1 or not plan.sequence
        assert plan.schedule == "1f1b" or plan.pp > 1


def test_the_model_and_the_job_say_what_is_there() -> None:
    assert texts(legal_plans(job(model="cifar_cnn", data="digits"), CPUS, 2, keys=("dp", "cp", "ep"))) == ["dp=2"]
    assert texts(legal_plans(job(optimizer="lamb"), CPUS, 2)) == [
        "dp=2",
        "pp=2 microbatches=2",
        "pp=2 schedule=gpipe microbatches=2",
        "pp=2 schedule=interleaved microbatches=2",
        "pp=2 schedule=zero-bubble microbatches=2",
        "pp=2 schedule=dualpipe microbatches=4",
        "cp=2",
    ]
    assert legal_plans(job(global_batch=1), CPUS, 3, keys=("dp", "fsdp")) == []


def test_a_short_share_still_fills_the_schedules_that_run_it() -> None:
    few = job(global_batch=1)
    assert texts(legal_plans(few, CPUS, 2, keys=("pp", "schedule"))) == [
        "pp=2 schedule=gpipe",
        "pp=2 schedule=zero-bubble",
    ]


def test_only_the_named_keys_vary_and_the_others_are_as_asked() -> None:
    base = Plan(tp=2, precision="fp64", microbatches=4, zero=2)
    assert texts(legal_plans(job(), CPUS, 4, keys=("dp", "pp", "remat"), base=base)) == [
        "dp=2 tp=2 microbatches=4 precision=fp64",
        "dp=2 tp=2 remat=selective microbatches=4 precision=fp64",
        "dp=2 tp=2 remat=block microbatches=4 precision=fp64",
        "tp=2 pp=2 microbatches=4 precision=fp64",
        "tp=2 pp=2 remat=selective microbatches=4 precision=fp64",
        "tp=2 pp=2 remat=block microbatches=4 precision=fp64",
    ]
    with pytest.raises(ValueError, match="keys: precision do not vary"):
        legal_plans(job(), CPUS, 2, keys=("dp", "precision"))
