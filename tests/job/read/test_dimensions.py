"""A model by its dimensions: planned by whoever has neither its code nor torch, and not to be trained by mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
import paceline_lab
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.model import Dimensions, ModelSpec
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.model.model_info import model_info
from paceline.planning.model.transformer import transformer
from paceline.planning.plan import Plan
from paceline.planning.search.space import legal_plans
from refusals import raises

EXAMPLES = Path(__file__).parents[3] / "examples" / "plan"
SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "seq": 16, "vocab": 50}


def job(**dimensions: Any) -> Job:
    return Job(
        model={"transformer": SMALL | dimensions},
        data="synthetic",
        loss="cross_entropy",
        optimizer="adamw",
        global_batch=64,
        stop={"steps": 10},
    )


def cluster(hosts: int) -> Cluster:
    gpus = tuple(Device(index=i, name="device", memory_bytes=80 << 30) for i in range(8))
    return Cluster(
        name="gpus", hosts=tuple(Host(name=f"host {i}", cores=8, memory_bytes=1 << 40, gpus=gpus) for i in range(hosts))
    )


@pytest.mark.parametrize(("example", "parameters"), [("llama_70b", 70_553_706_496), ("gpt_1t", 1_008_038_758_400)])
def test_the_examples_are_the_models_that_they_say(example: str, parameters: int) -> None:
    spec = Job.load(EXAMPLES / f"{example}.yaml").model
    assert model_info(spec).numel == parameters
    assert spec.transformer is not None
    assert transformer(spec.transformer).parameters == parameters


def test_reading_and_checking_a_plan_for_dimensions_needs_no_torch() -> None:
    program = """
import sys
from paceline.job.job import Job
from paceline.planning.model.model_info import model_info
from paceline.planning.model.model_info import trace
job = Job.load(sys.argv[1])
assert model_info(job.model).heads == (64,) and trace(job).tokens == 8192
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", program, str(EXAMPLES / "llama_70b.yaml")], check=True, timeout=60)


def test_training_dimensions_says_what_to_name_instead() -> None:
    with raises(JobError, "model.dimensions_only"):
        job().model.build()
    with raises(JobError, "model.dimensions_only"):  # whoever begins with the data finds out as well
        job().model.input_shape()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"heads": 5}, "model.hidden_not_divisible"),
        ({"kv_heads": 3}, "model.kv_heads"),
        ({"experts": 2, "top_k": 3}, "model.experts_top_k"),
        ({"layers": 0}, "file.value_out_of_range"),
        ({"hiden": 3}, "file.unknown_key"),
    ],
)
def test_impossible_dimensions_are_refused(wrong: dict[str, Any], code: str) -> None:
    with raises(JobError, code):
        job(**wrong)


@pytest.mark.parametrize(
    ("also", "code"),
    [
        ({"zoo": "gpt"}, "model.source_ambiguous"),
        ({"weights": "."}, "model.transformer_with_weights"),
        ({"args": {"layers": 3}}, "model.transformer_with_weights"),
    ],
)
def test_dimensions_are_all_that_is_known_of_a_model(also: dict[str, Any], code: str) -> None:
    with raises(ValueError, code):
        ModelSpec(transformer=SMALL, **also)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.tuples(*[st.booleans()] * 3),
    st.integers(0, 4),
)
def test_the_formula_has_the_parameters_of_the_trace(
    layers: int, heads: int, head: int, vocab: int, switches: tuple[bool, ...], experts: int
) -> None:
    more: dict[str, Any] = dict(zip(("gated", "tied", "positions"), switches, strict=True)) | {"experts": experts}
    d = Dimensions(layers=layers, hidden=heads * head, heads=heads, seq=7, vocab=vocab, **more)
    found = model_info(ModelSpec(transformer=d))
    assert found.numel == transformer(d).parameters
    assert found.total.experts == sum(block.experts for block in transformer(d))
    assert len(found.blocks) == layers
    assert set(found.blocks) < set(found.modules)


def test_the_formula_is_that_of_the_zoos_gpt() -> None:
    real = model_info(ModelSpec(zoo="gpt", args={"layers": 2, "hidden": 32, "heads": 4, "context": 16, "vocab": 50}))
    by_formula = model_info(ModelSpec(transformer=SMALL))
    assert (by_formula.total, by_formula.kinds_of_blocks) == (real.total, real.kinds_of_blocks)
    assert (by_formula.heads, by_formula.vocabulary, by_formula.tied) == (real.heads, real.vocabulary, real.tied)
    assert sorted(shape.sizes for shape in by_formula.parameters) == sorted(shape.sizes for shape in real.parameters)


def test_plans_are_checked_against_dimensions() -> None:
    many = job(heads=8, kv_heads=4, hidden=64, layers=4)
    odd = job(heads=24, kv_heads=6, hidden=96, layers=4)
    problem = plan_errors(odd, "tp=8", cluster=cluster(1))[0]
    assert (problem.code, problem.fields["heads"]) == ("plan.heads_not_divisible", [6, 24])
    assert plan_errors(many, Plan.parse("tp=8"), cluster=cluster(1)) == []  # two ranks share a head
    assert plan_errors(many, "pp=8 microbatches=8", cluster=cluster(1))[0].code == "plan.too_many_stages"
    problem = plan_errors(many, "cp=3", cluster=cluster(1))[0]
    assert (problem.code, problem.fields["tokens"]) == ("plan.tokens_not_divisible", 16)
    assert plan_errors(many, Plan.parse("tp=2 pp=2 cp=2 microbatches=2"), cluster=cluster(1)) == []
    assert "ep=2" in {str(plan) for plan in legal_plans(job(experts=4), cluster(1), 2)}


def test_a_model_beyond_all_memory_is_refused_before_anything_starts() -> None:
    huge = Job.load(EXAMPLES / "gpt_1t.yaml")
    assert plan_errors(huge, "tp=8", cluster=cluster(1))[0].code == "plan.state_beyond_memory"


def test_training_dimensions_ends_before_anything_is_measured_or_written(tmp_path: Path) -> None:
    large = Job.load(EXAMPLES / "llama_70b.yaml")
    with raises(JobError, "model.dimensions_only"):
        paceline.train(large, run=tmp_path / "run")
    with raises(JobError, "model.dimensions_only"):
        paceline_lab.bench(large, out=tmp_path / "bench")
    assert not any(tmp_path.iterdir())
