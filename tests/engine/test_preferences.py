"""Preferences: the loss is the mean over the pairs of the global batch, against the weights before training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.engine.evaluation import batches_of
from paceline.errors import DataError, JobError, PlanError
from paceline.job.job import Job
from paceline.job.loss import build_metrics
from paceline.job.zoo.models import GPT
from paceline.job.zoo.preference_loss import DPO
from ranks import Ranks
from refusals import raises
from small_jobs import facts, small_job, train_here

PAIRS, TOKENS, VOCAB, BATCH, STEPS = 20, 8, 11, 7, 5  # the last batch of an epoch has 6 pairs
REWARDS = ["reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected"]
PLANS = ("dp=2", "dp=2 microbatches=3", "fsdp=2", "fsdp=2 zero=1 microbatches=2", "tp=2", "pp=2 microbatches=2")


def pairs(samples: int = PAIRS) -> Dataset[Any]:
    """Pairs of sequences whose completions differ in length."""
    drawn = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, VOCAB, (samples, 2, TOKENS), generator=drawn) for _ in range(2))
    first = torch.randint(0, TOKENS - 1, (samples, 2, 1), generator=drawn)
    last = first + 1 + torch.randint(0, TOKENS, (samples, 2, 1), generator=drawn)
    at = torch.arange(TOKENS)
    return TensorDataset(tokens, torch.where((at >= first) & (at < last), labels, -100))


class Decoder(GPT):
    """The zoo's GPT; `frozen` freezes its first block."""

    def __init__(self, frozen: bool = False, dropout: float = 0.0) -> None:
        super().__init__(vocab=VOCAB, context=TOKENS, layers=2, hidden=8, heads=2, dropout=dropout)
        for parameter in self.get_submodule("blocks.0").parameters():
            parameter.requires_grad = not frozen


