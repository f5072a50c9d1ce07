"""Products in float8: near those in bf16, alike under every plan, and refused where they cannot be."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cluster.cluster import cluster_from
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.job.parameters import float8_layers
from paceline.job.zoo.models import GPT
from paceline.planning.check.plan_errors import warnings_about
from paceline.planning.check.rules import reasons_against
from paceline.planning.model.model_info import model_info
from paceline.planning.plan import Plan
from paceline.planning.prediction import estimate
from paceline.planning.search.search import search
from paceline.run.convert import export
from paceline.split.float8 import convert, mark, restore, without_float8
from ranks import Ranks
from refusals import raises

VOCAB, TOKENS = 32, 16
SIZES = {"layers": 2, "hidden": 32, "heads": 2, "context": TOKENS, "vocab": VOCAB}


def chains(count: int) -> Tensor:
    """Return sequences in which each token has two equally likely successors, so that losses end near log 2."""
    draw = torch.Generator().manual_seed(3)
    follow = torch.randint(VOCAB, (VOCAB, 2), generator=draw)
    found = [torch.randint(VOCAB, (count,), generator=draw)]
    for _ in range(TOKENS):
        found.append(follow[found[-1], torch.randint(2, (count,), generator=draw)])
    return torch.stack(found, 1)


class Tokens(nn.Module):
    """Cross entropy of every token."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def losses(plan: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = GPT(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = chains(64 * 16)
    loader: DataLoader[Any] = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=16)
    engine = paceline.setup(model, optimizer, loss=Tokens(), loader=loader, plan=plan)
    found = [engine.step(batch).loss for _, batch in zip(range(steps), engine.loader, strict=False)]
    engine.close()
    return found


def test_training_converges_to_the_loss_of_bf16() -> None:
    wide, narrow = losses("dp=1 precision=bf16", 60), losses("dp=1 precision=fp8", 60)
    end, expected = sum(narrow[-10:]) / 10, sum(wide[-10:]) / 10
    assert expected < 0.5 * wide[0]
    assert end == pytest.approx(expected, rel=0.01)
    assert narrow != wide


@pytest.mark.parametrize("plan", ["fsdp=2", "pp=2 microbatches=2", "pp=2 microbatches=2 schedule=zero-bubble", "cp=2"])
@pytest.mark.timeout(300)
def test_every_split_trains_as_one_process_does(ranks: Ranks, plan: str) -> None:
    expected = losses("dp=1 precision=fp8", 6)
    for found in ranks(2, losses, f"{plan} precision=fp8", 6):
        assert found == pytest.approx(expected, rel=5e-3)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / x.float().abs().max()
    return (x.float() * scale).to(dtype).float() / scale


def test_products_and_gradients_are_those_of_rounded_factors() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(48, 16))
    mark(model, torch.device("cpu"))
    convert([model], torch.device("cpu"))
    x, dy = torch.randn(4, 5, 32, requires_grad=True), torch.randn(4, 5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy.bfloat16())
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    inputs, weight = rounded(x.detach().bfloat16(), e4m3).flatten(0, 1), rounded(layer.weight.detach(), e4m3)
    gradient = rounded(dy.bfloat16(), e5m2).flatten(0, 1)
    pairs = [
        (y.detach().flatten(0, 1).float(), inputs @ weight.T + layer.bias.detach()),
        (x.grad.flatten(0, 1), gradient @ weight),  # type: ignore[union-attr]
        (layer.weight.grad, gradient.T @ inputs),
        (layer.bias.grad, dy.flatten(0, 1).sum(0)),
    ]
    for found, expected in pairs:
        assert found is not None
        assert float((found - expected).norm()) < 5e-3 * float(expected.norm())
    assert layer(x[:0]).shape == (0, 5, 48)


def test_checks_of_a_batch_multiply_as_in_bf16_and_a_closed_engine_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model, tokens = GPT(**SIZES), chains(4)[:, :-1]
    names, before = set(model.state_dict()), model(tokens)
    mark(model, torch.device("cpu"))
    earlier = convert([model], torch.device("cpu"))
    mark(model, torch.device("cpu"))
    latest = convert([model], torch.device("cpu"))
    restore(model, earlier)
    assert set(model.state_dict()) == names
    assert not torch.equal(model(tokens), before)
    with without_float8():
        assert torch.equal(model(tokens), before)
    restore(model, latest)
    assert torch.equal(model(tokens), before)
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.odd, self.own = nn.Linear(32, 16), nn.Linear(32, 24), Doubled(32, 32)
        self.plain, self.frozen, self.shared = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.frozen.requires_grad_(requires_grad=False)
        self.again = self.shared
        self.classifier = nn.Linear(32, 16)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_heads_routers_odd_sizes_and_frozen_or_shared_layers_stay_in_bf16() -> None:
    assert list(float8_layers(Mixture())) == ["plain"]
    assert len(float8_layers(GPT(**SIZES))) == 4 * SIZES["layers"]


