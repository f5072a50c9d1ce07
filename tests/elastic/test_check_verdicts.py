"""The verdicts of `paceline check`.

A mistake is never taken for rounding, and what rounds or draws is never taken for a mistake.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.parity.check import Checks, Parity
from small_jobs import CHAOTIC, small_job

CODE = (
    CHAOTIC
    + '''

import os

import torch.nn.functional as F


def plain():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def lost_on_rank_1(output, target):
    """The loss of rank 1 has no gradient."""
    loss = F.cross_entropy(output, target)
    return loss if os.environ.get("RANK") != "1" else loss.detach() + 0 * loss


WEIGHT = torch.tensor([0.2, 1.0, 3.0])


def weighed(output, target):
    """Its tensor is of float32, whatever the precision."""
    return F.cross_entropy(output, target, weight=WEIGHT)


weighed.items = lambda target: WEIGHT[target].sum()


class InFloat32(nn.Module):
    """Parts of it compute in float32, as norms and heads of many models do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.scale = torch.linspace(0.5, 1.5, 16)

    def forward(self, x):
        x = torch.tanh(self.first(x)).float()
        x = torch.softmax(x, dim=-1, dtype=torch.float32) @ torch.diag(self.scale)
        held = torch.zeros(len(x), 16)
        held[:] = x
        return self.last(held.to(self.last.weight.dtype))


class OnlyInFloat32(nn.Module):
    """Its largest number overflows the float32 that it is put into, as in a mask of some language models."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        if x.dtype is not torch.float32:
            raise RuntimeError("value cannot be converted to type float without overflow")
        return self.last(torch.tanh(self.first(x)))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.utils.spectral_norm(nn.Linear(6, 16)), nn.utils.parametrizations.spectral_norm(nn.Linear(16, 3))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class StochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = 0.5

    def forward(self, x):
        return x if not self.training or self.p == 0 else x * (torch.rand(len(x), 1) > self.p)


class Dropping(nn.Module):
    """Paths are dropped by a module, and values by a function with a number of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.path, self.last = nn.Linear(6, 16), StochasticDepth(), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(F.dropout(self.path(torch.tanh(self.first(x))), 0.3, self.training))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.noise, self.last = nn.Linear(6, 16), Noise(), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.noise(self.first(x)))


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Normed(nn.Module):
    def __init__(self, track_running_stats=True, strays=False):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16, track_running_stats=track_running_stats)
        self.strays = strays

    def forward(self, x):
        if self.strays and os.environ.get("RANK") == "1":
            self.norm.momentum = 0.5
        return self.last(torch.tanh(self.norm(self.first(x))))
'''  # noqa: E501
)


def job(
    folder: Path, factory: str, loss: str = "cross_entropy", args: dict[str, Any] | None = None, **changes: Any
) -> Job:
    """A small job whose model and loss stand in a file written into `folder`.

    The loss only if it is not one of paceline's own.
    """
    file = folder / "own.py"
    file.write_text(CODE)
    data = {"kind": "synthetic", "samples": 64, "shape": [6], "classes": 3, "held_out": 0}
    own = loss if loss == "cross_entropy" else f"{file}:{loss}"
    return small_job(
        **({"model": {"factory": f"{file}:{factory}", "args": args or {}}, "data": data, "loss": own} | changes)
    )


def checked(work: Job, plan: str) -> Parity:
    [found] = all_checked(work, plan)
    return found


def all_checked(work: Job, *plans: str) -> list[Parity]:
    """Each plan against the same training of one process."""
    with Checks(work, steps=2).opened() as checks:
        return [checks.check(Plan.parse(plan)) for plan in plans]


def test_a_rank_whose_gradient_is_left_out_is_not_taken_for_the_rounding_of_bf16(tmp_path: Path) -> None:
    found = checked(job(tmp_path, "Chaotic", "lost_on_rank_1"), "dp=2 precision=bf16")
    assert found.tolerance.gradient > 1, "the job magnifies the rounding of bf16 beyond all measure"
    assert found.verdict == "cannot tell"
    assert not found.holds
    assert "precision=fp64" in str(found.why_undecided)


def test_a_rank_whose_gradient_is_left_out_is_found_where_bf16_rounds_as_usual(tmp_path: Path) -> None:
    assert checked(job(tmp_path, "plain", "lost_on_rank_1"), "dp=2 precision=bf16").verdict == "differs"
    assert checked(job(tmp_path, "plain"), "dp=2 precision=bf16").verdict == "holds"


def test_statistics_that_stray_on_one_rank_are_found(tmp_path: Path) -> None:
    found = checked(job(tmp_path, "Normed", args={"strays": True}), "dp=2")
    assert found.verdict == "differs"
    assert found.largest.gradient < found.tolerance.gradient, (
        "training normalises by the batch, so only the buffer shows it"
    )
    worst = max((step.buffer for step in found.steps), key=lambda w: w.difference)
    assert (worst.name, worst.rank) == ("norm.running_mean", 1)


@pytest.mark.slow
def test_every_rank_has_the_statistics_of_its_own_samples(tmp_path: Path) -> None:
    assert checked(job(tmp_path, "Normed"), "dp=2 microbatches=2").verdict == "holds"
    assert checked(job(tmp_path, "Normed", args={"track_running_stats": False}), "dp=2").verdict == "holds"


@pytest.mark.slow
def test_uneven_shares_are_checked(tmp_path: Path) -> None:
    assert checked(job(tmp_path, "Normed", partition={"weights": [3, 1]}), "dp=2").verdict == "holds"


@pytest.mark.slow
def test_a_loss_with_float32_tensors_and_a_model_that_computes_in_float32_are_checked_in_float64(
    tmp_path: Path,
) -> None:
    found = checked(job(tmp_path, "InFloat32", "weighed"), "dp=2 precision=fp64")
    assert found.verdict == "holds"
    assert found.tolerance.loss == 1e-9, "what the model asks for in float32 is float64 as well"
    assert checked(job(tmp_path, "InFloat32", "weighed"), "dp=2").verdict == "holds"


def test_what_a_forward_pass_writes_is_compared(tmp_path: Path) -> None:
    for found in all_checked(job(tmp_path, "Spectral"), "dp=2", "dp=2 microbatches=2"):
        assert found.verdict == "holds", f"{found.steps} {found.tolerance}"


def test_models_that_drop_paths_or_values_are_checked_without_dropping(tmp_path: Path) -> None:
    assert checked(job(tmp_path, "Dropping"), "dp=2").verdict == "holds"


def test_a_model_that_draws_at_random_cannot_be_told(tmp_path: Path) -> None:
    found = checked(job(tmp_path, "Noisy"), "dp=2")
    assert found.verdict == "cannot tell"
    assert "noise draws random numbers" in str(found.why_undecided)


def test_a_split_is_checked_in_float64(tmp_path: Path) -> None:
    assert checked(job(tmp_path, "InFloat32"), "fsdp=2 precision=fp64 remat=none").verdict == "holds"


def test_stages_are_checked_in_float64(tmp_path: Path) -> None:
    """A stage leaves the model's forward pass early; what is drawn after that must have the model's own dtype again."""
    found = checked(job(tmp_path, "plain"), "pp=2 microbatches=2 precision=fp64")
    assert found.verdict == "holds", found.largest


def test_a_model_that_cannot_run_in_float64_is_held_against_one_process_in_float32(tmp_path: Path) -> None:
    found = checked(job(tmp_path, "OnlyInFloat32"), "dp=2")
    assert found.holds
    assert found.reference_precision == "fp32"
