"""Configurations of Megatron-LM and NeMo: shell scripts, lists of arguments and YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline_lab.configurations.configuration import Configuration, planned
from paceline_lab.configurations.megatron import arguments
from paceline_lab.configurations.systems import read_configuration
from refusals import raises

FILES = Path(__file__).parent / "files"
SMALL = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 1024 --bf16"


def of_arguments(folder: Path, text: str) -> Configuration:
    file = folder / "args.txt"
    file.write_text(f"{SMALL} {text}")
    return read_configuration(file)


def test_a_script_with_arrays_variables_arithmetic_and_comments_is_read() -> None:
    found = read_configuration(FILES / "megatron_llama_8b.sh")
    job, plan, *_ = planned(found, 8, "llama")
    assert str(plan) == "fsdp=4 tp=2 zero=1 sequence=on remat=selective microbatches=32"
    assert (job.global_batch, job.precision, job.stop.steps) == (128, "bf16", 100_000)
    assert job.model.transformer is not None
    assert (job.model.transformer.layers, job.model.transformer.kv_heads) == (32, 8)
    assert not job.model.transformer.tied


def test_what_nobody_understands_is_named_and_what_changes_nothing_is_not() -> None:
    found = read_configuration(FILES / "megatron_llama_8b.sh")
    assert found.unknown == ("use_invented_kernels",)
    assert [key for key, _ in found.noted] == ["overlap_grad_reduce"]


def test_a_nemo_configuration_of_a_mixture_is_read() -> None:
    found = read_configuration(FILES / "nemo_mixture.yaml")
    job, plan, *_ = planned(found, 64, "mixture")
    assert found.ranks == 64
    assert plan.ranks == 64
    assert (plan.tp, plan.pp, plan.ep, plan.schedule, plan.remat) == (2, 4, 8, "interleaved", "block")
    assert job.model.transformer is not None
    assert (job.model.transformer.experts, job.model.transformer.top_k) == (8, 2)
    assert not found.unknown
    assert "model.activations_checkpoint_method" in dict(found.noted)


def test_arguments_alone_and_with_equals_signs_are_read(tmp_path: Path) -> None:
    found = of_arguments(tmp_path, "--tensor-model-parallel-size=4 --micro-batch-size=2 --global-batch-size=16")
    plan = planned(found, 8, "small").plan
    assert (plan.tp, plan.dp, plan.microbatches) == (4, 2, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--bf16 --fp16", "exclude"),
        ("--sequence-parallel", "does nothing without"),
        ("--num-experts 4 --tensor-model-parallel-size 2", "needs --sequence-parallel"),
        ("--pipeline-model-parallel-size 3", "do not divide into 3"),
        ("--tensor-model-parallel-size 3", "heads do not divide"),
        ("--overlap-param-gather", "--use-distributed-optimizer"),
        ("--num-experts 6 --expert-model-parallel-size 4", "experts do not divide"),
    ],
)
def test_combinations_that_do_not_go_together_are_told(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in problem for problem in of_arguments(tmp_path, text).problems)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("--micro-batch-size 1", "config.no_global_batch"),
        ("--micro-batch-size 3 --global-batch-size 16", "config.microbatch"),
        ("--micro-batch-size 1 --global-batch-size 16 --tensor-model-parallel-size 16", "config.degrees_do_not_divide"),
        ("--micro-batch-size 1 --global-batch-size 16 --expert-model-parallel-size 3", "config.experts_do_not_divide"),
    ],
)
def test_degrees_and_batches_that_do_not_come_out_even_are_errors(tmp_path: Path, text: str, code: str) -> None:
    with raises(PlanError, code):
        planned(of_arguments(tmp_path, text), 8, "small")


def test_a_value_that_is_no_number_names_its_key(tmp_path: Path) -> None:
    with raises(PlanError, "config.not_a_number", name="micro_batch_size", value="eight"):
        of_arguments(tmp_path, "--micro-batch-size eight")


def test_a_model_that_is_half_stated_says_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "args.sh"
    file.write_text("--num-layers 8 --hidden-size 512 --micro-batch-size 1 --global-batch-size 8")
    with raises(PlanError, "config.model_incomplete", missing=["heads", "seq", "vocab"]):
        planned(read_configuration(file), 8, "small")


def test_conditions_and_unset_variables_of_a_script_are_told_not_guessed() -> None:
    flags, notes = arguments(
        'if [ -n "$X" ]; then\n  A="--tensor-model-parallel-size $TP"\nfi\npython a.py $A --bf16\n'
    )
    assert flags == {"bf16": True}
    assert any("conditions" in note for note in notes)
    assert any("TP" in note for note in notes)


def test_fp8_is_predicted_as_what_is_said(tmp_path: Path) -> None:
    found = of_arguments(tmp_path, "--fp8-format hybrid --micro-batch-size 1 --global-batch-size 8")
    assert found.precision == "fp8"
    read = planned(found, 8, "small")
    assert "fp8" in (str(read.job.precision), read.products)
