"""Configurations of DeepSpeed, torchtitan and Accelerate, and which system a file belongs to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PlanError
from paceline_lab.configurations.configuration import Configuration, Planned, planned, with_batch
from paceline_lab.configurations.systems import read_configuration
from refusals import raises

FILES = Path(__file__).parent / "files"
KNOWN = {"layers": 8, "hidden": 512, "heads": 8, "seq": 512, "vocab": 1024}


def on(found: Configuration, ranks: int) -> Planned:
    return planned(replace(found, model_name=found.model_name or "known"), ranks, "job", lambda _: KNOWN)


def deepspeed(folder: Path, **values: Any) -> Configuration:
    file = folder / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1} | values))
    return read_configuration(file)


def torchtitan(folder: Path, text: str) -> Configuration:
    file = folder / "job.toml"
    file.write_text(text)
    return read_configuration(file)


def accelerate(folder: Path, text: str) -> Configuration:
    file = folder / "accelerate.yaml"
    file.write_text(f"distributed_type: FSDP\nnum_processes: 8\n{text}")
    return with_batch(read_configuration(file), 64, 1)


# DeepSpeed


def test_zero_shards_over_all_ranks_and_the_batch_follows() -> None:
    found = read_configuration(FILES / "deepspeed_zero3.json")
    job, plan, *_ = on(found, 16)
    assert str(plan) == "fsdp=16 microbatches=8"
    assert (job.global_batch, job.precision) == (2 * 8 * 16, "bf16")
    assert found.unknown == ("pipeline.stages",)
    assert not found.problems


@pytest.mark.parametrize(("stage", "plan"), [(0, "dp=8"), (1, "fsdp=8 zero=1"), (2, "fsdp=8 zero=2")])
def test_every_stage_of_zero_is_its_own_plan(tmp_path: Path, stage: int, plan: str) -> None:
    assert str(on(deepspeed(tmp_path, zero_optimization={"stage": stage}), 8).plan) == plan


def test_parts_of_the_ranks_that_shard_leave_replicas(tmp_path: Path) -> None:
    found = deepspeed(tmp_path, zero_optimization={"stage": 3, "mics_shard_size": 4})
    assert str(on(found, 16).plan) == "dp=4 fsdp=4"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "exclude"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "stage 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "needs ZeRO"),
    ],
)
def test_what_deepspeed_refuses_is_told(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in deepspeed(tmp_path, **values).problems)


def test_auto_is_not_a_value_and_the_batch_is_asked_for(tmp_path: Path) -> None:
    found = deepspeed(tmp_path, train_micro_batch_size_per_gpu="auto", train_batch_size="auto")
    with raises(PlanError, "config.no_global_batch"):
        on(found, 8)
    assert on(with_batch(found, 64, None), 8).job.global_batch == 64


def test_a_batch_that_its_parts_do_not_make_is_an_error(tmp_path: Path) -> None:
    with raises(PlanError, "config.microbatch"):
        on(deepspeed(tmp_path, train_batch_size=64, gradient_accumulation_steps=3), 8)


# torchtitan


def test_a_torchtitan_file_is_read_with_its_flavor_and_what_it_cannot_be() -> None:
    found = read_configuration(FILES / "torchtitan_70b.toml")
    assert found.model_name == "llama3-70B"
    plan = on(found, 256).plan
    assert str(plan) == "fsdp=32 tp=8 sequence=on remat=block"
    assert found.unknown == ("parallelism.shiny_new_degree",)


def test_microbatches_of_a_pipeline_come_from_its_own_size(tmp_path: Path) -> None:
    text = "[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 4\n"
    schedule = 'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_microbatch_size = 2\n'
    plan = on(torchtitan(tmp_path, text + schedule), 8).plan
    assert (plan.pp, plan.fsdp, plan.microbatches, plan.schedule) == (4, 2, 4, "interleaved")


def test_experts_are_divided_among_the_ranks_that_shard(tmp_path: Path) -> None:
    found = torchtitan(tmp_path, "[parallelism]\nexpert_parallel_degree = 4\n")
    plan = on(found, 8).plan
    assert (plan.fsdp, plan.ep) == (2, 4)


def test_degrees_that_leave_ranks_over_are_an_error(tmp_path: Path) -> None:
    found = torchtitan(tmp_path, "[parallelism]\ndata_parallel_shard_degree = 3\n")
    with raises(PlanError, "config.data_ranks_differ", data=8, known=3, ranks=8):
        on(found, 8)


def test_a_schedule_that_nobody_knows_is_told(tmp_path: Path) -> None:
    text = '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "LoopedBFS"\n'
    assert any("LoopedBFS" in problem for problem in torchtitan(tmp_path, text).problems)


# Accelerate


def test_replicas_shards_and_matrices_of_a_mesh_are_read() -> None:
    found = with_batch(read_configuration(FILES / "accelerate_fsdp2.yaml"), 64, 1)
    assert found.ranks == 8
    assert not found.unknown
    assert str(on(found, 8).plan) == "dp=2 fsdp=2 tp=2 remat=block microbatches=16"


@pytest.mark.parametrize(
    ("strategy", "plan"),
    [("FULL_SHARD", "fsdp=8"), ("SHARD_GRAD_OP", "fsdp=8 zero=2"), ("NO_SHARD", "dp=8"), ("1", "fsdp=8")],
)
def test_strategies_of_fsdp_1_are_stages_of_zero(tmp_path: Path, strategy: str, plan: str) -> None:
    found = accelerate(tmp_path, f"fsdp_config: {{fsdp_sharding_strategy: {strategy}}}\nmixed_precision: bf16\n")
    assert str(on(found, 8).plan) == f"{plan} microbatches=8"


def test_hybrid_sharding_is_within_each_machine_and_said_to_be_a_guess(tmp_path: Path) -> None:
    found = accelerate(tmp_path, "num_machines: 2\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n")
    assert (on(found, 8).plan.dp, on(found, 8).plan.fsdp) == (2, 4)
    assert any("hybrid" in problem for problem in found.problems)


def test_deepspeed_within_accelerate_is_read_by_the_same_rules(tmp_path: Path) -> None:
    found = with_batch(read_configuration(FILES / "accelerate_deepspeed.yaml"), 64, None)
    plan = on(found, 16).plan
    assert str(plan) == "fsdp=16 zero=2 microbatches=4"
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": 32}))
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    assert on(read_configuration(tmp_path / "a.yaml"), 8).plan.fsdp == 8


def test_tensor_parallelism_without_fsdp_2_is_told(tmp_path: Path) -> None:
    found = accelerate(
        tmp_path, "parallelism_config: {parallelism_config_tp_size: 2}\nfsdp_config: {fsdp_version: 1}\n"
    )
    assert any("fsdp_version: 2" in problem for problem in found.problems)


# Which system


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.json", "{", "config.not_json"),
        ("a.json", "[]", "config.deepspeed_invalid"),
        ("a.toml", "[a", "config.not_toml"),
        ("a.yaml", "a: [", "config.not_yaml"),
        ("a.md", "words", "config.unknown_format"),
        ("missing.toml", None, "config.unreadable"),
    ],
)
def test_a_file_that_is_no_configuration_is_an_error(tmp_path: Path, name: str, text: str | None, code: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with raises(PlanError, code):
        read_configuration(file)
