"""Losses. What is averaged over the wrong number of items makes plans of one job disagree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import DataError, JobError
from paceline.job.loss import Loss, LossSpec
from paceline.job.loss_items import check_labels, items_of
from paceline.job.zoo.losses import CrossEntropy
from refusals import raises


def loss(name: str, **args: Any) -> Any:
    return LossSpec(name=name, args=args).build()


class Output:
    """Like transformers' ModelOutput: the logits are one of its parts."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("wrap", [lambda x: x, Output])
def test_classes_tokens_and_pixels_have_torchs_cross_entropy(wrap: Any) -> None:
    ce = loss("cross_entropy")
    logits, labels = torch.randn(6, 5), torch.randint(0, 5, (6,))
    assert torch.equal(ce(wrap(logits), labels), F.cross_entropy(logits, labels))
    assert torch.equal(ce(wrap(logits), labels.int()), F.cross_entropy(logits, labels))
    tokens, targets = torch.randn(2, 7, 5), torch.randint(0, 5, (2, 7))
    assert torch.allclose(ce(wrap(tokens), targets), F.cross_entropy(tokens.transpose(1, 2), targets))
    pixels, classes = torch.randn(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4))
    assert torch.equal(ce(wrap(pixels), classes), F.cross_entropy(pixels, classes))


@settings(max_examples=60)
@given(
    labels=st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=2, max_size=12),
    cut=st.integers(0, 12),
    smoothing=st.sampled_from([0.0, 0.1]),
    weight=st.sampled_from([None, [0.2, 1.0, 3.0]]),
)
def test_parts_weighted_by_their_items_make_up_the_whole(
    labels: list[int], cut: int, smoothing: float, weight: list[float] | None
) -> None:
    ce = loss("cross_entropy", label_smoothing=smoothing, **({"weight": weight} if weight else {}))
    torch.manual_seed(0)
    logits, target = torch.randn(len(labels), 3, dtype=torch.float64), torch.tensor(labels)
    parts = [(logits[:cut], target[:cut]), (logits[cut:], target[cut:])]
    items = [float(ce.items(t)) for _, t in parts]
    assert float(ce.items(target)) == pytest.approx(sum(items))
    if sum(items):
        weighted = sum(float(ce(*part)) * n for part, n in zip(parts, items, strict=True) if len(part[1])) / sum(items)
        assert float(ce(logits, target)) == pytest.approx(weighted)


def test_a_batch_whose_labels_are_all_ignored_adds_nothing() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    value = loss("cross_entropy")(logits, torch.full((2, 3), -100))
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_model_that_went_wrong_is_not_hidden() -> None:
    assert loss("cross_entropy")(torch.full((2, 3), math.nan), torch.tensor([0, 1])).isnan()


@pytest.mark.parametrize(
    ("logits", "labels", "code"),
    [
        (
            torch.zeros(4, 10),
            torch.tensor([0, 9, 11, 3]),
            "loss.label_out_of_range",
        ),
        (
            torch.zeros(2, 10),
            torch.tensor([-1, 10]),
            "loss.label_out_of_range",
        ),
        (
            torch.zeros(2, 3, 10),
            torch.tensor([[0, 1, 2], [3, 10, 4]]),
            "loss.label_out_of_range",
        ),
        (torch.zeros(4, 10), torch.zeros(4), "loss.labels_not_integers"),
        (
            torch.zeros(4, 10),
            torch.zeros(3, dtype=torch.int64),
            "loss.samples_differ",
        ),
        (
            torch.zeros(4, 10),
            torch.zeros(4, 1, dtype=torch.int64),
            "loss.samples_differ",
        ),
        (
            torch.zeros(2, 3, 10),
            torch.zeros(2, dtype=torch.int64),
            "loss.tokens_differ",
        ),
    ],
)
def test_labels_that_do_not_fit_are_named(logits: Tensor, labels: Tensor, code: str) -> None:
    with raises(DataError, code):
        loss("cross_entropy")(logits, labels)


def test_labels_can_be_checked_before_they_reach_a_gpu() -> None:
    check_labels(torch.tensor([0, 9, -100]), 10, "in batch 37")
    with raises(DataError, "loss.label_out_of_range", at="at (1, 0)", label=10, labels=4, where="in batch 37", wrong=1):
        check_labels(torch.tensor([[0, 9], [10, 3]]), 10, "in batch 37")


