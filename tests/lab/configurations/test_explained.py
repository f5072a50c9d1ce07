"""Configurations explained: their prediction, a better plan that their system can run, and the difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.cluster import cluster_from
from paceline_lab.configurations.configuration import REST, Configuration, planned
from paceline_lab.configurations.systems import ConfiguredPlan, explain_configuration, framework_of, write_configuration

GPT = {"layers": 16, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 32000, "positions": False, "tied": False}
SLOW = Configuration(
    "Megatron-LM", GPT, ranks=8, replicas=1, shard=REST, zero=1, tp=4, remat="block", microbatch=1, global_batch=64
)


def explained(configuration: Configuration, cluster: str = "8xH100-SXM") -> ConfiguredPlan:
    on = cluster_from(cluster)
    configuration = replace(configuration, precision="bf16")
    return explain_configuration(configuration, planned(configuration, on.devices, "gpt"), on)


def test_a_better_plan_is_one_that_the_system_can_run_with_the_reason() -> None:
    told = explained(SLOW)
    assert told.best is not None
    assert told.gain > 0.05
    assert write_configuration("megatron", told.best.plan, told.own.job, 8)
    assert ("remat", "block", "none") in told.changes
    assert dict(told.saved)["computing again"] > 0
    assert "faster" in told.verdict


def test_it_is_compared_on_as_many_devices_as_it_is_for() -> None:
    told = explained(SLOW, "16x8xH100-SXM")
    assert told.best is not None
    assert told.best.plan.ranks <= 8


def test_a_plan_that_does_not_fit_is_said_so_and_one_that_fits_is_named() -> None:
    told = explained(replace(SLOW, replicas=REST, shard=1, tp=1, remat="none", microbatch=8))
    assert not told.own.winner.prediction.fits
    assert told.verdict.startswith("it does not fit")
    assert told.best is not None
    assert told.best.prediction.fits


def test_the_best_plan_itself_is_told_that_nothing_is_better() -> None:
    best = explained(SLOW).best
    assert best is not None
    plan = best.plan
    same = replace(
        SLOW, tp=plan.tp, pp=plan.pp, zero=plan.zero, remat=plan.remat, microbatch=None, microbatches=plan.microbatches
    )
    same = replace(same, replicas=plan.dp, shard=plan.fsdp, sequence=plan.sequence)
    told = explained(same)
    assert told.gain == pytest.approx(0, abs=0.01)
    assert "nothing better" in told.verdict


def test_each_system_is_predicted_as_its_own_software_runs_it() -> None:
    names = {
        "Megatron-LM": "Megatron Core",
        "DeepSpeed": "DeepSpeed",
        "torchtitan": "torchtitan",
        "Accelerate, FSDP": "FSDP",
        "Accelerate, DEEPSPEED": "DeepSpeed",
        "Accelerate": "DDP",
    }
    for system, name in names.items():
        assert framework_of(replace(SLOW, system=system)).name == name


def test_everything_that_was_not_understood_is_in_the_json() -> None:
    values = explained(replace(SLOW, unknown=("strange_key",))).to_json()
    assert values["not_understood"] == ["strange_key"]
    assert values["own"]["plan"].startswith("fsdp=2 tp=4")
