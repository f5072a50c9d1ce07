"""Muon, LARS and LAMB need whole parameters. A part that went to the wrong place would train another model unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commands import losses
from model_families import family_job
from paceline.job.optimizer import OptimizerSpec
from paceline.job.parameters import names_of
from paceline.planning.model.model_info import matrix_work, model_info, state_tensors
from paceline.planning.plan import Plan
from paceline.run.parity import Parts, Steps
from paceline.run.parity.check import TOLERANCES, Parity
from paceline.run.parity.ranks import compare, take_reference
from paceline.split.layout import held_bytes, predicted_bytes, whole_parts
from paceline.split.whole_updates import muon_matrices
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, small_job, train_as_rank, train_here

MUON = {"name": "muon", "lr": 0.02, "weight_decay": 0.1, "adamw": {"lr": 0.003, "eps": 1e-3}, "no_decay": ["*norm*"]}
LARS, LAMB = {"name": "lars", "lr": 0.5, "momentum": 0.9}, {"name": "lamb", "lr": 0.01, "weight_decay": 0.1}


class Mixed(nn.Module):
    """Every kind of parameter that Muon treats differently."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.position = nn.Parameter(torch.randn(4, 8))
        self.filters = nn.Conv2d(1, 6, 3, padding=1)
        self.mix = nn.Conv2d(6, 1, 3, padding=1)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.extra = nn.Linear(8, 8)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        x = x + self.mix(torch.relu(self.filters(x.unsqueeze(1)))).squeeze(1)
        return self.head(self.norm(torch.relu(self.extra(self.hidden(x)))))  # type: ignore[no-any-return]


def stepped(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        tokens = torch.randint(0, 12, (5, 4), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(tokens).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def twins(**values: Any) -> tuple[Mixed, Mixed]:
    torch.manual_seed(1)
    ours, theirs = Mixed(**values), Mixed(**values)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"lr": 0.02, "adjust_lr_fn": "original", "adamw": {"lr": 0.003}}, (0.02, 0.003)),
        ({"lr": 0.01, "momentum": 0.8, "nesterov": False, "args": {"ns_steps": 3}}, (0.01, 0.01)),
    ],
)
def test_a_step_is_torchs_muon_on_hidden_matrices_and_adamw_on_the_rest(
    tied: bool, keys: dict[str, Any], rates: tuple[float, float]
) -> None:
    ours, theirs = twins(tied=tied)
    matrices = [theirs.hidden.weight, theirs.extra.weight]
    for conv in (theirs.filters, theirs.mix):  # torch's Muon takes matrices only
        conv.weight.requires_grad_(False)
    for conv in (ours.filters, ours.mix):
        conv.weight.requires_grad_(False)
    others = [p for p in theirs.parameters() if p.requires_grad and not any(p is matrix for matrix in matrices)]
    muon = torch.optim.Muon(
        matrices,
        lr=rates[0],
        weight_decay=0.0,
        momentum=keys.get("momentum", 0.95),
        nesterov=keys.get("nesterov", True),
        ns_steps=keys.get("args", {}).get("ns_steps", 5),
        adjust_lr_fn=keys.get("adjust_lr_fn", "match_rms_adamw"),
    )
    adamw = torch.optim.AdamW(others, lr=rates[1], weight_decay=0.0)
    spec = OptimizerSpec.model_validate({"name": "muon", **keys})
    optimizer = spec.build(dict(ours.named_parameters()), names=names_of(ours))
    for own, expected in zip(stepped(ours, optimizer), stepped(theirs, muon, adamw), strict=True):
        assert torch.equal(own, expected)


def test_hidden_matrices_are_all_but_embeddings_positions_and_the_output() -> None:
    assert names_of(Mixed()).matrices == {"filters.weight", "mix.weight", "hidden.weight", "extra.weight"}
    assert "head.weight" not in names_of(Mixed(tied=True)).matrices


def test_match_replaces_the_choice_of_hidden_matrices() -> None:
    model = Mixed()
    spec = OptimizerSpec.model_validate({"name": "muon", "adamw": {"match": ["embed", "extra"]}})
    found = muon_matrices(spec.build(dict(model.named_parameters()), names=names_of(model)))
    names = {name for name, p in model.named_parameters() if p in found}
    assert names == {"position", "filters.weight", "mix.weight", "hidden.weight", "head.weight"}


def test_the_state_that_is_predicted_is_the_state_that_is_kept() -> None:
    model = Mixed()
    spec = OptimizerSpec.model_validate(MUON)
    optimizer = spec.build(dict(model.named_parameters()), names=names_of(model))
    stepped(model, optimizer)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    predicted = predicted_bytes(whole_parts(model), dict(model.named_parameters()), spec, muon_matrices(optimizer))
    assert predicted == held_bytes(model.parameters(), optimizer)


