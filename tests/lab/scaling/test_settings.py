"""What a benchmark compares: N devices are N devices, the work is the same, and what cannot run is told at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.errors import PlanError
from paceline.planning.plan import Plan, on_devices
from paceline_lab.scaling.result import DEFAULT_STEPS, settings_for, target_of
from refusals import raises
from small_jobs import points, small_job

CORES = Cluster(hosts=(Host(name="a", cores=4, memory_bytes=2**33),))
GPUS = Cluster(
    hosts=(
        Host(
            name="a",
            cores=4,
            memory_bytes=2**33,
            gpus=tuple(Device(index=i, name="G", memory_bytes=2**33) for i in range(4)),
        ),
    )
)
BASE = Plan(dp=4, fused=True)


def chosen(
    cluster: Cluster = CORES, base: Plan = BASE, job: dict[str, Any] | None = None, **changes: Any
) -> list[tuple[str, str, int, int, int | None]]:
    """Key, plan, devices, global batch and steps of each setting."""
    values: dict[str, Any] = {"devices": None, "steps": None, "weak": False} | changes
    found = settings_for(small_job(**(job or {})), cluster, base, **values)
    return [(s.key, str(s.plan), s.devices, s.global_batch, s.steps) for s in found]


def test_one_and_all_devices_are_compared_with_one_thread_each_and_the_settings_of_the_plan() -> None:
    assert chosen(weak=True) == [
        ("1-device", "threads=1 fused=on", 1, 8, DEFAULT_STEPS),
        ("4-devices", "dp=4 threads=1 fused=on", 4, 8, DEFAULT_STEPS),
        ("4-devices-weak", "dp=4 threads=1 fused=on", 4, 32, DEFAULT_STEPS),
    ]
    assert chosen(GPUS)[1] == ("4-devices", "dp=4 fused=on", 4, 8, DEFAULT_STEPS), (
        "threads of a GPU's rank are not devices"
    )


def test_one_device_is_always_measured_first_and_none_twice() -> None:
    assert [devices for _, _, devices, _, _ in chosen(devices=[4, 2, 4])] == [1, 2, 4]


def test_the_plan_that_auto_chose_is_measured_as_it_is_beside_the_fixed_layout() -> None:
    alone = Plan(memory_format="channels_last")
    *_, auto = settings_for(small_job(), CORES, alone, devices=None, steps=None, weak=False)
    assert (auto.plan, auto.devices) == (replace(alone, threads=4), 4)
    assert auto.label == f"auto: dp=1 {auto.plan}"
    layout = [str(replace(alone, dp=n, threads=1)) for n in (1, 4)]
    assert [plan for _, plan, *_ in chosen(base=alone)] == [*layout, str(auto.plan)]
    assert len(chosen(base=Plan(dp=4))) == 2, "the layout on all cores has this plan"
    assert len(chosen(base=alone, devices=[1, 2])) == 2, "it takes more devices than were asked for"
    assert len(chosen(base=Plan(threads=1))) == 2, "the layout on one core has this plan"


def test_a_plan_is_run_as_train_would_and_counts_the_cores_that_it_uses() -> None:
    assert chosen(devices=[2], plans=["dp=2", "dp=1 threads=2", "threads=1 fused=on"])[2:] == [
        ("dp-2-threads-2", "dp=2 threads=2", 4, 8, DEFAULT_STEPS),
        ("threads-2", "threads=2", 2, 8, DEFAULT_STEPS),
    ], "the last one is that of one device"
    assert chosen(GPUS, devices=[2], plans=["dp=3"])[2][1:3] == ("dp=3", 3)


def test_a_job_with_a_target_is_trained_to_it_but_for_weak_scaling() -> None:
    stop = {"epochs": 3, "metric_above": {"accuracy": 0.9}, "loss_below": 0.1}
    job = {"data": points(held_out=0.2), "metrics": ["accuracy"], "stop": stop}
    assert target_of(small_job(**job)) == "loss < 0.1 or accuracy > 0.9"
    assert [steps for *_, steps in chosen(job=job, weak=True)] == [None, None, DEFAULT_STEPS]
    assert [steps for *_, steps in chosen(job=job, weak=True, steps=30)] == [30, 30, 30]


def test_a_weak_setting_changes_the_global_batch_and_nothing_else_of_the_work() -> None:
    job = small_job()
    strong, weak = settings_for(job, CORES, BASE, devices=[4], steps=10, weak=True)[1:]
    assert strong.job(job).global_batch == 8
    changed = weak.job(job)
    assert (changed.global_batch, changed.optimizer, changed.stop.steps) == (32, job.optimizer, 10)
    assert (strong.title, weak.title) == ("4 devices", "4 devices, weak")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"devices": []}, "bench.no_devices"),
        ({"devices": [0]}, "bench.devices_invalid"),
        ({"devices": [9]}, "plan.too_few_samples"),
        ({"devices": [5], "cluster": GPUS}, "plan.too_few_devices"),
        ({"plans": ["dp=two"]}, "plan.wrong_value"),
        ({"plans": ["speed=high"]}, "plan.unknown_key"),
        ({"plans": ["microbatches=9"]}, "plan.too_many_microbatches"),
    ],
)
def test_what_cannot_run_is_told_with_what_would(changes: dict[str, Any], code: str) -> None:
    with raises(PlanError, code):
        chosen(**changes)


def test_more_devices_than_cores_can_be_asked_for() -> None:
    assert chosen(devices=[8])[1][:3] == ("8-devices", "dp=8 threads=1 fused=on", 8)


@pytest.mark.parametrize(
    ("base", "devices", "plan"),
    [
        ("dp=4 fused=on", 2, "dp=2 threads=1 fused=on"),
        ("dp=2 tp=2", 4, "dp=2 tp=2 threads=1"),
        ("dp=2 tp=2", 2, "tp=2 threads=1"),
        ("fsdp=4 zero=2 fused=on", 1, "threads=1 fused=on"),
        ("pp=2 schedule=gpipe microbatches=4", 1, "threads=1"),
        ("pp=2 schedule=gpipe microbatches=4", 3, "dp=3 threads=1"),
    ],
)
def test_a_plan_that_divides_the_model_scales_by_whole_replicas(base: str, devices: int, plan: str) -> None:
    assert on_devices(Plan.parse(base), devices, CORES) == Plan.parse(plan)


def test_runs_that_are_timed_are_logged_to_no_tracker() -> None:
    job = small_job(trackers=["wandb"])
    [setting, *_] = settings_for(job, CORES, BASE, devices=None, steps=None, weak=False)
    assert job.trackers[0].name == "wandb"
    assert setting.job(job).trackers == ()
