"""Codes of the largest numbers only: those of each block, at their places, coded as the second codec does."""

from __future__ import annotations

import pytest
import torch

from paceline.sync.compress.codecs import Cast, Codec, Quantise, TopK
from sync.compress.coding import coded_and_back

FP32 = Cast(torch.float32)


@pytest.mark.parametrize("share", [0.0001, 0.002, 0.01, 0.05, 0.3, 1.0])
def test_exactly_the_largest_numbers_of_each_block_are_kept(share: float) -> None:
    rows = torch.randn(2, 3 * 4096, generator=torch.Generator().manual_seed(1))
    kept = max(1, round(share * 4096))
    back = coded_and_back(TopK(share, FP32), rows)
    blocks, back = rows.view(6, 4096), back.view(6, 4096)
    least = blocks.abs().topk(kept, dim=1).values[:, -1:]
    assert torch.equal(back, blocks * (blocks.abs() >= least))


def test_numbers_of_equal_size_are_kept_as_often_as_there_is_room() -> None:
    back = coded_and_back(TopK(0.01, FP32), torch.full((1, 4096), -2.0))
    assert int((back == -2.0).sum()) == round(0.01 * 4096)
    assert (coded_and_back(TopK(0.01, FP32), torch.zeros(1, 4096)) == 0).all()


@pytest.mark.parametrize(
    "numbers", [Cast(torch.bfloat16), Quantise(8, torch.Generator()), Quantise(4, torch.Generator())]
)
def test_what_is_kept_is_coded_by_the_second_codec(numbers: Codec) -> None:
    rows = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1))
    exact, coded = coded_and_back(TopK(0.01, FP32), rows), coded_and_back(TopK(0.01, numbers), rows)
    kept = exact != 0
    assert (coded[~kept] == 0).all()
    assert not torch.equal(coded, exact)
    torch.testing.assert_close(coded[kept], exact[kept], rtol=0, atol=0.15 * float(exact.abs().max()))


def test_a_kept_number_takes_its_own_bytes_and_two_for_its_place() -> None:
    assert TopK(0.25, FP32).nbytes(4096) == 1024 * (4 + 2)
    assert TopK(0.25, Cast(torch.bfloat16)).nbytes(4096) == 1024 * (2 + 2)
