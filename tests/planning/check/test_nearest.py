"""The plan that an error proposes has to work, and to be near to what was asked; else the message costs another try."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.planning.check.check_plan import check_plan, nearest_plan
from paceline.planning.check.rules import reasons_against
from paceline.planning.plan import Plan
from planner_jobs import job_on_tokens as job

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
        ("fsdp=2 fused=on", {"optimizer": "lamb"}, "dp=2"),
        ("dp=8 microbatches=4 threads=2", {}, "dp=8 microbatches=2 threads=2"),
        ("dp=3", {"partition": {"weights": [1, 2]}}, "dp=2"),
    ],
)
def test_the_plan_that_was_most_likely_meant_is_proposed(plan: str, changes: dict[str, Any], nearest: str) -> None:
    assert str(nearest_plan(Plan.parse(plan), job(**changes), SERVERS)) == nearest
    assert check_plan(Plan.parse(plan), job(**changes), SERVERS)[-1] == f"Nearest plan that works: {nearest}."


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
    assert "Nearest" not in "".join(check_plan(Plan(dp=9), job(**weights), SERVERS))


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
