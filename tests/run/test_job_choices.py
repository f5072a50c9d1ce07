"""Optimizer class, groups, schedule class, clip_value, freeze and ema together, under splits and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.cluster.discover import discover
from paceline.errors import PlanError, RunError
from paceline.job.job import Job
from paceline.planning.search.search import search
from paceline.run.convert import export
from paceline.run.record.run import Run
from paceline.state.average import WeightAverage
from ranks import Ranks
from refusals import raises
from small_jobs import CLASSES, Points, facts, new_run, plain, points, small_job, train_as_rank, train_here

CHOICES: dict[str, Any] = {
    "optimizer": {
        "name": "NAdam",
        "lr": 0.01,
        "weight_decay": 0.1,
        "groups": [{"match": "2", "lr": 0.02}],
        "no_decay": "bias",
    },
    "schedule": {"name": "OneCycleLR", "args": {"max_lr": [0.02, 0.03, 0.04, 0.05, 0.01], "total_steps": 40}},
    "clip_value": 0.01,
    "ema": 0.8,
    "data": points(held_out=0.25),
}


def choices(**changes: Any) -> Job:
    values = CHOICES | {"schedule": {"name": "ExponentialLR", "args": {"gamma": 0.9}}}
    return small_job(**(values | changes))


def frozen(pattern: str) -> dict[str, Any]:
    return {"factory": "small_jobs:plain", "freeze": pattern}


def test_a_run_with_all_of_them_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, ranks: Ranks) -> None:
    runs = {"undisturbed": (20,), "resumed": (8, 20)}
    for name, stops in runs.items():
        for steps in stops:
            new_run(tmp_path / name, choices(stop={"steps": steps}), "dp=2 balance=off")
            ranks(2, train_as_rank, tmp_path / name)
    undisturbed, resumed = (Run(tmp_path / name) for name in runs)
    assert facts(resumed) == facts(undisturbed)
    assert resumed.metrics == undisturbed.metrics
    for weights in ("raw", "ema"):
        tensors = []
        for name in runs:
            export(tmp_path / name, tmp_path / f"{name}-{weights}", weights=weights)
            tensors.append(load_file(tmp_path / f"{name}-{weights}"))
        assert all(torch.equal(tensors[0][name], own) for name, own in tensors[1].items())


def test_evaluations_measure_the_average_which_is_also_exported(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", choices())
    job = run.job
    model = plain()
    losses = {}
    held_out: Any = job.data.build(input_shape=None, seed=job.seed).held_out
    inputs, labels = (torch.stack(list(parts)) for parts in zip(*held_out, strict=True))
    for weights in ("raw", "ema", None):
        export(run.path, tmp_path / f"{weights}", weights=weights)
        model.load_state_dict(load_file(tmp_path / f"{weights}"))
        losses[weights] = nn.functional.cross_entropy(model(inputs), labels).item()
    assert run.metrics["loss"] == pytest.approx(losses["ema"], rel=1e-5)
    assert losses[None] == losses["ema"] != losses["raw"]
    assert all(event["weights"] == "ema" for event in run.events() if event["event"] == "evaluation")


@pytest.mark.parametrize(
    ("evaluate", "stop"),
    [({"every_steps": 4}, 6), ({"every_steps": 4}, 8), ({"every_epochs": 1}, 10), ({"every_epochs": 1}, 14)],
)
def test_the_evaluation_at_a_run_s_end_counts_only_where_a_longer_run_evaluates(
    evaluate: dict[str, int], stop: int, tmp_path: Path
) -> None:
    # every evaluation but the first is worse than needed, so each halves the learning rate
    schedule = {"name": "ReduceLROnPlateau", "args": {"patience": 0, "factor": 0.5, "threshold": 10.0}}
    patience = {"metric": "loss", "evaluations": 4, "min_delta": 100.0}
    made = []
    for name, stops in {"undisturbed": (40,), "resumed": (stop, 40)}.items():
        for steps in stops:
            rules = {"steps": steps, "patience": patience}
            job = choices(schedule=schedule, evaluate=evaluate, stop=rules, checkpoint={"every_steps": 7, "keep": 9})
            made.append(train_here(tmp_path / name, job))
    undisturbed, _, resumed = made
    assert facts(resumed) == facts(undisturbed)
    assert resumed.reason == undisturbed.reason
    assert str(resumed.reason).startswith("patience")
    # a checkpoint that was written before the evaluation of its step
    for checkpoint in undisturbed.checkpoints.glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > 14:
            shutil.rmtree(checkpoint)
    expected = facts(undisturbed)
    assert facts(train_here(tmp_path / "undisturbed", undisturbed.job)) == expected


def test_a_checkpoint_moves_to_another_plan_with_its_average(tmp_path: Path, ranks: Ranks) -> None:
    alone = train_here(tmp_path / "alone", choices(stop={"steps": 16}))
    new_run(tmp_path / "moved", choices(stop={"steps": 8}), "fsdp=2")
    ranks(2, train_as_rank, tmp_path / "moved")
    moved = train_here(tmp_path / "moved", choices(stop={"steps": 16}))
    assert moved.losses == pytest.approx(alone.losses, rel=1e-4)
    assert moved.metrics == pytest.approx(alone.metrics, rel=1e-4)


@pytest.mark.parametrize("plan", ["fsdp=2", "tp=2", "pp=2 microbatches=2"])
def test_all_of_them_are_exact_under_plans_that_divide_the_model(plan: str) -> None:
    job = choices(model={"zoo": "mlp", "args": {"hidden": 8}}, data="digits", global_batch=16)
    job = Job(**(job.model_dump(exclude_defaults=True) | {"optimizer": {**CHOICES["optimizer"], "groups": []}}))
    assert paceline.check(job, f"{plan} precision=fp64", steps=3).holds


def test_an_average_is_that_of_the_formula_also_of_weights_that_are_updated_late() -> None:
    early, late = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.Adam([early, late], lr=0.1)
    average = WeightAverage(optimizer, 0.5)
    expected = [p.detach().clone() for p in (early, late)]
    for step in range(4):
        early.grad, late.grad = torch.ones(2, dtype=torch.float64), None
        if step >= 2:
            late.grad = torch.ones(2, dtype=torch.float64)
        average.before_update()
        optimizer.step()
        average.after_update()
        expected = [0.5 * old + 0.5 * p.detach() for old, p in zip(expected, (early, late), strict=True)]
    now = [p.detach().clone() for p in (early, late)]
    with average.in_place():
        torch.testing.assert_close([early.detach(), late.detach()], expected)
    assert all(torch.equal(p.detach(), before) for p, before in zip((early, late), now, strict=True))


def test_frozen_parameters_stay_as_they_were(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", choices(model=frozen("0"), optimizer="RMSprop", stop={"steps": 3}))
    whole = train_here(tmp_path / "start", small_job(stop={"steps": 1}, optimizer={"name": "sgd", "lr": 1e-30}))
    tensors = []
    for own in (run, whole):
        export(own.path, tmp_path / own.path.name / "weights")
        tensors.append(load_file(own.path / "weights"))
    assert torch.equal(tensors[0]["0.weight"], tensors[1]["0.weight"])
    assert not torch.equal(tensors[0]["2.weight"], tensors[1]["2.weight"])


@pytest.mark.parametrize("pattern", ["0", "2"])
def test_a_stage_without_trained_parameters_is_exact(pattern: str) -> None:
    job = choices(optimizer="RMSprop", model=frozen(pattern), clip_value=None, clip_norm=0.01)
    assert paceline.check(job, "pp=2 microbatches=2 precision=fp64", steps=2).holds


# the first stage of a pipeline has no trained parameters, and classes count differently
WEIGHTED: dict[str, Any] = {
    "model": {"factory": "small_jobs:plain", "freeze": "0"},
    "loss": {"name": "cross_entropy", "args": {"weight": [1.0, 2.0, 5.0], "label_smoothing": 0.1}},
    "clip_norm": 0.05,
    "optimizer": {"name": "adam", "lr": 0.05},
}


def test_class_weights_and_frozen_parameters_train_as_in_a_plain_loop(tmp_path: Path) -> None:
    seen = []
    changes = WEIGHTED | {"model": {"factory": Seeded, "freeze": "0"}}
    job = small_job(**changes, precision="fp64", partition={"shuffle": False}, stop={"steps": 9})
    run = train_here(tmp_path / "run", job)
    model, data = Seeded().double(), Points()
    model.body[0].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), label_smoothing=0.1)
    for inputs, labels in zip(data.inputs.double().split(8), data.labels.split(8), strict=True):
        optimizer.zero_grad()
        found = loss(model(inputs), labels)
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        seen.append(found.item())
    assert run.losses == pytest.approx(seen, rel=1e-9)


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2"])
def test_class_weights_and_frozen_parameters_are_exact_under_every_split(plan: str) -> None:
    assert paceline.check(small_job(**WEIGHTED), f"{plan} precision=fp64", steps=3).holds


class Seeded(nn.Module):
    """A model with the same weights in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body: Any = plain()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(inputs)
        return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = plain(), nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(self.body(inputs)))
        return found