@pytest.mark.parametrize(
    ("logits", "labels", "place"),
    [
        (torch.zeros(3, 10), torch.tensor([0, 1, 10]), "sample 47"),
        (torch.zeros(3, 2, 10), torch.tensor([[0, 1], [2, 10], [3, 4]]), "sample 12, position 1"),
    ],
)
def test_a_loss_checks_labels_by_the_shape_of_the_output_alone(logits: Tensor, labels: Tensor, place: str) -> None:
    cross_entropy = CrossEntropy(weight=[1.0] * 10)
    assert cross_entropy.items(labels) == labels.numel(), (
        "counting the items comes before the check, and must not trip over the label"
    )
    cross_entropy.check(logits.to("meta"), labels.clamp(max=9), "in step 3")
    with raises(DataError, "loss.label_out_of_range", label=10, where="in step 3", wrong=1):
        cross_entropy.check(logits.to("meta"), labels, "in step 3", [5, 12, 47])


@pytest.mark.parametrize(
    ("name", "reference"), [("mse", F.mse_loss), ("mae", F.l1_loss), ("bce", F.binary_cross_entropy_with_logits)]
)
def test_fitted_numbers_have_torchs_losses_in_full_precision(name: str, reference: Any) -> None:
    output, target = torch.randn(5, 1), torch.rand(5)
    expected = reference(output.squeeze(1), target)
    assert torch.equal(loss(name)(output, target), expected)
    assert torch.equal(loss(name)(Output(output.squeeze(1)), target.unsqueeze(1)), expected)
    assert loss(name)(output.bfloat16(), target).dtype == torch.float32


@pytest.mark.parametrize("shape", [(1, 5), (5, 5), (4,)])
def test_shapes_that_torch_would_broadcast_are_refused(shape: tuple[int, ...]) -> None:
    with raises(DataError, "loss.shapes_differ", name="mse", output="float32 [5]"):
        loss("mse")(torch.zeros(5), torch.zeros(shape))


def test_the_contrastive_loss_is_nt_xent() -> None:
    views = F.normalize(torch.randn(4, 2, 6, dtype=torch.float64), dim=-1)
    flat = [views[i, j] for i in range(4) for j in range(2)]
    total = 0.0
    for a in range(8):
        partner = a + 1 if a % 2 == 0 else a - 1
        others = sum(math.exp(float(flat[a] @ flat[b]) / 0.2) for b in range(8) if b != a)
        total -= math.log(math.exp(float(flat[a] @ flat[partner]) / 0.2) / others)
    contrastive = loss("contrastive", temperature=0.2)
    assert float(contrastive(views, None)) == pytest.approx(total / 8)
    assert contrastive.whole_batch
    with raises(DataError, "loss.not_two_views", output="float32 [3, 4]"):
        contrastive(torch.zeros(3, 4), None)


def test_a_model_may_bring_its_own_loss() -> None:
    value = torch.tensor(1.5)
    own = loss("model")
    output = Output(torch.zeros(1))
    output.loss = value  # type: ignore[attr-defined]
    assert own(output, None) is value
    assert own({"loss": value, "logits": None}, None) is value
    for without in (torch.zeros(3), {"logits": value}, Output(value)):
        with raises(JobError, "loss.model_without_loss"):
            own(without, None)


def test_an_output_without_logits_is_named() -> None:
    with raises(JobError, "loss.no_logits", class_name="tuple"):
        loss("mse")((torch.zeros(3),), torch.zeros(3))


@pytest.mark.parametrize(
    ("name", "args", "code"),
    [
        ("cros_entropy", {}, "loss.unknown"),
        (
            "cross_entropy",
            {"label_smothing": 0.1},
            "job.unknown_argument",
        ),
        ("cross_entropy", {"label_smoothing": 2}, "file.value_out_of_range"),
        ("mse", {"reduction": "sum"}, "job.unknown_argument"),
        ("math:pi", {}, "loss.not_callable"),
        ("torch.nn.functional:mse_loss", {"reductoin": "sum"}, "job.args_do_not_fit"),
    ],
)
def test_a_loss_that_cannot_be_built_says_what_would_do(name: str, args: dict[str, Any], code: str) -> None:
    with raises(JobError, code):
        loss(name, **args)


