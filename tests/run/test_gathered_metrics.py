"""Metrics that need all predictions of the validation set equal scikit-learn's under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import own_metrics
import paceline
from paceline.errors import DataError, JobError
from paceline.job.job import Job
from paceline.run.record.run import Run
from ranks import Ranks
from refusals import raises
from small_jobs import new_run, points, small_job, train_as_rank, train_here

OF_CLASSES = "torchmetrics.classification:Multiclass"
METRICS = [
    "accuracy",
    "f1",
    # states that are summed, and states that are concatenated
    *({"name": f"{OF_CLASSES}{name}", "args": {"num_classes": 3}} for name in ("F1Score", "AUROC")),
    "own_metrics:AUC",
    {"name": "own_metrics:F1", "args": {"average": "weighted"}},
    "own_metrics:R2",
]


def job(**changes: Any) -> Job:
    """17 samples are held out, in batches of 8; the model stays as it is."""
    values: dict[str, Any] = {
        "model": {"factory": "own_metrics:network"},
        "data": points(held_out=0.25),
        "optimizer": {"name": "sgd", "lr": 1e-30},
        "metrics": METRICS,
        "stop": {"steps": 1},
    }
    return small_job(**(values | changes))


def expected(held_out: Any) -> dict[str, float]:
    from sklearn.metrics import f1_score, r2_score, roc_auc_score

    pairs = [held_out[i] for i in range(len(held_out))]
    inputs, labels = torch.stack([x for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs])
    with torch.no_grad():
        output = own_metrics.network()(inputs)
    of_each = torch.nn.functional.one_hot(labels, 3)
    areas = [roc_auc_score(of_each[:, i], output.double().softmax(1)[:, i]) for i in range(3)]
    macro = float(f1_score(labels, output.argmax(1), average="macro"))
    return {
        "f1": macro,
        "MulticlassF1Score": macro,
        "MulticlassAUROC": float(sum(areas) / 3),
        "accuracy": float((output.argmax(1) == labels).double().mean()),
        "auc": float(roc_auc_score(labels == 0, output.double().softmax(1)[:, 0])),
        "f1_weighted": float(f1_score(labels, output.argmax(1), average="weighted")),
        "r2": float(r2_score(labels.float(), output[:, 0])),
    }


@pytest.mark.parametrize("plan", ["dp=1", "dp=3", "fsdp=2", "pp=2 cut=2 microbatches=2", "dp=2 tp=2"])
def test_metrics_of_all_predictions_are_those_of_scikit_learn(tmp_path: Path, ranks: Ranks, plan: str) -> None:
    asked = job()
    held_out = asked.data.build(input_shape=None, seed=asked.seed).held_out
    if plan == "dp=1":
        train_here(tmp_path / "run", asked)
    else:
        ranks(new_run(tmp_path / "run", asked, plan).plan.ranks, train_as_rank, tmp_path / "run")
    found = dict(Run(tmp_path / "run").metrics)
    found.pop("loss")
    assert found == pytest.approx(expected(held_out), rel=1e-5)


def test_a_rank_without_a_validation_sample_takes_part(tmp_path: Path, ranks: Ranks) -> None:
    asked = job(data=points(held_out=0.05), metrics=["own_metrics:R2"])  # 3 or 4 samples for 3 ranks
    alone = train_here(tmp_path / "alone", asked)
    ranks(new_run(tmp_path / "run", asked, "dp=3").plan.ranks, train_as_rank, tmp_path / "run")
    assert Run(tmp_path / "run").metrics == pytest.approx(alone.metrics, rel=1e-5)


def test_a_metric_whose_rows_do_not_match_is_refused(tmp_path: Path) -> None:
    with raises(JobError, "metric.gathers_invalid"):
        train_here(tmp_path / "run", job(metrics=["own_metrics:Uneven"]))


def test_more_rows_than_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.evaluation.LIMIT_BYTES", 100)
    with raises(DataError, "metric.too_large", metric="f1_macro"):
        train_here(tmp_path / "run", job(metrics=["own_metrics:F1"]))


def test_arguments_that_a_metric_does_not_take_are_refused(tmp_path: Path) -> None:
    for name, code in (("accuracy", "metric.no_arguments"), ("own_metrics:AUC", "job.args_do_not_fit")):
        with raises(JobError, code):
            train_here(tmp_path / name.replace(":", "-"), job(metrics=[{"name": name, "args": {"k": 1}}]))


def test_a_job_with_metric_arguments_is_written_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(job().to_yaml())
    assert Job.load(file) == job()


def own_loop_evaluation() -> dict[str, float]:
    inputs = torch.randn(13, 6, generator=torch.Generator().manual_seed(3))
    data = DataLoader(TensorDataset(inputs, torch.arange(13) % 3), batch_size=4)
    model = own_metrics.network()
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=data)
    return engine.evaluate(data, [own_metrics.R2(), own_metrics.F1()])


def test_an_own_loop_measures_them_with_a_plain_loader(ranks: Ranks) -> None:
    from sklearn.metrics import f1_score, r2_score

    inputs, labels = torch.randn(13, 6, generator=torch.Generator().manual_seed(3)), torch.arange(13) % 3
    with torch.no_grad():
        output = own_metrics.network()(inputs)
    right = {
        "r2": float(r2_score(labels.float(), output[:, 0])),
        "f1_macro": float(f1_score(labels, output.argmax(1), average="macro")),
    }
    assert own_loop_evaluation() == pytest.approx(right, rel=1e-5)
    for found in ranks(2, own_loop_evaluation):
        assert found == pytest.approx(right, rel=1e-5)
