"""Random states are kept exactly, including a normal number that a generator keeps for the next call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from paceline.own_random import SampleRandom, kept_random, restore, states

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, normal": np.random.randn,
    "torch": lambda: torch.rand(1).item(),
    "torch, normal": lambda: torch.randn(1).item(),
}


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_random():
        yield


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("before", [0, 1, 2, 623, 624])
def test_the_numbers_that_follow_are_drawn_again_after_a_restore(draw: Callable[[], object], before: int) -> None:
    for _ in range(before):
        draw()
    found = states()
    drawn = [draw() for _ in range(5)]
    restore(found)
    assert [draw() for _ in range(5)] == drawn


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_within_a_sample_is_seen_and_undone(draw: Callable[[], object]) -> None:
    random.seed(1)
    np.random.seed(1)
    with SampleRandom() as sample:
        assert not sample.drew()
    found = states()
    with SampleRandom() as sample:
        draw()
        assert sample.drew()
    following = [draw() for _ in range(3)]
    restore(found)
    assert [draw() for _ in range(3)] == following


def test_draws_are_seen_while_a_normal_number_of_numpy_waits() -> None:
    np.random.seed(1)
    np.random.randn()
    second = states()
    for _ in range(3):
        with SampleRandom() as sample:
            np.random.randn()
            assert sample.drew()
    following = np.random.randn()
    restore(second)
    assert np.random.randn() == following


def test_a_waiting_normal_number_that_other_code_restores_is_seen() -> None:
    np.random.seed(1)
    np.random.randn()
    waiting = np.random.get_state()
    second = np.random.randn()
    states()
    np.random.set_state(waiting)
    with SampleRandom() as sample:
        assert np.random.randn() == second
        assert sample.drew()
    with SampleRandom():
        np.random.randn()
    assert np.random.randn() == second


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_other_generators_of_numpy_are_kept(kind: type[np.random.BitGenerator]) -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(kind(3))  # type: ignore[attr-defined]
    try:
        found = states()
        with SampleRandom() as sample:
            assert not sample.drew()
            drawn = np.random.rand()
            assert sample.drew()
        assert np.random.rand() == drawn
        restore(found)
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_the_second_of_two_normal_numbers_of_python_is_seen() -> None:
    random.seed(1)
    random.gauss(0, 1)
    with SampleRandom() as sample:
        random.gauss(0, 1)
        assert sample.drew()


def test_a_second_normal_number_of_numpy_is_drawn_again() -> None:
    np.random.seed(1)
    np.random.randn()
    waiting = states()
    second = np.random.randn()
    taken = states()  # the words of the generator have not changed
    third = np.random.randn()
    restore(taken)
    assert np.random.randn() == third
    restore(waiting)
    assert np.random.randn() == second
