"""The loss over divided classes is that of all classes.

Values and gradients, smoothing, weights and ignored labels included.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.comm import Group
from paceline.errors import DataError
from paceline.job.zoo.losses import CrossEntropy
from paceline.split.cross_entropy import ParallelLoss, parallel_cross_entropy
from ranks import Backend, Ranks

CLASSES = 12


def world() -> Group:
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits (3, 5, classes), some of them large, and labels of which some are ignored."""
    torch.manual_seed(2)
    logits = torch.randn(3, 5, CLASSES, dtype=torch.float64)
    logits[0] *= 300  # their exponentials overflow
    target = torch.randint(0, CLASSES, (3, 5))
    target[1, 2:] = -100
    return logits.to(dtype), target


def own(logits: Tensor, group: Group) -> Tensor:
    return logits.chunk(group.size, -1)[group.rank].clone().requires_grad_()


def divided(dtype: torch.dtype, options: dict[str, Any], *, all_ignored: bool = False) -> tuple[Tensor, Tensor]:
    logits, target = rows(dtype)
    part = own(logits, world())
    loss = parallel_cross_entropy(part, target.fill_(-100) if all_ignored else target, world(), **options)
    loss.backward(torch.tensor(3.0, dtype=dtype))
    assert part.grad is not None
    return loss.detach(), part.grad


WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
OPTIONS: list[dict[str, Any]] = [
    {"label_smoothing": smoothing, "weight": weight} for smoothing in (0.0, 0.1) for weight in (None, WEIGHT)
]


def divided_with_all_options() -> list[tuple[Tensor, Tensor]]:
    return [divided(torch.float64, options) for options in OPTIONS]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_divided_loss_is_the_loss_of_all_classes(ranks: Ranks, backend: Backend) -> None:
    results = ranks(3, divided_with_all_options, backend=backend)
    for options, of_ranks in zip(OPTIONS, zip(*results, strict=True), strict=True):
        logits, target = rows()
        logits.requires_grad_()
        expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)
        expected.backward(torch.tensor(3.0, dtype=torch.float64))
        for loss, _ in of_ranks:
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(torch.cat([grad for _, grad in of_ranks], -1), logits.grad, rtol=1e-12, atol=1e-15)


def test_logits_of_16_bits_are_computed_with_in_32(ranks: Ranks) -> None:
    logits, target = rows(torch.bfloat16)
    precise = logits.double().requires_grad_()
    expected = F.cross_entropy(precise.flatten(0, 1), target.flatten())
    expected.backward(torch.tensor(3.0, dtype=torch.float64))
    assert precise.grad is not None
    results = ranks(2, divided, torch.bfloat16, {})
    assert {(loss.dtype, grad.dtype) for loss, grad in results} == {(torch.float32, torch.bfloat16)}
    torch.testing.assert_close(results[0][0].double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.cat([grad for _, grad in results], -1), precise.grad.to(torch.bfloat16), rtol=1e-2, atol=1e-6
    )


def test_a_batch_of_ignored_labels_costs_nothing(ranks: Ranks) -> None:
    for loss, grad in ranks(2, ignoring):
        assert float(loss) == 0.0
        assert not grad.any()


def ignoring() -> tuple[Tensor, Tensor]:
    return divided(torch.float64, {"label_smoothing": 0.1}, all_ignored=True)


def in_place_of_the_jobs_loss() -> tuple[float, int, str, str]:
    group = world()
    logits, target = rows()
    loss = ParallelLoss(CrossEntropy(label_smoothing=0.2, weight=[1.0 + c for c in range(CLASSES)]), group)
    value = float(loss(SimpleNamespace(logits=own(logits, group)), target))
    loss.check(own(logits, group), target, "in batch 1")  # labels of all ranks' classes are in range
    errors = []
    for bad in (target.clone().fill_(CLASSES), target[:, :2]):
        with pytest.raises(DataError) as error:
            loss(own(logits, group), bad)
        errors.append(str(error.value))
    with pytest.raises(DataError, match=r"expected labels in 0\.\.11, found 12 in batch 7"):
        loss.check(own(logits, group), target.clone().fill_(CLASSES), "in batch 7")
    return value, int(loss.items(target)), errors[0], errors[1]


def test_it_stands_in_for_the_loss_of_the_job(ranks: Ranks) -> None:
    logits, target = rows()
    whole = CrossEntropy(label_smoothing=0.2, weight=[1.0 + c for c in range(CLASSES)])
    expected = float(whole(logits, target))
    for value, items, out_of_range, wrong_shape in ranks(2, in_place_of_the_jobs_loss):
        assert value == pytest.approx(expected, rel=1e-12)
        assert items == int(whole.items(target))
        assert "expected labels in 0..11, found 12" in out_of_range
        assert "one label per token" in wrong_shape
