"""Validation metrics are the same for any number of replicas.

Also where a loss compares the samples of a batch with each other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run.record.run import Run
from ranks import Ranks
from small_jobs import new_run, small_job, train_as_rank, train_here

SIMCLR = {"model": {"zoo": "simclr", "args": {"dim": 8}}, "loss": "contrastive", "metrics": ["contrastive_accuracy"]}


def test_a_contrastive_held_out_metric_does_not_depend_on_the_plan(ranks: Ranks, tmp_path: Path) -> None:
    """A batch-wise loss is measured on batches of the same size under every plan.

    Smaller ones would be an easier task.
    """
    data = {"kind": "digits", "limit": 90, "held_out": 0.4}  # 36 held out: batches of 16, 16 and 4
    job = small_job(**SIMCLR, data=data, optimizer={"name": "sgd", "lr": 1e-12}, global_batch=16, stop={"steps": 1})
    alone = train_here(tmp_path / "alone", job).metrics
    run = new_run(tmp_path / "two", job, plan="dp=2")
    ranks(2, train_as_rank, run.path)
    assert Run(run.path).metrics == pytest.approx(alone, rel=1e-6)


def test_simclr_trains_on_the_same_views_under_every_plan(ranks: Ranks, tmp_path: Path) -> None:
    data = {"kind": "digits", "limit": 48, "held_out": 0}
    job = small_job(**SIMCLR | {"metrics": []}, data=data, global_batch=16, stop={"steps": 5})
    alone = train_here(tmp_path / "alone", job).losses
    run = new_run(tmp_path / "two", job, plan="dp=2")
    ranks(2, train_as_rank, run.path)
    assert Run(run.path).losses == pytest.approx(alone, rel=1e-5)
