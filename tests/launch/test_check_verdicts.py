"""The verdicts of `paceline check`: a mistake is never taken for rounding, and what rounds or draws is never taken for a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forked_checks import checked
from paceline.job.job import Job
from ranks import Ranks
from small_jobs import small_job

CODE = '''
import os

import torch
import torch.nn.functional as F
from torch import nn


class Chaotic(nn.Module):
    """A logistic map doubles every difference ten times over, that of rounding, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.sigmoid(self.first(x))
        for _ in range(10):
            x = 3.99 * x * (1 - x)
        return self.last(x)


def plain():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def lost_on_rank_1(output, target):
    """The loss of rank 1 has no gradient."""
    loss = F.cross_entropy(output, target)
    return loss if os.environ.get("RANK") != "1" else loss.detach() + 0 * loss


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
'''


def job(folder: Path, factory: str, loss: str = "cross_entropy", args: dict[str, Any] | None = None, **changes: Any) -> Job:
    """A small job whose model, and loss if it is none of paceline's own, stand in the file that is written into `folder`."""
    file = folder / "own.py"
    file.write_text(CODE)
    data = {"kind": "synthetic", "samples": 64, "shape": [6], "classes": 3, "held_out": 0}
    own = loss if loss == "cross_entropy" else f"{file}:{loss}"
    return small_job(**({"model": {"factory": f"{file}:{factory}", "args": args or {}}, "data": data, "loss": own} | changes))


def test_a_rank_whose_gradient_is_left_out_is_not_taken_for_the_rounding_of_bf16(ranks: Ranks, tmp_path: Path) -> None:
    found = checked(ranks, job(tmp_path, "Chaotic", "lost_on_rank_1"), "dp=2 precision=bf16")
    assert found.tolerance.gradient > 1, "the job magnifies the rounding of bf16 beyond all measure"
    assert found.verdict == "cannot tell"
    assert not found.holds
    assert "precision=fp64" in str(found.why_undecided)


def test_a_rank_whose_gradient_is_left_out_is_found_where_bf16_rounds_as_usual(ranks: Ranks, tmp_path: Path) -> None:
    assert checked(ranks, job(tmp_path, "plain", "lost_on_rank_1"), "dp=2 precision=bf16").verdict == "differs"
    assert checked(ranks, job(tmp_path, "plain"), "dp=2 precision=bf16").verdict == "holds"


def test_statistics_that_stray_on_one_rank_are_found(ranks: Ranks, tmp_path: Path) -> None:
    found = checked(ranks, job(tmp_path, "Normed", args={"strays": True}), "dp=2")
    assert found.verdict == "differs"
    assert found.largest.gradient < found.tolerance.gradient, "training normalises by the batch, so only the buffer shows it"
    worst = max((step.buffer for step in found.steps), key=lambda w: w.difference)
    assert (worst.name, worst.rank) == ("norm.running_mean", 1)


def test_every_rank_has_the_statistics_of_its_own_samples(ranks: Ranks, tmp_path: Path) -> None:
    assert checked(ranks, job(tmp_path, "Normed"), "dp=2 microbatches=2").verdict == "holds"
    assert checked(ranks, job(tmp_path, "Normed", args={"track_running_stats": False}), "dp=2").verdict == "holds"


def test_uneven_shares_are_checked(ranks: Ranks, tmp_path: Path) -> None:
    assert checked(ranks, job(tmp_path, "Normed", partition={"weights": [3, 1]}), "dp=2").verdict == "holds"
