"""Machines that are not equally fast get work by their speed, and the user is told what that saves."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster, Device, Host, Link
from paceline.job.job import Job
from paceline.plan.cost.estimate import estimate
from paceline.plan.found import Candidate
from paceline.plan.machines import machines
from paceline.plan.plan import Plan
from paceline.plan.predict import Layouts
from paceline.plan.search import search
from paceline.plan.search_legal import Legality
from paceline.plan.search_uneven import cut_by_speed, cut_for_speeds, weights_by_speed


def mixed(*names: str) -> Cluster:
    """One GPU of each name, each on a host of its own."""
    link = Link(name="eth0", kind="ethernet", bandwidth_gbps=400)
    gpus = [Device(index=0, name=name, memory_bytes=40 * 2**30) for name in names]
    hosts = [Host(name=f"h{i}", cores=8, memory_bytes=2**40, gpus=(gpu,), links=(link,)) for i, gpu in enumerate(gpus)]
    return Cluster(hosts=tuple(hosts))


def job(**changes: Any) -> Job:
    common = {"loss": "cross_entropy", "optimizer": "adamw", "stop": {"steps": 100}, "global_batch": 64, "precision": "bf16"}
    dimensions = {"layers": 8, "hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192}
    return Job(**({"model": {"transformer": dimensions}, "data": "synthetic"} | common | changes))


def candidate(job: Job, cluster: Cluster, plan: Plan) -> Candidate:
    layout = Layouts(job, machines(cluster)).of(plan)
    return Candidate(plan, layout, estimate(layout))


def slowest(cut: list[int], seconds: list[float], speeds: list[float]) -> float:
    ends = [sum(cut[:i]) for i in range(len(cut) + 1)]
    return max(sum(seconds[a:b]) / speed for (a, b), speed in zip(pairwise(ends), speeds, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(seconds: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    speeds = data.draw(st.lists(st.floats(0.5, 4), min_size=stages, max_size=stages))
    cut = cut_for_speeds(seconds, speeds)
    assert sum(cut) == len(seconds)
    assert min(cut) >= 1
    others = [[b - a for a, b in pairwise((0, *inner, len(seconds)))] for inner in combinations(range(1, len(seconds)), stages - 1)]
    assert slowest(cut, seconds, speeds) == pytest.approx(min(slowest(other, seconds, speeds) for other in others))


def test_readers_get_shares_by_the_speed_of_their_devices() -> None:
    weights, gain = weights_by_speed(job(), candidate(job(), mixed("A100-80", "H100-SXM"), Plan(dp=2)))
    assert weights is not None
    assert weights[1] / weights[0] == pytest.approx(989 / 312, rel=0.02)
    assert 0.05 < gain < 1


def test_equal_devices_get_no_advice() -> None:
    found = search(job(), mixed("H100-SXM", "H100-SXM"))
    assert found.weights is None
    assert found.cut == ()


def test_a_job_with_weights_keeps_them() -> None:
    weighed = job(partition={"weights": [1.0, 3.0]})
    assert weights_by_speed(weighed, candidate(weighed, mixed("A100-80", "H100-SXM"), Plan(dp=2))) == (None, 0.0)


def test_a_slow_host_gets_fewer_layers() -> None:
    model = {"zoo": "gpt", "args": {"layers": 8, "hidden": 512, "heads": 8, "context": 256, "vocab": 1000}}
    named = job(model=model, data={"kind": "synthetic", "vocab": 1000, "shape": [256]})
    cluster, plan = mixed("A100-80", "H100-SXM"), Plan(pp=2, microbatches=16)
    tried = candidate(named, cluster, plan)
    cut, gain = cut_by_speed(tried, Legality(named, cluster, Plan(), len(tried.layout.trace.blocks)))
    assert len(cut) == 1
    assert gain > 0.05
    assert Plan(pp=2, microbatches=16, cut=",".join(cut)).check(named, cluster) == []


def test_shares_follow_the_slowest_rank_of_a_reader() -> None:
    cluster = mixed("A100-80", "H100-SXM", "H100-SXM", "H100-SXM")
    weights, _ = weights_by_speed(job(), candidate(job(), cluster, Plan(dp=2, tp=2)))
    assert weights is not None
    assert weights[1] > weights[0]
