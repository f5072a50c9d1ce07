"""Codes of 16 bits: as near as the dtype allows, and never infinite."""

from __future__ import annotations

import pytest
import torch

from paceline.sync.compress.codecs import Cast
from sync.compress.coding import coded_and_back


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest_of_the_dtype(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 130, generator=torch.Generator().manual_seed(1))
    assert torch.equal(coded_and_back(Cast(dtype), rows), rows.to(dtype).float())


def test_fp16_makes_a_number_that_is_too_large_its_largest_one_and_not_infinity() -> None:
    rows = torch.tensor([[1e6, -3e38, 65504.0, 1.0]])
    assert coded_and_back(Cast(torch.float16), rows).tolist() == [[65504.0, -65504.0, 65504.0, 1.0]]


def test_a_number_takes_two_bytes_and_a_row_whole_words() -> None:
    assert Cast(torch.bfloat16).nbytes(1000) == 2000
    assert Cast(torch.float16).nbytes(1) == 8