def log_probabilities(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum over the labels of one sequence after the other."""
    found = []
    for ids, wanted in zip(tokens.flatten(0, 1), labels.flatten(0, 1), strict=True):
        logs = model(ids.unsqueeze(0))[0].log_softmax(-1)
        found.append(sum((logs[i, w] for i, w in enumerate(wanted.tolist()) if w != -100), logs.new_zeros(())))
    return torch.stack(found).view(len(tokens), 2)


def by_hand(loss: dict[str, Any], model: dict[str, Any]) -> list[float]:
    """Losses of a loop over whole batches in float64, with a second model as the reference."""
    torch.manual_seed(4)
    trained = Decoder(**model).double()
    reference = copy.deepcopy(trained)
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=0.01)
    beta, smoothing = loss.get("beta", 0.1), loss.get("label_smoothing", 0.0)
    found: list[float] = []
    while len(found) < STEPS:
        for tokens, labels in DataLoader(pairs(), batch_size=BATCH):
            with torch.no_grad():
                before = log_probabilities(reference, tokens, labels)
            ratios = log_probabilities(trained, tokens, labels) - before
            if loss.get("type") == "ipo":
                ratios = ratios / (labels != -100).sum(-1)
            margin = ratios[:, 0] - ratios[:, 1]
            if loss.get("type") == "ipo":
                mean = (margin - 1 / (2 * beta)).pow(2).mean()
            else:
                chances = torch.sigmoid(beta * margin)
                mean = -((1 - smoothing) * chances.log() + smoothing * (1 - chances).log()).mean()
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            found.append(mean.item())
    return found[:STEPS]


def engine_of(plan: str, loss: dict[str, Any], model: dict[str, Any]) -> Any:
    torch.manual_seed(4)
    made = Decoder(**model)
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=0.01)
    return paceline.setup(made, optimizer, loss=DPO(**loss), loader=DataLoader(pairs(), batch_size=BATCH), plan=plan)


def trained(plan: str, loss: dict[str, Any], model: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    """Losses of the first steps, and metrics of an evaluation after the last one."""
    engine = engine_of(plan, loss, model)
    found: list[float] = []
    while len(found) < STEPS:
        for batch in engine.loader:
            if len(found) < STEPS:
                found.append(engine.step(batch).loss)
    metrics = engine.evaluate(batches_of(engine.compute, pairs(9), 4), build_metrics(REWARDS, engine.loss))
    engine.close()
    return found, metrics


@pytest.mark.parametrize(
    ("loss", "model"),
    [
        ({}, {}),
        ({"beta": 0.5, "label_smoothing": 0.2}, {"frozen": True}),
        ({"type": "ipo"}, {}),
    ],
)
def test_one_process_computes_the_loss_of_a_loop_with_a_second_model(
    loss: dict[str, Any], model: dict[str, Any]
) -> None:
    assert trained("dp=1 precision=fp64", loss, model)[0] == pytest.approx(by_hand(loss, model), rel=1e-10)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_computes_the_mean_over_the_pairs_of_the_global_batch(ranks: Ranks, plan: str) -> None:
    loss = {"beta": 0.5}
    losses, metrics = trained("dp=1 precision=fp64", loss, {})
    for others, measured in ranks(2, trained, f"{plan} precision=fp64", loss, {}):
        assert others == pytest.approx(losses, rel=1e-9)
        assert measured == pytest.approx(metrics, rel=1e-7)


def test_low_precision_never_mixes_the_weights_of_the_model_and_its_reference() -> None:
    metrics = trained("dp=1", {"beta": 0.5}, {})[1]
    assert metrics["reward_margin"] != 0
    assert trained("dp=1 precision=bf16", {"beta": 0.5}, {})[1]["reward_margin"] == pytest.approx(
        metrics["reward_margin"], rel=0.3
    )


def test_the_reference_has_no_dropout() -> None:
    """Only the policy draws masks, so the first loss is not exactly log 2."""
    engine = engine_of("dp=1", {}, {"dropout": 0.5})
    first = engine.step(next(iter(engine.loader))).loss
    engine.close()
    assert first != pytest.approx(0.6931472, abs=1e-6)


def pair_job(**changes: Any) -> Job:
    keys = {
        "model": {"factory": f"{__file__}:Decoder"},
        "data": {"kind": "dataset", "factory": f"{__file__}:pairs", "held_out": 0.2},
        "loss": {"name": "dpo", "args": {"beta": 0.5}},
        "metrics": REWARDS,
        "optimizer": {"name": "adamw", "lr": 0.01},
        "global_batch": 5,
        "stop": {"steps": 8},
    }
    return small_job(**{**keys, **changes})


def test_a_resumed_run_has_the_reference_of_its_beginning(tmp_path: Path) -> None:
    whole = train_here(tmp_path / "whole", pair_job())
    train_here(tmp_path / "part", pair_job(stop={"steps": 3}))
    assert facts(train_here(tmp_path / "part", pair_job())) == facts(whole)


@pytest.mark.parametrize(
    ("plan", "code"),
    [("dp=2 sync=local:4", "plan.reference_of_local_steps"), ("cp=2", "plan.loss_over_whole_sequences")],
)
def test_plans_without_a_common_reference_are_refused(plan: str, code: str) -> None:
    with raises(PlanError, code):
        paceline.train(pair_job(), plan)


def test_targets_without_pairs_are_refused() -> None:
    with raises(DataError, "loss.not_pairs"):
        DPO()(torch.zeros(2, TOKENS, VOCAB), torch.zeros(2, TOKENS, dtype=torch.int64))


def test_a_loss_outside_of_an_engine_has_no_reference() -> None:
    with raises(JobError, "loss.without_reference"):
        DPO()(torch.zeros(2, TOKENS, VOCAB), torch.zeros(1, 2, TOKENS, dtype=torch.int64))


def test_metrics_of_rewards_need_a_loss_with_rewards() -> None:
    from paceline.job.zoo.losses import CrossEntropy

    with raises(JobError, "metric.without_rewards", name="reward_margin"):
        build_metrics(["reward_margin"], CrossEntropy())
