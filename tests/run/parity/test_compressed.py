"""Compressed all-reduce is not exact, so it is held to convergence.

The loss of exact training within a stated number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.backend import joined
from paceline.job.job import Job
from paceline.run.record.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.rule import Replica
from ranks import Ranks, run_on_ranks
from small_jobs import new_run, train_as_rank

RANKS, BATCH, STEPS, EVERY = 2, 64, 120, 5
SAMPLES_MORE = {  # beyond those that exact training needs, as a share of them
    "fp16": 0.1,
    "bf16": 0.1,
    "int8": 0.1,
    "int4": 0.1,
    "1bit": 0.25,
    "topk:0.05+bf16": 0.25,
    "powersgd:4+bf16": 0.15,
}


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


# Numbers of fewer bits, and few numbers: the others are rounded, or left out, as one of these is.
KINDS = ("int8", "topk:0.05+bf16")


def losses_on_digits(codecs: Sequence[str], inputs: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """By codec: the loss on all digits before training, and from the steps of exact training on."""
    with joined(deadline_s=60) as group:
        return {
            codec: trained(group, codec, inputs, labels, int(STEPS * (1 + SAMPLES_MORE.get(codec, 0))))
            for codec in ("none", *codecs)
        }


def trained(group: Any, codec: str, inputs: Tensor, labels: Tensor, steps: int) -> list[float]:
    model, rule = mlp(), AllReduce("flat", codec)
    rule.attach(Replica(model, group, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    order, found = torch.Generator().manual_seed(2), []
    for step in range(steps + 1):
        if step % EVERY == 0 and (step == 0 or step >= STEPS):
            with torch.no_grad():
                found.append(float(nn.functional.cross_entropy(model(inputs), labels)))
        optimizer.zero_grad()
        own = torch.randint(len(inputs), (BATCH,), generator=order)[group.rank :: group.size]
        (nn.functional.cross_entropy(model(inputs[own]), labels[own]) / group.size).backward()
        rule.after_backward(step + 1, torch.zeros(1))
        optimizer.step()
    rule.detach()
    return found


@pytest.mark.parametrize(
    "codecs",
    [
        KINDS,
        pytest.param(("fp16", "bf16", "int4"), marks=pytest.mark.slow),
        pytest.param(("1bit", "powersgd:4+bf16"), marks=pytest.mark.slow),
    ],
)
def test_a_codec_reaches_the_loss_of_exact_training_on_digits(ranks: Ranks, codecs: Sequence[str]) -> None:
    # here, not at the top: the ranks import this file, and would take longer for that than for their training
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    first, second = ranks(RANKS, losses_on_digits, codecs, inputs, labels, backend="shm", deadline_s=90)
    assert first == second, "the replicas differ"
    exact = first.pop("none")
    assert exact[-1] < 0.4 < 2 < exact[0]
    for codec, losses in first.items():
        assert losses[: len(exact)] != exact, codec
        assert min(losses) <= exact[-1], (
            f"{codec} needs more than {1 + SAMPLES_MORE[codec]:.2f} x the samples: {min(losses)} > {exact[-1]}"
        )


def gpt_job() -> Job:
    return Job(
        name="gpt",
        model={"zoo": "gpt", "args": {"layers": 2, "hidden": 128, "heads": 4, "context": 64}},
        data={"kind": "text", "path": "{stdlib}/pydoc_data", "context": 64},
        loss="cross_entropy",
        metrics=["bits_per_byte"],
        optimizer={"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
        schedule={"name": "cosine", "warmup_steps": 20, "final": 0.1},
        global_batch=32,
        clip_norm=1.0,
        stop={"steps": 150},
        deadline_s=60,
    )


@pytest.fixture(scope="module")
def exact_gpt_losses(tmp_path_factory: pytest.TempPathFactory, _seed: None) -> list[float]:
    return gpt_losses(run_on_ranks, tmp_path_factory.mktemp("exact"), "none")


def gpt_losses(ranks: Ranks, path: Path, codec: str) -> list[float]:
    """The loss of every step."""
    new_run(path / "run", gpt_job(), f"dp=2 compress={codec}")
    ranks(2, train_as_rank, path / "run", backend="shm", deadline_s=400)
    return Run(path / "run").losses


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["bf16", "int8", "powersgd:16+int8"])
def test_a_gpt_learns_as_much_from_as_many_samples(
    ranks: Ranks, tmp_path: Path, exact_gpt_losses: list[float], codec: str
) -> None:
    """The mean loss of the last tenth of the steps is within 2 %."""
    assert mean(gpt_losses(ranks, tmp_path, codec)[-15:]) < 1.02 * mean(exact_gpt_losses[-15:])


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["1bit", "topk:0.05+bf16", "powersgd:4"])
def test_with_a_codec_that_leaves_out_most_a_gpt_learns_as_much_from_six_times_the_samples(
    ranks: Ranks, tmp_path: Path, exact_gpt_losses: list[float], codec: str
) -> None:
    """Adam takes what comes late for noise, which costs most at the start of training."""
    assert mean(gpt_losses(ranks, tmp_path, codec)[-15:]) < mean(exact_gpt_losses[20:30])