def job(**keys: Any) -> Job:
    given: dict[str, Any] = {
        "model": {"zoo": "gpt", "args": SIZES},
        "data": {"kind": "synthetic", "samples": 32, "shape": [TOKENS], "vocab": VOCAB, "held_out": 0},
        "loss": "cross_entropy",
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "global_batch": 4,
        "stop": {"steps": 4},
        "precision": "fp8",
    }
    return Job(**{**given, **keys})


@pytest.mark.timeout(300)
def test_a_run_records_its_layers_resumes_in_bf16_and_exports_the_usual_names(tmp_path: Path) -> None:
    paceline.train(job(stop={"steps": 2}), "fsdp=2", run=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any("8 of 9 linear layers" in text for event in events for text in event.get("said", ()))
    resumed = paceline.train(job(), "dp=1 precision=bf16", run=tmp_path / "run", resume=True)
    export(resumed.path, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == GPT(**SIZES).state_dict().keys()


@pytest.mark.parametrize(
    ("plan", "keys", "code", "cluster"),
    [
        ("tp=2", {}, "plan.float8_with_tp", "2xH100-SXM"),
        ("dp=1", {"adapter": {"lora": {"r": 16}}}, "plan.float8_with_frozen_layers", "1xH100-SXM"),
        ("dp=1", {"model": {"zoo": "gpt", "args": {**SIZES, "hidden": 24}}}, "plan.no_float8_layers", "1xH100-SXM"),
        ("dp=1", {}, "plan.no_float8_units", "1xA100-SXM-80"),
        ("dp=1", {}, "plan.no_float8_units", "1xV100-SXM-16"),
    ],
)
def test_what_cannot_be_in_float8_is_refused_before_the_start(
    plan: str, keys: dict[str, Any], code: str, cluster: str
) -> None:
    reasons = reasons_against(Plan.parse(plan), job(**keys), cluster_from(cluster))
    assert [reason.code for reason in reasons] == [code]


def test_a_plan_without_the_library_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    reasons = reasons_against(Plan(), job(), cluster_from("1xH100-SXM"))
    assert [reason.code for reason in reasons] == ["plan.no_float8_library"]


def test_a_divided_model_in_an_own_loop_is_refused_under_tp(ranks: Ranks) -> None:
    for code in ranks(2, refusal, "tp=2 precision=fp8"):
        assert code == "plan.float8_with_tp"


def refusal(plan: str) -> str:
    with pytest.raises(PlanError) as caught:
        losses(plan, 1)
    return caught.value.problems[0].code


DIMENSIONS = {"layers": 8, "hidden": 4096, "heads": 32, "seq": 4096, "vocab": 32000}


def test_the_planner_prices_float8_below_bf16_if_its_casts_are_compiled() -> None:
    spec = job(
        model={"transformer": DIMENSIONS},
        data={"kind": "synthetic", "samples": 64, "shape": [4096], "vocab": 32000},
        global_batch=8,
    )

    def predicted(precision: str, compiled: str) -> paceline.Prediction:
        return estimate(spec, f"fsdp=8 precision={precision} compile={compiled}", cluster="8xH100-SXM")

    narrow, wide = predicted("fp8", "on"), predicted("bf16", "on")
    assert 0.5 * wide.step_time_s < narrow.step_time_s < 0.9 * wide.step_time_s
    assert narrow.memory["parameters"] == wide.memory["parameters"]
    assert wide.memory_bytes < narrow.memory_bytes < 1.2 * wide.memory_bytes
    assert predicted("fp8", "off").step_time_s > narrow.step_time_s
    plan = Plan.parse("fsdp=8 precision=fp8")
    assert reasons_against(plan, spec, cluster_from("8xH100-SXM")) == []
    assert any("compile=on" in text for text in warnings_about(plan, spec, cluster_from("8xH100-SXM")))


def test_a_search_without_a_device_for_float8_says_so() -> None:
    spec = job(model={"transformer": DIMENSIONS})
    with raises(PlanError, "plan.none_found", reasons=re.compile("float8.*precision=bf16")):
        search(spec, cluster_from("8xA100-SXM-80"))


def test_the_layers_of_a_model_by_its_dimensions_are_known_without_building_it() -> None:
    assert len(model_info(job(model={"transformer": DIMENSIONS}).model).float8_layers) >= 4 * 8
