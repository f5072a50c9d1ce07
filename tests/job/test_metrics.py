"""Metrics. One that does not add up over batches changes with the number of replicas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import DataError, JobError
from paceline.job.loss import LossSpec, Metric, build_metrics
from refusals import raises


def metric(name: str) -> Metric:
    (built,) = build_metrics((name,))
    assert built.name == name
    return built


def value(measure: Metric, *batches: tuple[Tensor, Any]) -> float:
    sums = [measure(output, target) for output, target in batches]
    return measure.result(sum(total for total, _ in sums), sum(count for _, count in sums))


CLASSES = torch.randn(30, 7, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 7, (30,), generator=torch.Generator().manual_seed(2))
TOKENS = torch.randn(4, 6, 7, generator=torch.Generator().manual_seed(3))
NEXT = torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(4)).index_fill(1, torch.tensor([0, 3]), -100)
CASES: dict[str, tuple[Tensor, Tensor]] = {
    "accuracy": (CLASSES, LABELS),
    "top5": (TOKENS, NEXT),
    "perplexity": (TOKENS, NEXT),
    "bits_per_byte": (TOKENS, NEXT),
    "mse": (CLASSES, CLASSES + 1),
    "mae": (CLASSES, CLASSES + 1),
}


@pytest.mark.parametrize("name", CASES)
def test_batches_of_any_size_add_up_to_the_whole(name: str) -> None:
    output, target = CASES[name]
    whole = value(metric(name), (output, target))
    parts = value(metric(name), (output[:1], target[:1]), (output[1:], target[1:]))
    assert parts == pytest.approx(whole, rel=1e-5)


def test_each_metric_is_what_its_name_says() -> None:
    assert value(metric("accuracy"), (CLASSES, LABELS)) == pytest.approx(
        sum(int(c.argmax()) == int(y) for c, y in zip(CLASSES, LABELS, strict=True)) / 30
    )
    top5 = sum(int(y) in c.topk(5).indices.tolist() for c, y in zip(CLASSES, LABELS, strict=True)) / 30
    assert value(metric("top5"), (CLASSES, LABELS)) == pytest.approx(top5)
    mean = float(F.cross_entropy(TOKENS.flatten(0, 1), NEXT.flatten()))
    assert value(metric("perplexity"), (TOKENS, NEXT)) == pytest.approx(math.exp(mean), rel=1e-5)
    assert value(metric("bits_per_byte"), (TOKENS, NEXT)) == pytest.approx(mean / math.log(2), rel=1e-5)
    assert value(metric("mse"), (CLASSES, CLASSES + 2)) == pytest.approx(4, rel=1e-5)
    assert value(metric("mae"), (CLASSES, CLASSES - 2)) == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize("name", ["accuracy", "top5", "perplexity", "bits_per_byte"])
def test_only_the_tokens_with_a_label_count(name: str) -> None:
    _, count = metric(name)(TOKENS, NEXT)
    assert count == 4 * 4


def test_five_guesses_among_three_classes_are_always_right() -> None:
    assert value(metric("top5"), (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))) == 1.0


def test_accuracy_of_yes_or_no_outputs_counts_the_right_side_of_zero() -> None:
    logits, target = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert metric("accuracy")(logits, target) == (2.0, 4.0)


def test_views_find_their_partners_where_they_are_alike() -> None:
    views = F.normalize(torch.randn(6, 1, 16), dim=-1).expand(6, 2, 16)
    assert value(metric("contrastive_accuracy"), (views, None)) == 1.0
    assert value(metric("contrastive_accuracy"), (views[torch.tensor([[0, 1], [1, 0]]), 0], None)) == 0.0


def test_what_was_never_counted_has_no_value() -> None:
    assert math.isnan(metric("accuracy").result(0.0, 0.0))
    assert metric("perplexity").result(1e6, 1.0) == math.inf


def test_the_held_out_loss_is_weighted_as_in_training() -> None:
    loss = LossSpec(name="cross_entropy").build()
    measures = build_metrics(("loss", "accuracy"), loss)
    assert [m.name for m in measures] == ["loss", "accuracy"]
    whole = float(loss(TOKENS, NEXT))
    assert value(measures[0], (TOKENS[:1], NEXT[:1]), (TOKENS[1:], NEXT[1:])) == pytest.approx(whole, rel=1e-5)
    (plain,) = build_metrics((), LossSpec(name="mse").build())
    assert plain(CLASSES, CLASSES + 1)[1] == 30


def test_a_metric_of_ones_own_is_found_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "own_metric.py"
    file.write_text(
        "class Largest:\n"
        "    name = 'largest'\n"
        "    def __call__(self, output, target): return float(output.max()), 1.0\n"
        "    def result(self, total, count): return total / count\n"
        "def nothing(): return 3\n"
    )
    (own,) = build_metrics((f"{file}:Largest",))
    assert own.name == "largest"
    assert value(own, (torch.tensor([1.0, 5.0]), None)) == 5.0
    with raises(JobError, "metric.not_a_metric", class_name="int"):
        build_metrics((f"{file}:nothing",))
    with raises(JobError, "metric.unknown", hint='Did you mean "accuracy"?', name="acuracy"):
        build_metrics(("acuracy",))


def test_accuracy_of_one_hot_and_soft_targets_is_that_of_their_classes() -> None:
    expected = value(metric("accuracy"), (CLASSES, LABELS))
    one_hot = F.one_hot(LABELS, 7)
    for targets in (one_hot.float(), one_hot, one_hot * 0.9 + 0.1 / 7):
        assert value(metric("accuracy"), (CLASSES, targets)) == pytest.approx(expected)
    tokens, labels = torch.randn(2, 5, 3), torch.randint(0, 3, (2, 5))
    soft = F.one_hot(labels, 3) * 0.8 + 0.2 / 3
    assert value(metric("accuracy"), (tokens, soft)) == value(metric("accuracy"), (tokens, labels))


def test_accuracy_of_one_logit_per_sample_is_the_share_on_the_right_side() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, -2.0])
    labels = torch.tensor([1, 0, 0, 0])
    for output in (logits, logits[:, None]):
        for target in (labels, labels.float(), labels[:, None]):
            assert value(metric("accuracy"), (output, target)) == pytest.approx(0.75)


def test_samples_with_several_labels_have_a_metric_of_their_own() -> None:
    targets = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    output = torch.tensor([[1.0, 2.0, -1.0], [1.0, 1.0, -1.0]])
    assert value(metric("multilabel_accuracy"), (output, targets)) == pytest.approx(5 / 6)
    with raises(DataError, "metric.row_sum"):
        metric("accuracy")(output, targets)


@pytest.mark.parametrize(
    ("name", "output", "target"),
    [
        ("accuracy", torch.randn(4), torch.randn(4) + 5),
        ("accuracy", torch.randn(4, 3), torch.full((4, 3), 2.0)),
        ("accuracy", torch.randn(4, 3), torch.zeros(4, 1, dtype=torch.long)),
        ("top5", torch.randn(4, 6), torch.zeros(4, 4, dtype=torch.long)),
        ("perplexity", torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.long)),
        ("multilabel_accuracy", torch.randn(4, 3), torch.full((4, 3), -1.0)),
    ],
)
def test_targets_that_a_metric_would_misread_are_refused(name: str, output: Tensor, target: Tensor) -> None:
    with pytest.raises(DataError):
        metric(name)(output, target)


@pytest.mark.parametrize("targets", [torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 1.0])])
def test_bce_refuses_targets_outside_0_to_1(targets: Tensor) -> None:
    with pytest.raises(DataError):
        LossSpec(name="bce").build()(torch.zeros(2), targets)
