"""Codecs keep what they promise: size, round trip, and error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sync.compress.codecs import Cast, Codec, Quantise, Sign, TopK
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


LEVEL = {8: 1.01 / 127, 4: 1.01 / 7}  # of the largest number in a block, with the rounding of its scale


def quantiser(bits: int, seed: int = 3) -> Quantise:
    return Quantise(bits, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=40)
@given(k=st.integers(1, 3), blocks=st.integers(1, 5), exponent=st.integers(-28, 37), seed=st.integers(0, 1000))
def test_every_number_stays_within_a_level_of_itself(bits: int, k: int, blocks: int, exponent: int, seed: int) -> None:
    rows = torch.randn(k, blocks * 128, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3) * 10.0**exponent
    error = (coded_and_back(quantiser(bits), rows) - rows).abs().view(k, blocks, 128)
    assert (error <= LEVEL[bits] * rows.abs().view(k, blocks, 128).amax(dim=2, keepdim=True)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_right_on_average(bits: int) -> None:
    """Rounding to nearest would be off by up to half a level, again and again in the same direction."""
    rows = torch.linspace(-1, 1, 1024).view(1, -1)
    codec, draws = quantiser(bits), 1000
    mean = sum((coded_and_back(codec, rows) for _ in range(draws)), torch.zeros(1, 1024)) / draws
    level = rows.abs().view(8, 128).amax(dim=1).repeat_interleave(128) * LEVEL[bits]
    # the standard deviation of one rounding is at most half a level
    deviations = ((mean - rows)[0] / level).abs() * draws**0.5 / 0.5
    assert deviations.max() < 4.5
    assert deviations.square().mean() < 1.5


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_number_of_a_block_fits_in_whatever_its_scale_is_rounded_to(bits: int) -> None:
    rows = (torch.rand(64, 128, generator=torch.Generator().manual_seed(4)) + 1e-3) * torch.linspace(1, 2, 64).view(
        -1, 1
    )
    rows[:, 5] = -rows.amax(dim=1) - 0.01
    back = coded_and_back(quantiser(bits), rows)
    assert (back[:, 5] < 0).all(), "a level beyond the last one would come back with the other sign"


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_numbers_too_small_for_a_scale_do_not_blow_up(bits: int) -> None:
    rows = torch.cat([torch.zeros(1, 128), torch.full((1, 128), 1e-44)], dim=1)
    back = coded_and_back(quantiser(bits), rows)
    assert (back[:, :128] == 0).all()
    assert (back.abs() < 1e-29).all()


def test_the_same_state_of_the_generator_gives_the_same_codes() -> None:
    rows = torch.randn(1, 256)
    assert torch.equal(coded_and_back(quantiser(4), rows), coded_and_back(quantiser(4), rows))
    assert not torch.equal(coded_and_back(quantiser(4), rows), coded_and_back(quantiser(4, seed=8), rows))


def test_a_block_takes_its_bits_and_two_bytes() -> None:
    assert quantiser(8).nbytes(4096) == 4096 + 32 * 2
    assert quantiser(4).nbytes(4096) == 2048 + 32 * 2


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