def test_class_weights_of_another_number_than_the_classes_are_named() -> None:
    with raises(JobError, "loss.weight_length", classes=10, weight=2):
        loss("cross_entropy", weight=[1, 2])(torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64))


def test_a_loss_of_ones_own_is_found_and_keeps_what_it_says_of_itself(tmp_path: Path) -> None:
    file = tmp_path / "own_loss.py"
    file.write_text(
        "def scaled(output, target, by=1.0):\n    return by * (output - target).abs().mean()\n"
        "scaled.items = lambda target: 7\nscaled.whole_batch = True\n"
    )
    own = loss(f"{file}:scaled", by=3.0)
    assert float(own(torch.zeros(2), torch.ones(2))) == 3.0
    assert (own.items(None), own.whole_batch) == (7, True)
    module: Loss = loss("torch.nn:SmoothL1Loss", beta=0.5)
    output, target = torch.randn(5, 2), torch.randn(5, 2)
    assert float(module(output, target)) == pytest.approx(float(nn.SmoothL1Loss(beta=0.5)(output, target)))


@pytest.mark.parametrize("args", [{}, {"weight": [1.0, 3.0, 0.5]}, {"weight": [1.0, 3.0, 0.5], "label_smoothing": 0.1}])
def test_weights_in_a_list_are_those_of_torchs_cross_entropy(args: dict[str, Any]) -> None:
    logits, labels = torch.randn(12, 3, dtype=torch.float64), torch.randint(0, 3, (12,))
    weight = torch.tensor(args["weight"], dtype=torch.float64) if args else None
    expected = F.cross_entropy(logits, labels, weight=weight, label_smoothing=args.get("label_smoothing", 0.0))
    for name in ("cross_entropy", "CrossEntropyLoss", "torch.nn:CrossEntropyLoss"):
        own = loss(name, **args)
        assert float(own(logits, labels)) == pytest.approx(float(expected), rel=1e-6), name
        items = items_of(own)
        assert items is not None
        parts = [(float(own(a, b)), float(items(b))) for a, b in zip(logits.split(5), labels.split(5), strict=True)]
        mean = sum(value * n for value, n in parts) / sum(n for _, n in parts)
        assert mean == pytest.approx(float(expected), rel=1e-6), name


def test_positive_labels_may_weigh_more() -> None:
    logits, target = torch.randn(6, 2), torch.randint(0, 2, (6, 2)).float()
    for weight in (3.0, [3.0, 1.0]):
        expected = F.binary_cross_entropy_with_logits(logits, target, pos_weight=torch.tensor(weight))
        assert float(loss("bce", pos_weight=weight)(logits, target)) == pytest.approx(float(expected))
    with pytest.raises(JobError):
        loss("bce", pos_weight=[1.0, 2.0, 3.0])(logits, target)


def test_losses_of_torch_refuse_to_broadcast() -> None:
    output, target = torch.randn(6, 1), torch.randn(6)
    assert float(loss("HuberLoss")(output, target)) == pytest.approx(float(F.huber_loss(output[:, 0], target)))
    with pytest.raises(DataError):
        loss("HuberLoss")(torch.randn(6, 3), target)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("TripletMarginLoss", {}),
        ("GaussianNLLLoss", {}),
        ("MSELoss", {"reduction": "none"}),
        ("AdaptiveLogSoftmaxWithLoss", {"in_features": 4, "n_classes": 8, "cutoffs": [2]}),
        ("SmoothL1", {}),
    ],
)
def test_losses_of_torch_that_are_no_mean_over_samples_are_refused(name: str, args: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        loss(name, **args)


@pytest.mark.parametrize(
    ("name", "args", "by_torch"),
    [
        ("cross_entropy", {"weight": [0.1, 1.3]}, nn.CrossEntropyLoss(torch.tensor([0.1, 1.3]))),
        ("CrossEntropyLoss", {"weight": [0.1, 1.3]}, nn.CrossEntropyLoss(torch.tensor([0.1, 1.3]))),
        ("bce", {"pos_weight": 1.3}, nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1.3))),
    ],
)
def test_class_weights_are_not_rounded_to_the_half_precision_of_the_outputs(
    name: str, args: dict[str, Any], by_torch: nn.Module
) -> None:
    output = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.tensor([0, 1, 1, 0, 1, 0])
    if name == "bce":
        output, target = output[:, 0], target.float()
    assert loss(name, **args)(output, target).item() == by_torch(output.float(), target).item()
