"""Codes of one bit: the sign of every number, and the mean size of its block."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sync.compress.codecs import Sign
from sync.compress.coding import coded_and_back


@settings(max_examples=30)
@given(k=st.integers(1, 3), blocks=st.integers(1, 5), seed=st.integers(0, 1000))
def test_a_number_becomes_its_sign_times_the_mean_size_of_its_block(k: int, blocks: int, seed: int) -> None:
    rows = torch.randn(k, blocks * 256, generator=torch.Generator().manual_seed(seed))
    means = rows.abs().view(k, blocks, 256).mean(dim=2, keepdim=True).bfloat16().float()
    assert torch.equal(coded_and_back(Sign(), rows), (torch.sign(rows).view(k, blocks, 256) * means).view(k, -1))


def test_zeros_stay_zeros() -> None:
    assert (coded_and_back(Sign(), torch.zeros(2, 256)) == 0).all()


def test_eight_numbers_take_a_byte() -> None:
    assert Sign().nbytes(8192) == 8192 // 8 + 32 * 2
