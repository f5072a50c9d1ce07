"""Codes of 8 and 4 bits: within one level of the number, right on average, whatever the size of the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sync.compress.codecs import Quantise
from sync.compress.coding import coded_and_back

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