def test_the_planner_counts_one_state_tensor_for_matrices_and_two_for_the_rest(tmp_path: Path) -> None:
    job = family_job("gpt", tmp_path, optimizer=MUON)
    model = job.model.build()
    optimizer = job.optimizer.build(dict(model.named_parameters()), names=names_of(model))
    matrices = sum(p.numel() for p in muon_matrices(optimizer))
    whole = sum(p.numel() for p in model.parameters())
    info = model_info(job.model)
    assert state_tensors(job, info) == pytest.approx((matrices + 2 * (whole - matrices)) / whole)
    flops, numbers = matrix_work(job, info)
    assert numbers == matrices
    assert flops > 0


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"name": "muon", "adjust_lr_fn": "original"}, "optimizer.adamw_without_rate"),
        ({"name": "sgd", "adamw": {"lr": 0.1}}, "optimizer.key_of_muon"),
        ({"name": "RMSprop", "adjust_lr_fn": "original"}, "optimizer.key_of_muon"),
        ({"name": "muon", "betas": [0.9, 0.99]}, "optimizer.argument_unknown"),
    ],
)
def test_a_key_that_has_no_effect_or_no_meaning_is_refused(values: dict[str, Any], code: str) -> None:
    with raises(ValueError, code):
        OptimizerSpec.model_validate(values)


QUICK = {("gpt", "muon", "fsdp=2 tp=2"), ("moe", "muon", "fsdp=2 ep=2"), ("gpt", "lamb", "fsdp=2 tp=2")}


@pytest.mark.parametrize(
    ("family", "optimizer", "text"),
    [
        pytest.param(
            family,
            optimizer,
            plan,
            marks=() if (family, optimizer["name"], plan) in QUICK else pytest.mark.slow,
            id=f"{family} {optimizer['name']} {plan}",
        )
        for family, optimizers, plans in (
            (
                "gpt",
                [MUON],
                ["dp=2", "dp=3", "fsdp=3", "pp=2 microbatches=2", "dp=2 fsdp=2", "cp=2", "tp=2 pp=2 microbatches=2"],
            ),
            ("gpt", [LARS, LAMB], ["fsdp=2", "tp=2", "pp=2 microbatches=2"]),
            ("gpt", [MUON, LARS, LAMB], ["fsdp=2 tp=2"]),
            ("moe", [MUON, LAMB], ["fsdp=2 ep=2", "ep=2 tp=2"]),
            ("llama", [MUON], ["fsdp=2 tp=2"]),
            ("resnet", [{"name": "muon", "lr": 0.02}], ["fsdp=2"]),
        )
        for optimizer in optimizers
        for plan in plans
    ],
)
def test_ranks_with_parts_take_the_step_of_one_process(
    ranks: Ranks, tmp_path: Path, family: str, optimizer: dict[str, Any], text: str
) -> None:
    plan = Plan.parse(f"{text} precision=fp64")
    job = family_job(family, tmp_path, optimizer=optimizer)
    normalises = family == "resnet"
    parts = Parts(plan.microbatches, plan.data_ranks) if normalises else Parts(1, 1)
    reference = take_reference(Steps(job, Plan(precision="fp64", microbatches=parts.microbatches), 3, tmp_path, parts))
    found = ranks(plan.ranks, compare, Steps(job, plan, 3, tmp_path), reference, deadline_s=100, backend="shm")
    parity = Parity.of(plan, found, reference, TOLERANCES["fp64"])
    assert parity.holds, (parity.largest, parity.steps[-1])


@pytest.mark.parametrize("optimizer", [MUON, LAMB], ids=lambda values: values["name"])
def test_a_checkpoint_goes_from_plan_to_plan(ranks: Ranks, tmp_path: Path, optimizer: dict[str, Any]) -> None:
    def job(steps: int) -> Any:
        return small_job(
            model={"zoo": "gpt", "args": {"layers": 2, "hidden": 16, "heads": 2, "context": 16}},
            data={"kind": "text", "path": str(tmp_path / "words.txt"), "context": 16, "held_out": 0},
            optimizer=optimizer,
            global_batch=12,
            precision="fp64",
            stop={"steps": steps},
            checkpoint={"every_steps": 2, "keep": 5},
        )

    (tmp_path / "words.txt").write_text("to be or not to be, that is the question. " * 40)
    train_here(tmp_path / "undisturbed", job(6))
    moved = tmp_path / "moved"
    for steps, plan in ((2, "dp=2"), (4, "fsdp=2")):
        new_run(moved, job(steps), plan)
        ranks(2, train_as_rank, moved)
    new_run(moved, job(6), "dp=1")
    train_here(moved, job(6))
    expected, found = losses(tmp_path / "undisturbed"), losses(moved)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-9)
