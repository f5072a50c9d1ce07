"""A divided model in the engine.

Batches that leave ranks without samples, validation metrics, users' own loops, and what is reported.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from model_families import ZOO, family_job
from paceline.comm import Group
from paceline.errors import NonFiniteError, PlanError
from paceline.job.zoo.models import GPT
from paceline.planning.plan import Plan
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline.run.recovery.run import train_in
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, train_as_rank, train_here

FEATURES, WIDTH, CLASSES, SAMPLES, BATCH = 6, 8, 4, 22, 8


class Layers(nn.Module):
    """Four alike layers between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        y: Tensor = self.head(x)
        return y


def own_loop(
    plan: str, steps: int = 6, samples: int = SAMPLES, *, warm: bool = False, nan_at: int | None = None
) -> dict[str, Any]:
    """Losses, norms and this rank's parts of the weights; `warm`: the optimizer has taken a step before."""
    torch.manual_seed(1)
    model = Layers().double()
    inputs, target = torch.randn(samples, FEATURES, dtype=torch.float64), torch.randint(0, CLASSES, (samples,))
    if nan_at is not None:
        inputs[nan_at] = float("nan")
    rest = [*model.layers.parameters(), *model.head.parameters()]
    groups: list[dict[str, Any]] = [{"params": list(model.first.parameters()), "lr": 0.02}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    if warm:
        F.cross_entropy(model(inputs[:4]), target[:4]).backward()
        optimizer.step()
    loader = DataLoader(TensorDataset(inputs, target), batch_size=BATCH)
    engine = paceline.setup(model, optimizer, loss=F.cross_entropy, loader=loader, plan=plan, precision="fp64")
    found: dict[str, Any] = {"losses": [], "norms": []}
    while len(found["losses"]) < steps:
        for batch in engine.loader:
            result = engine.step(batch)
            found["losses"].append(result.loss)
            found["norms"].append(result.grad_norm)
    parts = engine.parts
    found["weights"] = {
        n: (p.detach().clone(), parts[n].layout if parts else None) for n, p in engine.named_parameters().items()
    }
    engine.close()
    return found


def assert_parts_of(one: dict[str, Any], many: list[dict[str, Any]]) -> None:
    for rank in many:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-9)
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-8)
        for name, (own, layout) in rank["weights"].items():
            assert torch.allclose(own, layout.take(one["weights"][name][0]), rtol=1e-8, atol=1e-10), name
    assert {name for rank in many for name in rank["weights"]} == one["weights"].keys()


@pytest.mark.parametrize(
    "plan", ["dp=2 fsdp=2 microbatches=3", pytest.param("pp=2 microbatches=4", marks=pytest.mark.slow)]
)
def test_a_smaller_last_batch_is_weighed_exactly(ranks: Ranks, plan: str) -> None:
    """22 samples in batches of 8: the last one has 6, for the data-parallel ranks 2, 2, 1 and 1."""
    assert_parts_of(own_loop("dp=1"), ranks(Plan.parse(plan).ranks, own_loop, plan, backend="shm"))


def test_readers_without_samples_compute_all_the_same_and_count_as_nothing(ranks: Ranks) -> None:
    """The last batch of 17 samples has 1, which one of 4 data-parallel ranks gets."""
    assert_parts_of(own_loop("dp=1", 6, 17), ranks(4, own_loop, "fsdp=4", 6, 17, backend="shm"))


def test_an_optimizer_that_has_stepped_brings_its_state_and_its_groups(ranks: Ranks) -> None:
    assert_parts_of(own_loop("dp=1", warm=True), ranks(2, warmed, "fsdp=2", backend="shm"))


def warmed(plan: str) -> dict[str, Any]:
    return own_loop(plan, warm=True)


