"""Plans that are proposed, chosen or enumerated all work; else a message costs another try."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.errors import PlanError
from paceline.planning.check.plan_errors import auto_plan, nearest_plan, plan_errors
from paceline.planning.check.rules import reasons_against
from paceline.planning.plan import Plan
from paceline.planning.search.space import legal_plans
from planner_jobs import job_on_digits
from planner_jobs import job_on_tokens as job
from refusals import raises

GPUS = tuple(Device(index=i, name="T4", memory_bytes=2**34, bf16=False) for i in range(4))
SERVERS = Cluster(hosts=tuple(Host(name=name, cores=8, memory_bytes=2**36, gpus=GPUS) for name in "ab"))
LAPTOP = Cluster(name="this machine", hosts=(Host(name="a", cores=2, memory_bytes=2**34),))


@pytest.mark.parametrize(
    ("plan", "changes", "nearest"),
    [
        ("dp=2 tp=3", {}, "dp=2 tp=4"),
        ("dp=3 tp=3", {}, "dp=3 tp=2"),
        ("pp=2", {}, "pp=2 microbatches=2"),
        ("pp=2 zero=2 sequence=on", {}, "pp=2 microbatches=2"),
        ("pp=4 schedule=interleaved microbatches=4", {}, "pp=4 microbatches=4"),
        ("pp=2 cut=blok.2 microbatches=2", {}, "pp=2 cut=blocks.2 microbatches=2"),
        ("pp=2 cut=blocks.1,blocks.2 microbatches=2", {}, "pp=2 microbatches=2"),
        ("ep=2 tp=2", {}, "tp=2"),
        ("ep=16", {"model": "moe"}, "ep=8"),
        ("dp=2 fsdp=16", {}, "dp=2 fsdp=4"),
        ("cp=5 tp=2", {}, "tp=2 cp=4"),
        ("pp=2 schedule=zero-bubble microbatches=2 compile=on", {}, "pp=2 schedule=zero-bubble microbatches=2"),
        ("fsdp=2 compile=reduce-overhead pin=on", {}, "fsdp=2 compile=on pin=on"),
        ("fsdp=2 fused=on", {"optimizer": "Adafactor"}, "dp=2"),
        ("dp=8 microbatches=4 threads=2", {}, "dp=8 microbatches=2 threads=2"),
        ("dp=3", {"partition": {"weights": [1, 2]}}, "dp=2"),
    ],
)
def test_the_plan_that_was_most_likely_meant_is_proposed(plan: str, changes: dict[str, Any], nearest: str) -> None:
    assert str(nearest_plan(Plan.parse(plan), job(**changes), SERVERS)) == nearest
    assert str(plan_errors(job(**changes), plan, cluster=SERVERS).nearest) == nearest


@pytest.mark.parametrize(
    ("plan", "world", "nearest"),
    [("dp=2 tp=2", 6, "dp=3 tp=2"), ("tp=4", 6, "dp=3 tp=2"), ("fsdp=4 tp=2", 4, "fsdp=2 tp=2"), ("dp=1", 2, "dp=2")],
)
def test_ranks_that_were_started_are_all_used(plan: str, world: int, nearest: str) -> None:
    assert str(nearest_plan(Plan.parse(plan), job(global_batch=24), LAPTOP, world)) == nearest


def test_a_plan_that_works_is_its_own_nearest() -> None:
    plan = Plan.parse("dp=2 tp=2 sequence=on pp=2 microbatches=4")
    assert nearest_plan(plan, job(), SERVERS) == plan


def test_nothing_is_proposed_where_nothing_works() -> None:
    weights = {"partition": {"weights": [1] * 9}}
    assert nearest_plan(Plan(dp=9), job(**weights), SERVERS) is None
    assert plan_errors(job(**weights), Plan(dp=9), cluster=SERVERS).nearest is None


def test_a_model_too_large_for_one_rank_is_never_proposed_whole() -> None:
    """A plan that divides nothing is not weighed when it is asked for.

    But to propose one needs knowing that it has room.
    """
    large = job(
        model={"zoo": "gpt", "args": {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "context": 1024}}
    )
    assert str(nearest_plan(Plan.parse("tp=3"), large, SERVERS)) == "tp=4"
    assert str(nearest_plan(Plan.parse("fsdp=3 precision=fp64"), large, SERVERS)) == "fsdp=3 precision=fp64"
    assert str(nearest_plan(Plan.parse("tp=2 precision=fp64"), large, SERVERS)) == "fsdp=2 tp=2 precision=fp64"
    huge = job(
        model={"zoo": "gpt", "args": {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50257, "context": 2048}}
    )
    assert nearest_plan(Plan.parse("fsdp=8"), huge, SERVERS) is None


TRIED: dict[str, Any] = {
    "dp": range(1, 5),
    "tp": range(1, 5),
    "pp": range(1, 5),
    "schedule": ("1f1b", "interleaved", "gpipe"),
    "microbatches": range(1, 7),
}


@pytest.fixture(scope="module")
def working() -> list[Plan]:
    every = (Plan(**dict(zip(TRIED, values, strict=True))) for values in product(*TRIED.values()))
    return [plan for plan in every if not reasons_against(plan, job(), SERVERS)]


@settings(max_examples=60)
@given(values=st.fixed_dictionaries({key: st.sampled_from(list(values)) for key, values in TRIED.items()}))
def test_no_plan_that_works_differs_in_fewer_keys(working: list[Plan], values: dict[str, Any]) -> None:
    plan = Plan(**values)
    near = nearest_plan(plan, job(), SERVERS)
    assert near is not None
    assert not reasons_against(near, job(), SERVERS)
    allowed = [
        other for other in working if all(getattr(plan, key) > 1 or getattr(other, key) == 1 for key in ("tp", "pp"))
    ]
    more_replicas = not near.splits  # instead of a split that is dropped
    assert differing(plan, near) <= min(differing(plan, other) for other in allowed) + more_replicas


def differing(one: Plan, other: Plan) -> int:
    return sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(Plan))


@settings(max_examples=60)
@given(
    plan=st.builds(
        Plan,
        **{key: st.integers(1, 9) for key in ("dp", "fsdp", "tp", "pp", "cp", "ep", "microbatches")},
        zero=st.integers(1, 3),
        sequence=st.booleans(),
        virtual=st.integers(2, 9),
        schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe"]),
        compile=st.sampled_from(["off", "on", "reduce-overhead"]),
        transport=st.sampled_from(["auto", "shm"]),
    ),
    model=st.sampled_from(["gpt", "moe", "resnet50"]),
    optimizer=st.sampled_from(["adamw", "lamb"]),
    loss=st.sampled_from(["cross_entropy", "contrastive"]),
    cluster=st.sampled_from([SERVERS, LAPTOP]),
)
def test_what_is_proposed_for_any_plan_passes_every_check(
    plan: Plan, model: str, optimizer: str, loss: str, cluster: Cluster
) -> None:
    work = job(model=model, optimizer=optimizer, loss=loss, **({"data": "digits"} if model == "resnet50" else {}))
    near = nearest_plan(plan, work, cluster)
    assert near is not None
    assert reasons_against(near, work, cluster) == []
    assert (near == plan) == (not reasons_against(plan, work, cluster))
    assert near.ranks <= max(plan.ranks, cluster.devices)
    assert replace(near, **{field.name: getattr(plan, field.name) for field in fields(Plan)}) == plan


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
    assert texts(legal_plans(job(optimizer="Adafactor"), CPUS, 2)) == [
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
    with pytest.raises(ValueError, match="precision"):
        legal_plans(job(), CPUS, 2, keys=("dp", "precision"))


digits_job = partial(job_on_digits, model="mlp", global_batch=64)


def cores(number: int) -> Cluster:
    return Cluster(hosts=(Host(name="a", cores=number, memory_bytes=2**30),))


def gpus(number: int) -> Cluster:
    devices = tuple(Device(index=i, name="T4", memory_bytes=2**34) for i in range(number))
    return Cluster(hosts=(Host(name="a", cores=32, memory_bytes=2**30, gpus=devices),))


@pytest.mark.parametrize(
    ("cluster", "global_batch", "dp"),
    [
        (cores(1), 64, 1),
        (cores(2), 64, 2),
        (cores(32), 64, 8),
        (cores(4), 3, 3),
        (gpus(1), 64, 1),
        (gpus(16), 64, 16),
        (gpus(16), 1, 1),
    ],
)
def test_every_device_is_used_as_far_as_the_batch_goes(cluster: Cluster, global_batch: int, dp: int) -> None:
    assert auto_plan(digits_job(global_batch=global_batch), cluster) == Plan(dp=dp)


def test_cores_beyond_the_ranks_become_threads() -> None:
    assert auto_plan(digits_job(), cores(32)).threads_for(cores(32).hosts[0], 8) == 4


def test_weights_say_how_many_replicas_there_are() -> None:
    assert auto_plan(digits_job(partition={"weights": [2, 1, 1]}), cores(8)) == Plan(dp=3)


def test_weights_that_no_device_is_left_for_are_refused() -> None:
    with raises(PlanError, "plan.more_weights_than_devices", cluster="this cluster", devices=2, plan="dp=3", ranks=3):
        auto_plan(digits_job(partition={"weights": [2, 1, 1]}), cores(2))


@given(st.integers(1, 64), st.integers(1, 32), st.booleans())
def test_the_plan_always_runs(number: int, global_batch: int, with_gpus: bool) -> None:
    cluster, work = gpus(number) if with_gpus else cores(number), digits_job(global_batch=global_batch)
    assert plan_errors(work, auto_plan(work, cluster), cluster=cluster) == []
