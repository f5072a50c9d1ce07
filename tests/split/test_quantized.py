"""Frozen layers in few bits: what a rank holds of them, and that every split computes the dequantized model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import paceline
from paceline.comm import Group
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.model import Dimensions
from paceline.job.zoo.models import GPT
from paceline.job.zoo.quantized import QuantizedLinear, RowFormat, mark, marked, round_weights
from paceline.planning.model.model_info import model_info, model_info_by_dimensions
from paceline.planning.plan import Plan
from paceline.run.build import begin_engine, built
from paceline.run.convert import export
from paceline.state.rank_state import RankState
from refusals import raises

SIZES = {"layers": 2, "hidden": 128, "heads": 4, "context": 8, "vocab": 64}
BASE = ["query_key_value", "attention.out", "mlp"]
MODEL = {"zoo": "gpt", "args": SIZES, "freeze": BASE}
KINDS = ["int8", "nf4"]


def job(**keys: Any) -> Job:
    given: dict[str, Any] = {
        "model": MODEL,
        "data": {"kind": "synthetic", "samples": 16, "shape": [8], "vocab": 64, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "global_batch": 4,
        "stop": {"steps": 2},
    }
    return Job(**{**given, **keys})


def frozen() -> nn.Module:
    torch.manual_seed(0)
    model = GPT(**SIZES)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 100, 192])
def test_quantized_rows_are_near_the_weight_and_shards_of_rows_and_columns_are_equal(kind: Any, columns: int) -> None:
    torch.manual_seed(0)
    weight, whole = torch.randn(12, columns), RowFormat(kind, columns)
    packed = whole.pack(weight)
    found = whole.unpack(packed, torch.float32)
    assert packed.shape == (12, whole.row_bytes)
    assert float((found - weight).abs().max()) < (0.05 if kind == "int8" else 0.7)
    assert torch.equal(whole.pack(weight[3:7]), packed[3:7])
    if columns == 192:
        kept = whole.intervals([(64, 192)])
        own = torch.cat([packed[:, start:stop] for start, stop in kept], 1)
        assert torch.equal(own, RowFormat(kind, 128).pack(weight[:, 64:]))
        assert whole.columns_of(kept) == ((64, 192),)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_output_and_gradients_are_those_of_the_dequantized_model(kind: Any, dtype: torch.dtype) -> None:
    reference, model = frozen(), frozen()
    mark(reference, kind)
    round_weights(reference)
    mark(model, kind)
    for _, layer, _ in list(marked(model)):
        weight = layer.weight.detach()
        QuantizedLinear.convert(layer, kind)
        layer.weight = nn.Parameter(RowFormat(kind, weight.shape[1]).pack(weight), requires_grad=False)
    tokens = torch.arange(16).view(2, 8)
    outputs = []
    for one in (model.to(dtype), reference.to(dtype)):
        outputs.append(one(tokens))
        outputs[-1].square().sum().backward()
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(*outputs, rtol=rounding, atol=rounding)
    own, other = (dict(one.named_parameters()) for one in (model, reference))
    for name, parameter in own.items():
        if parameter.requires_grad:
            found, expected = parameter.grad, other[name].grad
            assert found is not None
            assert expected is not None
            assert float((found - expected).norm()) <= rounding * 10 * float(expected.norm())


def test_a_quantized_model_takes_a_fraction_of_the_memory() -> None:
    held = {kind: sum(p.nbytes for n, p in parameters(kind).items() if in_base(n)) for kind in (*KINDS, None)}
    whole = held[None]
    assert held["int8"] / whole == pytest.approx(8.5 / 32)
    assert held["nf4"] / whole == pytest.approx(4.5 / 32)


def parameters(kind: str | None) -> dict[str, Tensor]:
    model = built(job(quantize=kind), Plan())
    assert isinstance(model, nn.Module)
    return dict(model.named_parameters())


def in_base(name: str) -> bool:
    return is_frozen(name) and name.endswith("weight")


def is_frozen(name: str) -> bool:
    return any(f".{part}." in name for part in BASE)


def pretrained(folder: Path, kind: Any) -> tuple[Path, Path]:
    """Write weights, and the same weights as the quantized model has them."""
    model = frozen()
    whole, rounded = folder / "whole.safetensors", folder / "rounded.safetensors"
    save_model(model, str(whole))
    mark(model, kind)
    round_weights(model)
    save_model(model, str(rounded))
    return whole, rounded


def losses(job: Job, plan: str) -> list[float]:
    parity = paceline.check(job, plan, steps=2)
    assert parity.holds, parity
    return [step.loss for step in parity.steps]


@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("nf4", ["dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2"]),
        ("int8", ["fsdp=2 tp=2", "pp=2 fsdp=2 microbatches=2 remat=block"]),
    ],
)
@pytest.mark.timeout(600)
def test_losses_of_every_split_are_those_of_the_dequantized_weights_in_float64(
    tmp_path: Path, kind: str, plans: Sequence[str]
) -> None:
    whole, rounded = pretrained(tmp_path, kind)
    expected = losses(job(model={**MODEL, "weights": str(rounded)}), "dp=1 precision=fp64")
    quantized = job(model={**MODEL, "weights": str(whole)}, quantize=kind)
    for plan in plans:
        assert losses(quantized, f"{plan} precision=fp64") == pytest.approx(expected, rel=1e-12), plan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(600)
def test_a_run_resumes_under_another_split_and_exports_the_dequantized_weights(tmp_path: Path, kind: str) -> None:
    straight = paceline.train(job(quantize=kind), "dp=1", run=tmp_path / "straight")
    paceline.train(job(quantize=kind, stop={"steps": 1}), "fsdp=2", run=tmp_path / "run")
    resumed = paceline.train(job(quantize=kind), "tp=2", run=tmp_path / "run", resume=True)
    files = [tmp_path / "straight.safetensors", tmp_path / "resumed.safetensors"]
    for run, file in zip((straight, resumed), files, strict=True):
        export(run.path, file)
    expected, found = map(load_file, files)
    torch.manual_seed(0)
    base = GPT(**SIZES)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    mark(base, kind)  # type: ignore[arg-type]
    round_weights(base)
    weights = dict(base.named_parameters())
    assert expected.keys() == found.keys() >= weights.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
        if in_base(name):
            assert torch.equal(tensor, weights[name])


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_rank_gets_the_weights_of_its_peer(kind: str) -> None:
    spec, group = job(quantize=kind), Group()
    engines = [begin_engine(spec, Plan(), spec.data.build(input_shape=None, seed=0), group) for _ in range(2)]
    kept, lost = ({name: p.detach() for name, p in engine.named_parameters().items()} for engine in engines)
    expected = {name: p.clone() for name, p in kept.items()}
    for parameter in lost.values():
        parameter.zero_()
    sent = RankState.of(engines[0]).copied(in_one_piece=True)
    received = RankState.empty(sent.header)
    received.memory.copy_(sent.memory)  # type: ignore[union-attr, arg-type]
    received.restore(engines[1])
    assert any(p.dtype == torch.uint8 for p in lost.values())
    assert all(torch.equal(p, expected[name]) for name, p in lost.items())
    for engine in engines:
        engine.loader.close()
        engine.close()


@pytest.mark.timeout(300)
def test_a_tp_that_cuts_a_block_of_columns_is_refused() -> None:
    sizes = {**SIZES, "hidden": 64}
    narrow = job(model={**MODEL, "args": sizes}, quantize="nf4")
    with raises(paceline.PacelineError, "plan.quantized_block_cut", block=64):
        paceline.check(narrow, "tp=2", steps=1)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_count_the_bytes_that_ranks_hold(kind: Any) -> None:
    spec = job(quantize=kind)
    held = sum(p.nbytes for p in parameters(kind).values())
    assert model_info(spec.model).held_part * 4 * model_info(spec.model).numel == pytest.approx(held)
    info = model_info_by_dimensions(Dimensions(layers=2, hidden=128, heads=4, seq=8, vocab=64), kind)
    assert info.held_part < 0.4


def test_quantize_without_frozen_layers_is_refused() -> None:
    with raises(JobError, "model.nothing_to_quantize", kind="nf4"):
        job(model="gpt", quantize="nf4").model.build()