def from_other_seeds(plan: str) -> dict[str, Any]:
    """A script that forgot to seed."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = Layers().double()
    data = DataLoader(TensorDataset(torch.randn(8, FEATURES).double(), torch.zeros(8, dtype=torch.long)), batch_size=4)
    engine = paceline.setup(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loss=F.cross_entropy,
        loader=data,
        plan=plan,
        precision="fp64",
    )
    parts = engine.parts or {}
    found = {n: (p.detach().clone(), parts[n].layout) for n, p in engine.named_parameters().items()}
    engine.close()
    return found


@pytest.mark.parametrize("plan", ["fsdp=2", "pp=2"])
def test_models_of_other_seeds_become_parts_of_the_first_ranks_model(ranks: Ranks, plan: str) -> None:
    torch.manual_seed(0)
    whole = dict(Layers().double().named_parameters())
    for rank in ranks(2, from_other_seeds, plan, backend="shm"):
        for name, (own, layout) in rank.items():
            assert torch.equal(own, layout.take(whole[name].detach())), name


def nan_in_a_pipeline() -> str:
    try:
        own_loop("pp=2 microbatches=2", nan_at=9)
    except NonFiniteError as error:
        return str(error)
    return "no error"


def test_nan_is_told_by_every_stage_with_the_sample_it_came_from(ranks: Ranks) -> None:
    for text in ranks(2, nan_in_a_pipeline, backend="shm"):
        assert "the loss of step 2 is nan" in text
        assert "samples [9]" in text


def test_parameters_of_no_part_of_the_model_cannot_be_divided() -> None:
    model, extra = Layers(), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(8, FEATURES), torch.zeros(8, dtype=torch.long)), batch_size=4)
    with raises(PlanError, "setup.parameters_outside", outside=["optimizer.0"]):
        paceline.setup(model, optimizer, loss=F.cross_entropy, loader=data, plan="remat=block")


def test_degrees_for_other_ranks_than_were_started_are_refused() -> None:
    model = Layers()
    data = DataLoader(TensorDataset(torch.randn(8, FEATURES), torch.zeros(8, dtype=torch.long)), batch_size=4)
    with raises(PlanError, "setup.ranks_differ", ranks=4, started=1):
        paceline.setup(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=data, plan="fsdp=2 tp=2"
        )


@pytest.mark.parametrize(
    "plan", ["tp=2", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("pp=2 microbatches=2", "cp=2"))]
)
def test_held_out_metrics_and_the_record_of_a_divided_run(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    """Metrics as alone; the state that a rank holds is what its shapes predict; the parts of each step sum to it."""
    data = {"kind": "synthetic", "samples": 83, "shape": [16], "vocab": 48, "held_out": 0.3}  # 25 held out
    job = family_job("gpt", tmp_path, data=data, metrics=["perplexity", "accuracy"], stop={"steps": 3})
    alone = train_here(tmp_path / "alone", job)
    run = new_run(tmp_path / "many", job, plan)
    ranks(run.plan.ranks, train_as_rank, run.path, backend="shm")
    run = Run(run.path)
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert run.metrics == pytest.approx(alone.metrics, rel=1e-4)
    start = next(e for e in run.events() if e["event"] == "start")
    assert start["parameters"] == next(e for e in alone.events() if e["event"] == "start")["parameters"]
    uses = [
        json.loads(line)["use"]
        for line in (run.path / "steps/rank-0.jsonl").read_text().splitlines()
        if '"use"' in line
    ]
    use = next(use for use in uses if "weights_bytes" in use)
    held = sum(use[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx(start["predicted_state_bytes"], rel=0.1)
    assert (
        start["predicted_state_bytes"]
        < 0.7 * next(e for e in alone.events() if e["event"] == "start")["predicted_state_bytes"]
        or plan == "cp=2"
    )
    for step in run.steps():
        assert sum(
            step[f"{part}_s"] for part in ("data", "compute", "bubble", "comm", "imbalance", "optimizer", "checkpoint")
        ) == pytest.approx(step["step_s"], abs=1e-4)


@pytest.mark.parametrize(
    "plan", ["ep=2", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("pp=2 microbatches=2", "tp=2"))]
)
def test_dropped_tokens_are_counted_alike_under_every_plan(ranks: Ranks, tmp_path: Path, plan: str) -> None:
    model = {"zoo": "moe", "args": {**ZOO["moe"], "capacity": 1.0}}
    job = family_job("moe", tmp_path, model=model, stop={"steps": 2})
    alone = train_here(tmp_path / "alone", job)
    run = new_run(tmp_path / "many", job, plan)
    ranks(2, train_as_rank, run.path, backend="shm")
    (one,), (many,) = ([e for e in r.events() if e["event"] == "experts"] for r in (alone, Run(run.path)))
    assert one["dropped"] > 0
    assert one["routed"] == 2 * 16 * 16 * 2 * 4, "steps, samples, tokens, experts of each, layers"
    assert {k: many[k] for k in ("routed", "dropped", "load")} == {k: one[k] for k in ("routed", "dropped", "load")}


def test_a_job_starts_from_published_weights_under_any_plan(ranks: Ranks, tmp_path: Path) -> None:
    trained = new_run(
        tmp_path / "first", family_job("gpt", tmp_path, optimizer={"name": "sgd", "lr": 2.0}, stop={"steps": 8})
    )
    train_in(trained, Group())
    export(trained.path, tmp_path / "weights.safetensors")
    model = {"zoo": "gpt", "args": ZOO["gpt"], "weights": tmp_path / "weights.safetensors"}
    job = family_job("gpt", tmp_path, model=model, stop={"steps": 1}, seed=5, partition={"shuffle": False})
    whole = GPT(**ZOO["gpt"])
    whole.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    data = job.data.build(input_shape=None, seed=5).train
    tokens, target = data.__getitems__(list(range(16)))  # type: ignore[attr-defined]
    expected = F.cross_entropy(whole(tokens).flatten(0, 1), target.flatten()).item()
    for plan in ("fsdp=2", "pp=2 microbatches=2"):
        run = new_run(tmp_path / plan[:4], job, plan)
        ranks(2, train_as_rank, run.path, backend="shm")
        assert Run(run.path).losses == pytest.approx([expected], rel=1e-5)
    fresh = family_job("gpt", tmp_path, stop={"steps": 1}, seed=5, partition={"shuffle": False})
    assert train_here(tmp_path / "fresh", fresh).losses != pytest.approx([expected], rel=1e-3)
