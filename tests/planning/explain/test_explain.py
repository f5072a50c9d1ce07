"""The explanation of a plan.

Nothing of the prediction is lost in it, and what would help is what the same model says of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from handmade_search import RARER, candidate, cluster, found, job
from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.host import Device, Host, Link
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.cost.estimate import failure_costs, predict_layout
from paceline.planning.cost.layout import PARTS
from paceline.planning.explain.advice import (
    Advice,
    Case,
    batch,
    cut_by_speed,
    devices,
    memory,
    other_machines,
    other_trainings,
    scaling,
    weights_by_speed,
    what_if,
    with_devices,
)
from paceline.planning.explain.explain import FailureOutlook, explain, outlook, shares_of_memory, shares_of_time
from paceline.planning.machines import machines
from paceline.planning.plan import Plan
from paceline.planning.prediction import Layouts, layout_of, modelled
from paceline.planning.search.result import Candidate, SearchResult
from paceline.planning.search.search import search
from paceline.planning.search.space import Excluded
from refusals import raises

TABLE = """
import torch
from torch import nn


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2_000_000, 64, sparse=True)
        self.top = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, ids):
        return self.top(self.table(ids).repeat(1, 128, 1)).mean(1)


class Ids(torch.utils.data.Dataset):
    def __len__(self):
        return 65_536

    def __getitem__(self, i):
        return torch.arange(8) * i % 2_000_000, i % 4
