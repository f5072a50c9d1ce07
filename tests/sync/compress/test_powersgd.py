"""Factored sums: exact where the rank suffices, and the same bits on machines that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.backend import joined
from paceline.sync.compress import Compressor, powersgd
from paceline.sync.compress.powersgd import factors
from paceline.sync.rule import Traffic
from ranks import Ranks


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((256, 128), 4, (256, 128, 4)),
        ((64, 32, 3, 3), 4, (64, 288, 4)),  # a convolution's kernel: (dim 0, the rest)
        ((256,), 4, None),
        ((0, 4), 4, None),
        ((16, 16), 4, (16, 16, 4)),  # half of the numbers
        ((16, 15), 4, None),  # more than half
        ((1000, 2), 4, None),
    ],
)
def test_what_is_factored_at_least_halves(
    shape: tuple[int, ...], rank: int, expected: tuple[int, int, int] | None
) -> None:
    assert factors(shape, rank) == expected


def of_low_rank(differ: bool) -> dict[str, Any]:
    """Sums of rank-3 matrices by factors of rank 4, beside the exact ones."""
    if differ:
        setattr(powersgd, "same_machines", lambda group: False)  # noqa: B010 - a name that the module only imports
    with joined(deadline_s=30) as group:
        flat = torch.zeros(2 * 60 * 50 + 30)
        views = [flat[:3000].view(60, 50), flat[3000:3030], flat[3030:].view(60, 50)]
        random = torch.Generator().manual_seed(1)
        left, right = torch.randn(2, 60, 3, generator=random), torch.randn(2, 3, 50, generator=random)
        compressor = Compressor("powersgd:4", group, Traffic())
        results = []
        for _ in range(3):
            for view, matrix in zip((views[0], views[2]), left @ right, strict=True):
                view.copy_(matrix * (group.rank + 1))
            views[1].fill_(group.rank)
            compressor.sum("a", flat, views)
            results.append(flat.clone())
        exact = torch.cat([(left @ right)[0].flatten(), torch.full((30,), 1 / 3), (left @ right)[1].flatten()]) * 3
        return {"results": results, "exact": exact}


@pytest.mark.parametrize("differ", [False, True])
def test_a_sum_of_no_more_than_the_rank_is_exact_and_the_same_on_every_rank(ranks: Ranks, differ: bool) -> None:
    """On machines that differ, one rank decides on what the others cannot be trusted to compute alike."""
    first, second = ranks(2, of_low_rank, differ)
    for mine, theirs in zip(first["results"], second["results"], strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, first["exact"], rtol=1e-4, atol=1e-4)


def after_nothing() -> list[float]:
    """The norms of what comes out of a matrix after one that was zero."""
    with joined(deadline_s=30) as group:
        flat = torch.zeros(64 * 64)
        compressor, norms = Compressor("powersgd:4", group, Traffic()), []
        for size in (0.0, 1.0, 1.0):
            flat.fill_(size)
            compressor.sum("a", flat, [flat.view(64, 64)])
            norms.append(float(torch.linalg.vector_norm(flat)))
        return norms


def test_a_gradient_of_zeros_does_not_silence_the_next_ones(ranks: Ranks) -> None:
    """The next power iteration starts from its Q, which is zero."""
    assert ranks(2, after_nothing)[0] == pytest.approx([0.0, 128.0, 128.0], rel=1e-3)


def given_and_applied(codec: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's inputs to a few sums, the results, and its kept error."""
    with joined(deadline_s=30) as group:
        random = torch.Generator().manual_seed(group.rank)
        compressor = Compressor(codec, group, Traffic(), seed=3)
        given, applied = torch.zeros(64 * 48), torch.zeros(64 * 48)
        for _ in range(4):
            flat = torch.randn(64 * 48, generator=random)
            given += flat
            compressor.sum("a", flat, [flat.view(64, 48)])
            applied += flat
        return given, applied, compressor.state_dict()["a/error"]


@pytest.mark.parametrize("codec", ["powersgd:4", "powersgd:4+bf16", "powersgd:4+int8"])
def test_what_was_applied_and_what_is_remembered_make_up_what_was_given(ranks: Ranks, codec: str) -> None:
    """Also what coding the sum of the factors lost, which no rank's own factors show."""
    found = ranks(3, given_and_applied, codec)
    given, remembered = sum(rank[0] for rank in found), sum(rank[2] for rank in found)
    torch.testing.assert_close(found[0][1] + remembered, given, rtol=0, atol=2e-3)
