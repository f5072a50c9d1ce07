"""Metrics beside scikit-learn and torchmetrics. A metric that depends on the batches would depend on the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, mean_absolute_error, r2_score, roc_auc_score
from torch import Tensor
from torchmetrics import MeanSquaredError, PearsonCorrCoef
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from paceline.engine.evaluation import Measured
from paceline.errors import DataError, JobError
from paceline.job.loss import LossSpec, MetricSpec, build_metrics

DRAW = torch.Generator().manual_seed(0)
LOGITS = torch.randn(101, 4, generator=DRAW)
CLASSES = torch.randint(0, 4, (101,), generator=DRAW)
LABELS = (torch.rand(101, 4, generator=DRAW) > 0.5).float()
QUANTITIES = LOGITS / 2 + torch.randn(101, 4, generator=DRAW)
OF_CLASSES = "torchmetrics.classification:Multiclass"
FOUR: dict[str, Any] = {"num_classes": 4}


def measured(loss: Any, metrics: Iterable[Any], output: Tensor, target: Tensor) -> dict[str, float]:
    """The metrics over uneven batches."""
    built = build_metrics([MetricSpec.model_validate(m) for m in metrics], LossSpec.model_validate(loss).build())
    found = Measured(built)
    for of_batch in zip(output.split(17), target.split(17), strict=True):
        found.add([metric(*of_batch) for metric in built])
    return found.results()


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_of_classes_and_of_labels_is_scikit_learns(average: str) -> None:
    f1 = [{"name": "f1", "args": {"average": average}}]
    of_classes = measured("cross_entropy", f1, LOGITS, CLASSES)["f1"]
    assert of_classes == pytest.approx(f1_score(CLASSES, LOGITS.argmax(1), average=average))
    assert measured("bce", f1, LOGITS, LABELS)["f1"] == pytest.approx(f1_score(LABELS, LOGITS > 0, average=average))


def test_two_classes_have_one_f1_and_one_area_however_the_model_tells_them() -> None:
    two, yes = LOGITS[:, :2], CLASSES % 2
    one = two[:, 1:] - two[:, :1]
    expected = {"f1": f1_score(yes, one[:, 0] > 0), "auc": roc_auc_score(yes, one[:, 0])}
    for loss, output, target in (
        ("cross_entropy", two, yes),
        ("bce", one, yes.float()),
        ("BCELoss", one.sigmoid(), yes.float()),
    ):
        metrics = ["f1", "auc", "torchmetrics.classification:BinaryAUROC", "torchmetrics.classification:BinaryF1Score"]
        found = measured(loss, metrics, output, target)
        assert {name: found[name] for name in expected} == pytest.approx(expected), loss
        assert found["BinaryAUROC"] == pytest.approx(found["auc"])
        assert found["BinaryF1Score"] == pytest.approx(found["f1"])


def test_areas_of_classes_and_labels_are_scikit_learns() -> None:
    expected = roc_auc_score(CLASSES, LOGITS.double().softmax(1), multi_class="ovr")
    assert measured("cross_entropy", ["auc"], LOGITS, CLASSES)["auc"] == pytest.approx(expected)
    assert measured("bce", ["auc"], LOGITS, LABELS)["auc"] == pytest.approx(roc_auc_score(LABELS, LOGITS))
    ties = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    assert measured("bce", ["auc"], ties, torch.tensor([0.0, 1.0, 1.0, 1.0]))["auc"] == pytest.approx(5 / 6)
    assert math.isnan(measured("bce", ["auc"], ties, torch.ones(4))["auc"])


def test_errors_of_quantities_are_scikit_learns() -> None:
    found = measured("mse", ["r2", "mae", "torchmetrics:MeanSquaredError"], LOGITS, QUANTITIES)
    assert found["r2"] == pytest.approx(r2_score(QUANTITIES, LOGITS))
    assert found["mae"] == pytest.approx(mean_absolute_error(QUANTITIES, LOGITS))
    assert found["MeanSquaredError"] == pytest.approx(float(MeanSquaredError()(LOGITS, QUANTITIES)))


def test_torchmetrics_gets_probabilities_also_of_logits_that_look_like_some() -> None:
    small = LOGITS.sigmoid()  # all in 0..1, so torchmetrics alone would take them as they are
    found = measured("cross_entropy", [{"name": f"{OF_CLASSES}AUROC", "args": FOUR}], small, CLASSES)
    assert found["MulticlassAUROC"] == pytest.approx(float(MulticlassAUROC(**FOUR)(small.softmax(1), CLASSES)))


def test_labels_that_the_loss_leaves_out_are_left_out() -> None:
    tokens, labels = LOGITS.view(101, 2, 2), torch.stack([CLASSES % 2, torch.full_like(CLASSES, -100)], dim=1)
    metrics = ["f1", {"name": f"{OF_CLASSES}F1Score", "args": {"num_classes": 2}}]
    found = measured("cross_entropy", metrics, tokens, labels)
    assert found["f1"] == pytest.approx(f1_score(CLASSES % 2, LOGITS[:, :2].argmax(1)))
    expected = float(MulticlassF1Score(num_classes=2)(LOGITS[:, :2].softmax(1), CLASSES % 2))
    assert found["MulticlassF1Score"] == pytest.approx(expected)


def test_a_metric_whose_states_cannot_be_reduced_sees_all_samples_at_once() -> None:
    found = measured("mse", ["torchmetrics:PearsonCorrCoef"], LOGITS[:, 0], QUANTITIES[:, 0])
    whole = PearsonCorrCoef()(LOGITS[:, 0], QUANTITIES[:, 0])
    assert found["PearsonCorrCoef"] == pytest.approx(float(whole), rel=1e-5)


@pytest.mark.parametrize(
    "metric",
    [
        {"name": f"{OF_CLASSES}F1Score", "args": {**FOUR, "average": "none"}},
        {"name": f"{OF_CLASSES}ConfusionMatrix", "args": FOUR},
        {"name": f"{OF_CLASSES}F1Score", "args": {"num_classes": 4, "average": "best"}},
        {"name": f"{OF_CLASSES}F1Score"},
        {"name": "f1", "args": {"average": "mean"}},
    ],
)
def test_a_metric_that_is_no_number_or_takes_other_arguments_is_refused_before_the_start(metric: Any) -> None:
    with pytest.raises(JobError):
        measured("cross_entropy", [metric], LOGITS[:0], CLASSES[:0])


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(JobError):
        build_metrics([MetricSpec(name="f1"), MetricSpec(name="f1", args={"average": "micro"})])


def test_targets_that_could_be_classes_or_labels_are_refused_unless_the_loss_tells(tmp_path: Any) -> None:
    own = tmp_path / "own_loss.py"
    own.write_text(
        "import torch\n\ndef loss(output, target):\n    return torch.nn.functional.cross_entropy(output, target)\n"
    )
    with pytest.raises(DataError):
        measured(f"{own}:loss", ["f1"], LOGITS, LABELS)
    with pytest.raises(JobError):  # the outputs are probabilities already
        measured(f"{own}:loss", [{"name": f"{OF_CLASSES}AUROC", "args": FOUR}], LOGITS.softmax(1), CLASSES)