"""


def test_the_parts_of_the_step_and_of_the_memory_are_all_of_it() -> None:
    best = found().best[0]
    time, memory = shares_of_time(best), shares_of_memory(best)
    assert sum(part.value for part in time) == pytest.approx(best.prediction.step_time_s)
    assert sum(part.share for part in time) == pytest.approx(1)
    assert [part.name for part in time] == [name for name in PARTS if best.prediction.breakdown[name]]
    assert sum(part.value for part in memory) == pytest.approx(best.prediction.memory_bytes)


def test_a_part_that_measurements_made_less_than_nothing_leaves_the_sum_as_it_is() -> None:
    time = shares_of_time(candidate("dp=2", compute=1.0, launch=-0.1, optimizer=0.1))
    assert {part.name: part.value for part in time} == {"compute": pytest.approx(0.9), "optimizer": 0.1}


def test_the_json_has_every_plan_reason_and_note_that_was_found() -> None:
    what = found()
    told = replace(explain(job(), cluster(), what, what_would_help=False), trainings=(RARER,))
    values = json.loads(json.dumps(told.to_json()))
    assert [entry["plan"] for entry in values["candidates"]] == [str(c.plan) for c in what.best]
    assert [entry["why"] for entry in values["candidates"]] == [c.why for c in what.best]
    assert values["excluded"] == [{"what": e.what, "reason": e.reason, "plans": e.plans} for e in what.excluded]
    assert values["search"] == {"considered": 1234, "evaluated": 100, "pruned": 900, "gap": 0.0, "seconds": 0.21}
    assert values["faster_but"][0]["gain"] == pytest.approx(0.2), "of the step, in which a quarter more is trained"
    assert values["faster_but"][0]["but"] == "replicas agree in every eighth step only"
    assert values["candidates"][0]["breakdown_s"]["tp"] == pytest.approx(0.15)
    assert values["tokens_per_sample"] == 1024


def test_what_the_prediction_does_not_know_is_said_with_it() -> None:
    told = explain(job(), cluster(), found(), what_would_help=False)
    assert "kernels that nobody measured are taken to be as fast as others" in told.notes
    assert any("catalogue, not measured" in note for note in told.notes)
    assert len(set(told.notes)) == len(told.notes)


def test_the_step_is_told_in_a_sentence() -> None:
    told = explain(job(), cluster(), found(), what_would_help=False)
    assert told.limit == (
        "computing is 80 % of the step; the largest other parts: tp: sums of layers (15.0 %) and dp: gradients (3.0 %)"
    )
    alone = SearchResult((candidate("dp=1", compute=1.0),))
    assert "computation only" in explain(job(), cluster(), alone, what_would_help=False).limit


def test_a_cost_is_of_the_run_where_its_steps_are_known_and_absent_without_a_price() -> None:
    free = explain(job(), cluster(), found(), what_would_help=False)
    assert free.cost(free.winner) is None
    priced = cluster(price_per_hour=2.0)
    of_run = explain(job(), priced, found(), what_would_help=False)
    cost = of_run.cost(of_run.winner)
    assert cost is not None
    assert cost.value == pytest.approx(1000 * 1.0 / 3600 * 16 * 2.0), "1,000 steps of a second on 16 devices"
    of_tokens = explain(job(stop={"loss_below": 1.0}), priced, found(), what_would_help=False)
    cost = of_tokens.cost(of_tokens.winner)
    assert cost is not None
    assert cost.of == "1 billion tokens"
    assert cost.value == pytest.approx(1e9 / (64 * 1024) * 1.0 / 3600 * 16 * 2.0)


def test_where_no_plan_was_found_the_reasons_are_the_error() -> None:
    nothing = SearchResult((), (Excluded("memory", "200 GiB on a device that has 80 GiB", 12),))
    with raises(PlanError, "plan.none_can_run", cluster="two hosts", job="small-gpt"):
        explain(job(), cluster(), nothing)


# What would help


LARGE = job(
    model={"transformer": {"layers": 8, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 32000}}, global_batch=256
)
FOUR = cluster(per_host=2)


@pytest.fixture(scope="module")
def real() -> SearchResult:
    return search(LARGE, FOUR, top=10)


def test_changes_come_with_the_most_helpful_first_and_no_machine_that_is_better_hurts(real: SearchResult) -> None:
    changes = other_machines(Case(LARGE, FOUR), real)
    gains = [change.gain for change in changes if change.gain is not None]
    assert gains == sorted(gains, reverse=True)
    by_name = {change.what: change for change in changes}
    assert set(by_name) == {
        "twice the memory of a device",
        "twice the devices",
        "twice the global batch",
        "links between hosts twice as fast",
        "links inside a host twice as fast",
    }
    for name in (
        "twice the memory of a device",
        "links between hosts twice as fast",
        "links inside a host twice as fast",
    ):
        gain = by_name[name].gain
        assert gain is not None
        assert gain >= 0, name
    devices, grown = by_name["twice the devices"], with_devices(FOUR, 2)
    assert grown is not None
    assert devices.helps
    then = search(LARGE, grown, top=1).best[0]
    assert devices.best is not None
    assert devices.best.plan == then.plan
    assert devices.gain == pytest.approx(then.prediction.throughput / real.fastest.prediction.throughput - 1)


def test_where_nothing_helps_that_is_said() -> None:
    assert not Advice("twice the memory", gain=0.001).helps
    assert not Advice("twice the devices", but="no link to another host is known").helps
    assert Advice("twice the devices", gain=0.9).helps


def test_memory_is_doubled_on_devices_and_hosts_and_a_batch_leaves_the_rest_of_the_job() -> None:
    case = Case(job(), cluster())
    grown = memory(2)(case).cluster
    assert {gpu.memory_bytes for host in grown.hosts for gpu in host.gpus} == {160 * 10**9}
    assert {host.memory_bytes for host in grown.hosts} == {2**41}
    assert batch(128)(case) == Case(job(global_batch=128), cluster())


@given(
    hosts=st.integers(1, 6),
    per_host=st.sampled_from([1, 2, 4, 8]),
    times=st.sampled_from([0.125, 0.25, 0.5, 1, 2, 4, 8]),
)
def test_more_or_fewer_devices_are_as_many_as_asked_or_none(hosts: int, per_host: int, times: float) -> None:
    gpus = [{"index": i, "name": "H100-SXM", "memory_bytes": 2**36} for i in range(per_host)]
    values = [{"name": f"h{i}", "cores": 8, "memory_bytes": 2**40, "gpus": gpus} for i in range(hosts)]
    resized = with_devices(Cluster.model_validate({"hosts": values}), times)
    wanted = hosts * per_host * times
    if resized is not None:
        assert resized.devices == wanted
        assert len({host.name for host in resized.hosts}) == len(resized.hosts)
    elif wanted >= 1 and float(wanted).is_integer():
        assert not float(hosts * times).is_integer(), "whole hosts, or a part of one"


def test_a_machine_without_a_known_link_is_not_doubled_in_thought() -> None:
    here = Cluster.model_validate({"hosts": [{"name": "here", "cores": 4, "memory_bytes": 2**34}]})
    assert with_devices(here, 2) is None
    half = with_devices(here, 0.5)
    assert half is not None
    assert (half.devices, half.hosts[0].memory_bytes) == (2, 2**33)


def test_emulated_hosts_keep_their_limits_and_are_not_doubled_where_they_differ() -> None:
    even = Cluster.model_validate({"emulate": {"hosts": 2, "rate": "1gbit", "cpu": [0.5, 0.5]}})
    grown = with_devices(even, 2)
    assert grown is not None
    assert grown.emulate is not None
    assert grown.emulate.cores == (0.5,) * 4
    assert grown.emulate.rates_bps == (10**9,) * 4
    uneven = Cluster.model_validate({"emulate": {"hosts": 2, "cpu": [1, 0.5]}})
    assert with_devices(uneven, 2) is None


def test_what_the_search_noticed_by_itself_stands_among_what_would_help() -> None:
    told = explain(job(), cluster(), found(), what_would_help=False)
    told = replace(told, trainings=(RARER,), weights=(1.0, 0.5), weights_gain=0.5)
    assert [(row.what, row.words) for row in told.helps] == [
        ("shares of the batch by speed", "+100 %"),
        ("sync=local:8", "+25 %"),
    ]
    assert "weights: [1, 0.5]" in told.helps[0].about


def test_one_thing_is_changed_at_a_time_and_a_change_that_cannot_be_says_why(real: SearchResult) -> None:
    case, best = Case(LARGE, FOUR, plans=tuple((one.plan, one.layout) for one in real.best)), real.fastest
    same = what_if(case, lambda case: case).best
    assert same is not None
    assert (same.plan, same.prediction.step_time_s) == (best.plan, best.prediction.step_time_s)
    doubled = what_if(case, batch(512)).best
    assert doubled is not None
    assert doubled.prediction == search(batch(512)(case).job, FOUR, top=1).best[0].prediction
    here = Cluster.model_validate({"hosts": [{"name": "here", "cores": 4, "memory_bytes": 2**34}]})
    none = what_if(Case(LARGE, here), devices(2))
    assert none.best is None
    assert "no link to another host" in none.why


def test_rules_that_change_the_training_are_told_with_what_they_save_and_change() -> None:
    small = job(
        model={"transformer": {"layers": 2, "hidden": 2048, "heads": 8, "seq": 64, "vocab": 8192}}, global_batch=8
    )
    slow, plan = cluster_from("2x1xH100-SXM, 1gbit"), Plan(dp=2)
    layout = layout_of(small, slow, plan)
    told = other_trainings(Case(small, slow), Candidate(plan, layout, modelled(small, slow, plan)))
    assert {one.what for one in told} >= {"compress=int8", "sync=local:8"}
    assert [one.saved for one in told] == sorted((one.saved for one in told), reverse=True)
    assert all(0.02 <= one.saved < 1 and one.but for one in told)
    rarer = next(one for one in told if one.what == "sync=local:8")
    assert rarer.best is not None
    assert rarer.best.prediction.step_time_s == pytest.approx((1 - rarer.saved) * predict_layout(layout).step_time_s)


def test_servers_are_proposed_for_a_sparse_table_whose_sums_leave_one_device_the_best(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text(TABLE)
    clicks, hosts = (
        job(
            model={"factory": f"{tmp_path}/tables.py:Clicks"},
            data={"kind": "dataset", "factory": f"{tmp_path}/tables.py:Ids"},
            loss="cross_entropy",
            global_batch=4096,
            optimizer={"name": "sgd", "lr": 0.1},
        ),
        cluster_from("4x1xT4, 10gbit"),
    )
    plans = search(clicks, hosts, top=5)
    assert plans.best[0].plan.dp == 1
    told = explain(clicks, hosts, plans).trainings
    advice = next(one for one in told if "sync=server:staleness=4" in one.what)
    assert advice.what == "dp=4 sync=server:staleness=4"
    assert advice.saved > 0.5


# More and fewer devices


def test_scaling_is_against_the_fewest_devices_on_which_the_job_fits(real: SearchResult) -> None:
    points = scaling(LARGE, FOUR, real)
    assert [point.devices for point in points] == [1, 2, 4, 8, 16, 32]
    known = [point for point in points if point.best is not None]
    assert len(known) >= 4
    assert known[0].speedup == known[0].efficiency == 1
    for point in known:
        assert point.efficiency == pytest.approx((point.speedup or 0) * known[0].devices / point.devices)
        assert point.best is not None
        assert point.best.plan.ranks <= point.devices
    assert next(p for p in known if p.devices == 4).best == real.fastest


def test_where_nothing_fits_a_number_of_devices_is_kept_with_the_reason() -> None:
    huge = job(model={"transformer": {"layers": 24, "hidden": 8192, "heads": 64, "seq": 1024, "vocab": 32000}})
    points = scaling(huge, FOUR, found())
    assert points[0].best is None
    assert points[0].why
    assert points[0].to_json()["plan"] is None


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


def mixed(*names: str) -> Cluster:
    """One GPU of each name, each on a host of its own."""
    link = Link(name="eth0", kind="ethernet", bandwidth_gbps=400)
    gpus = [Device(index=0, name=name, memory_bytes=40 * 2**30) for name in names]
    hosts = [Host(name=f"h{i}", cores=8, memory_bytes=2**40, gpus=(gpu,), links=(link,)) for i, gpu in enumerate(gpus)]
    return Cluster(hosts=tuple(hosts))


def large_job(**changes: Any) -> Job:
    common = {
        "loss": "cross_entropy",
        "optimizer": "adamw",
        "stop": {"steps": 100},
        "global_batch": 64,
        "precision": "bf16",
    }
    dimensions = {"layers": 8, "hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192}
    return Job(**({"model": {"transformer": dimensions}, "data": "synthetic"} | common | changes))


def asked(large_job: Job, cluster: Cluster, plan: Plan) -> tuple[Case, Candidate]:
    layout = Layouts(large_job, machines(cluster)).of(plan)
    return Case(large_job, cluster), Candidate(plan, layout, predict_layout(layout))


def test_readers_get_shares_by_the_speed_of_their_devices() -> None:
    weights, gain = weights_by_speed(*asked(large_job(), mixed("A100-80", "H100-SXM"), Plan(dp=2)))
    assert weights is not None
    assert weights[1] / weights[0] == pytest.approx(989 / 312, rel=0.02)
    assert 0.05 < gain < 1


def test_equal_devices_get_no_advice() -> None:
    alike = mixed("H100-SXM", "H100-SXM")
    told = explain(large_job(), alike, search(large_job(), alike))
    assert told.weights is None
    assert told.cut == ()


def test_a_job_with_weights_keeps_them() -> None:
    weighed = large_job(partition={"weights": [1.0, 3.0]})
    assert weights_by_speed(*asked(weighed, mixed("A100-80", "H100-SXM"), Plan(dp=2))) == (None, 0.0)


def test_a_slow_host_gets_fewer_layers() -> None:
    model = {"zoo": "gpt", "args": {"layers": 8, "hidden": 512, "heads": 8, "context": 256, "vocab": 1000}}
    named = large_job(model=model, data={"kind": "synthetic", "vocab": 1000, "shape": [256]})
    cluster, plan = mixed("A100-80", "H100-SXM"), Plan(pp=2, microbatches=16)
    cut, gain = cut_by_speed(*asked(named, cluster, plan))
    assert len(cut) == 1
    assert gain > 0.05
    assert plan_errors(named, Plan(pp=2, microbatches=16, cut=",".join(cut)), cluster=cluster) == []


def test_shares_follow_the_slowest_rank_of_a_reader() -> None:
    cluster = mixed("A100-80", "H100-SXM", "H100-SXM", "H100-SXM")
    weights, _ = weights_by_speed(*asked(large_job(), cluster, Plan(dp=2, tp=2)))
    assert weights is not None
    assert weights[1] > weights[0]