def test_a_pattern_matches_every_name_of_a_tied_weight(tmp_path: Path) -> None:
    optimizer = {"name": "adamw", "no_decay": "second.weight"}
    job = choices(model={"factory": f"{__name__}:Tied"}, optimizer=optimizer, stop={"steps": 1})
    train_here(tmp_path / "run", job)


def test_a_run_without_an_average_exports_none(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", small_job(stop={"steps": 1}))
    with raises(RunError, "export.no_average"):
        export(run.path, tmp_path / "weights", weights="ema")


@pytest.mark.parametrize(
    ("plan", "changes", "code"),
    [
        ("dp=2 sync=local:4", {"ema": 0.9}, "plan.average_of_local_steps"),
        ("fsdp=2", {"optimizer": "Adafactor"}, "plan.updates_of_whole_parameters"),
    ],
)
def test_what_cannot_be_exact_is_refused(plan: str, changes: dict[str, Any], code: str) -> None:
    with raises(PlanError, code):
        paceline.train(small_job(**changes), plan)


class Steep(nn.Module):
    """Two layers whose output is scaled, so that gradients overflow fp16 at the first loss scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.tanh(self.first(inputs))) * 8.0
        return outputs


def test_fp16_leaves_steps_that_overflow_out_and_resumes_with_its_loss_scale(tmp_path: Path, ranks: Ranks) -> None:
    changes: dict[str, Any] = {"precision": "fp16", "model": Steep, "clip_norm": 0.5, "data": points()}
    runs = {"undisturbed": (12,), "resumed": (6, 12)}
    for name, stops in runs.items():
        for steps in stops:
            new_run(
                tmp_path / name, small_job(**changes, nonfinite="rewind", stop={"steps": steps}), "dp=2 balance=off"
            )
            ranks(2, train_as_rank, tmp_path / name)
    undisturbed, resumed = (Run(tmp_path / name) for name in runs)
    assert facts(resumed) == facts(undisturbed)
    events = undisturbed.events()
    left_out = [event["step"] for event in events if event["event"] == "nonfinite"]
    assert left_out
    assert left_out == list(range(1, len(left_out) + 1))
    assert all(event["policy"] == "scale" for event in events if event["event"] == "nonfinite")
    assert not [event for event in events if event["event"] == "rewind"]
    # gradients are unscaled before their norm is measured and clipped
    still = {"precision": "fp32", "optimizer": {"name": "sgd", "lr": 1e-30}, "stop": {"steps": len(left_out) + 1}}
    wide = train_here(tmp_path / "fp32", small_job(**changes | still))
    norms = [[step["grad_norm"] for step in run.steps(0)] for run in (undisturbed, wide)]
    assert norms[0][len(left_out)] == pytest.approx(norms[1][-1], rel=0.05)
    assert undisturbed.losses[0] == pytest.approx(wide.losses[0], rel=0.01)


@pytest.mark.parametrize("plan", ["dp=2 fsdp=2", "tp=2", "dp=2 sync=local:4", "dp=2 compress=int8", "dp=1 remat=block"])
def test_fp16_needs_whole_and_exact_gradients(plan: str) -> None:
    for job, own in ((small_job(precision="fp16"), plan), (small_job(), f"{plan} precision=fp16")):
        assert "plan.fp16_needs_whole_gradients" in {problem.code for problem in paceline.plan_errors(job, own)}


def test_a_job_accumulates_gradients_exactly_unless_its_plan_says_otherwise(tmp_path: Path) -> None:
    job = small_job(gradient_accumulation_steps=2, global_batch=16)
    found = paceline.check(job, "dp=2 precision=fp64", steps=3)
    assert found.holds
    assert found.plan.microbatches == 2
    assert paceline.check(small_job(), "dp=2 precision=fp16", steps=3).verdict != "differs"
    assert paceline.check(job, "dp=1 precision=fp64 microbatches=1", steps=1).plan.microbatches == 1
    assert paceline.train(job, "dp=1 microbatches=4", run=tmp_path / "four").plan.microbatches == 4
    assert all(candidate.plan.microbatches >= 2 for candidate in search(job, discover()).best)
    assert paceline.plan_errors(job.replace({"gradient_accumulation_steps": 32}), "dp=1")
    assert job.beyond_plain_steps == ["gradient_accumulation_steps"]
