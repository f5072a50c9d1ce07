"""Machines that are not equally fast get work by their speed, and the user is told what that saves."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host, Link
from paceline.job.job import Job
from paceline.planning.check.check_plan import check_plan
from paceline.planning.cost.estimate import estimate
from paceline.planning.explain.advice import cut_by_speed, weights_by_speed
from paceline.planning.explain.explain import explain
from paceline.planning.explain.what_if import Case
from paceline.planning.machines import machines
from paceline.planning.plan import Plan
from paceline.planning.predict import Layouts
from paceline.planning.search.result import Candidate
from paceline.planning.search.search import search


def mixed(*names: str) -> Cluster:
    """One GPU of each name, each on a host of its own."""
    link = Link(name="eth0", kind="ethernet", bandwidth_gbps=400)
    gpus = [Device(index=0, name=name, memory_bytes=40 * 2**30) for name in names]
    hosts = [Host(name=f"h{i}", cores=8, memory_bytes=2**40, gpus=(gpu,), links=(link,)) for i, gpu in enumerate(gpus)]
    return Cluster(hosts=tuple(hosts))


def job(**changes: Any) -> Job:
    common = {
        "loss": "cross_entropy",
        "optimizer": "adamw",
        "stop": {"steps": 100},
        "global_batch": 64,
        "precision": "bf16",
    }
    dimensions = {"layers": 8, "hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192}
    return Job(**({"model": {"transformer": dimensions}, "data": "synthetic"} | common | changes))


def asked(job: Job, cluster: Cluster, plan: Plan) -> tuple[Case, Candidate]:
    layout = Layouts(job, machines(cluster)).of(plan)
    return Case(job, cluster), Candidate(plan, layout, estimate(layout))


def test_readers_get_shares_by_the_speed_of_their_devices() -> None:
    weights, gain = weights_by_speed(*asked(job(), mixed("A100-80", "H100-SXM"), Plan(dp=2)))
    assert weights is not None
    assert weights[1] / weights[0] == pytest.approx(989 / 312, rel=0.02)
    assert 0.05 < gain < 1


def test_equal_devices_get_no_advice() -> None:
    alike = mixed("H100-SXM", "H100-SXM")
    told = explain(job(), alike, search(job(), alike))
    assert told.weights is None
    assert told.cut == ()


def test_a_job_with_weights_keeps_them() -> None:
    weighed = job(partition={"weights": [1.0, 3.0]})
    assert weights_by_speed(*asked(weighed, mixed("A100-80", "H100-SXM"), Plan(dp=2))) == (None, 0.0)


def test_a_slow_host_gets_fewer_layers() -> None:
    model = {"zoo": "gpt", "args": {"layers": 8, "hidden": 512, "heads": 8, "context": 256, "vocab": 1000}}
    named = job(model=model, data={"kind": "synthetic", "vocab": 1000, "shape": [256]})
    cluster, plan = mixed("A100-80", "H100-SXM"), Plan(pp=2, microbatches=16)
    cut, gain = cut_by_speed(*asked(named, cluster, plan))
    assert len(cut) == 1
    assert gain > 0.05
    assert check_plan(Plan(pp=2, microbatches=16, cut=",".join(cut)), named, cluster) == []


def test_shares_follow_the_slowest_rank_of_a_reader() -> None:
    cluster = mixed("A100-80", "H100-SXM", "H100-SXM", "H100-SXM")
    weights, _ = weights_by_speed(*asked(job(), cluster, Plan(dp=2, tp=2)))
    assert weights is not None
    assert weights[1] > weights[0]
