"""Rules that agree on parameters: with a period of one step they are synchronous training.

With longer ones they reach the same target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from model_families import family_job
from paceline.comm.backend import joined
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.build import build_engine, built, seed_all
from paceline.run.record.run import Run
from ranks import Ranks
from small_jobs import new_run, train_as_rank

EVERY_STEP = ["local:1", "diloco:1,lr=1,momentum=0"]
# What is exact on paper differs by rounding: the mean of two sums is taken in place of the sum of a mean, a few units
# in the last of 16 digits, and as many more with every step.
ROUNDING = {"rtol": 1e-12, "atol": 1e-13}


def trained(replicas: int, sync: str) -> tuple[list[float], list[Tensor]]:
    """Losses and weights after 9 steps of SGD in float64, with equal shares of every batch."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
    inputs = torch.randn(60, 12, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, torch.arange(60) % 5), batch_size=20, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    engine = paceline.setup(
        model, optimizer, loss=F.cross_entropy, loader=loader, plan=f"dp={replicas} precision=fp64 sync={sync}"
    )
    losses = [engine.step(batch).loss for _ in range(3) for batch in engine.loader]
    engine.close()
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("sync", EVERY_STEP)
def test_with_a_period_of_one_step_plain_sgd_is_synchronous(ranks: Ranks, sync: str) -> None:
    losses, weights = trained(1, "allreduce")
    for found_losses, found_weights in ranks(4, trained, 4, sync):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        for one, other in zip(found_weights, weights, strict=True):
            torch.testing.assert_close(one, other, **ROUNDING)  # type: ignore[arg-type]


def divided(folder: Path, split: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses, and this rank's parameters, of a GPT under a split.

    Synchronous, and with every rule of a period of one step.
    """
    job, found = family_job("gpt", folder, optimizer={"name": "sgd", "lr": 0.5}, clip_norm=None), []
    with joined(deadline_s=60) as group:
        for sync in ("allreduce", *EVERY_STEP):
            plan = Plan.parse(f"dp=2 {split} precision=fp64 sync={sync}")
            seed_all(0)
            data = job.data.build(input_shape=job.model.input_shape(), seed=0)
            engine = build_engine(job, plan, built(job, plan), data, group)
            losses = [engine.step(batch).loss for batch in engine.loader]
            found.append((losses, {name: p.detach().clone() for name, p in engine.named_parameters().items()}))
            engine.close()
    return found


@pytest.mark.parametrize(
    "split",
    [
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("fsdp=2", "pp=2 microbatches=2", "cp=2", "fsdp=2 tp=2")),
        "tp=2",
    ],
)
def test_so_it_is_over_every_split(ranks: Ranks, tmp_path: Path, split: str) -> None:
    for (losses, weights), *others in ranks(Plan.parse(f"dp=2 {split}").ranks, divided, tmp_path, split, backend="shm"):
        for found_losses, found_weights in others:
            assert found_losses == pytest.approx(losses, rel=1e-12)
            assert found_weights.keys() == weights.keys()
            for name, weight in weights.items():
                torch.testing.assert_close(found_weights[name], weight, **ROUNDING)  # type: ignore[arg-type]


# Convergence

DIGITS: dict[str, Any] = {
    "name": "digits",
    "model": "cifar_cnn",
    "data": "digits",
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "optimizer": {"name": "adamw", "lr": 0.001},
    "schedule": {"name": "constant", "warmup_steps": 20},
    "global_batch": 64,
    "stop": {"epochs": 12, "metric_above": {"accuracy": 0.96}},
}


def run(folder: Path, ranks: Ranks, job: dict[str, Any], plan: str) -> Run:
    new_run(folder, Job(**job), plan)
    ranks(Plan.parse(plan).ranks, train_as_rank, folder, deadline_s=300, backend="shm")
    return Run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["local:8", "diloco:8,fragments=2,overlap=2"])
def test_digits_are_learned_within_twelve_epochs(ranks: Ranks, tmp_path: Path, sync: str) -> None:
    """12 epochs are 17,244 samples. Synchronous training needs 3 to 10 epochs to 96 %."""
    found = run(tmp_path / "run", ranks, DIGITS, f"dp=2 sync={sync}")
    assert found.metrics["accuracy"] > 0.96, found.metrics


GPT: dict[str, Any] = {
    "name": "gpt-text",
    "model": {"zoo": "gpt", "args": {"layers": 3, "hidden": 128, "heads": 4, "context": 64}},
    "data": {"kind": "text", "path": "{stdlib}/pydoc_data", "context": 64},
    "loss": "cross_entropy",
    "metrics": ["bits_per_byte"],
    "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
    "schedule": {"name": "constant", "warmup_steps": 20},
    "global_batch": 32,
    "clip_norm": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "steps"),
    [
        ("local:10", 80),
        ("diloco:10,fragments=2,overlap=3", 160),
        ("diloco:10,fragments=2,overlap=3 compress=int4", 160),
    ],
)
def test_a_gpt_comes_to_what_synchronous_training_has_after_sixty_steps(
    ranks: Ranks, tmp_path: Path, sync: str, steps: int
) -> None:
    """That is 2.53 bits per byte after 1,920 sequences.

    An outer momentum of 0.9 needs more steps than these to pay, and costs some.
    """
    found = run(tmp_path / "run", ranks, GPT | {"stop": {"steps": steps}}, f"dp=2 sync={sync}")
    assert found.metrics["bits_per_byte"] < 2.6, found.metrics
