"""What a step costs apart from samples is learned in spite of noise and of replicas that change their speed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.run.recovery.balance import BELIEVED, FixedCost, Times

EVEN = 32
HALF = ((32, 32, 32, 32), (36, 37, 37, 18))  # shares before and after one of them was found to be slow


def measured(samples: Sequence[int], speeds: Sequence[float], fixed: float, error: float, seed: int) -> Times:
    rnd = random.Random(seed)
    busy_s = [(fixed + n) / speed * rnd.gauss(1, error) for n, speed in zip(samples, speeds, strict=True)]
    return Times(np.asarray(samples, np.float64), np.asarray(busy_s), np.full(len(samples), error))


@settings(max_examples=60)
@given(st.floats(0, EVEN / 2), st.lists(st.floats(0.3, 2), min_size=4, max_size=4), st.integers(0, 10**6))
def test_one_large_change_tells_the_fixed_cost(fixed: float, speeds: list[float], seed: int) -> None:
    found = FixedCost(EVEN)
    found.learn(*(measured(samples, speeds, fixed, 0.003, seed + i) for i, samples in enumerate(HALF)))
    assert abs(found.best - fixed) <= 0.1 * EVEN
    assert found.low - 0.05 * EVEN <= fixed <= found.high + 0.05 * EVEN


@settings(max_examples=60)
@given(st.floats(0, EVEN / 2), st.integers(0, 10**6))
def test_small_changes_that_drown_in_noise_do_not_undo_what_a_large_one_told(fixed: float, seed: int) -> None:
    found, speeds = FixedCost(EVEN), (1, 1, 1, 0.5)
    found.learn(*(measured(samples, speeds, fixed, 0.005, seed + i) for i, samples in enumerate(HALF)))
    told = found.best
    for i in range(4):
        pair = (36, 37, 37, 18), (36, 36, 37, 19)
        found.learn(*(measured(samples, speeds, fixed, 0.03, seed + 2 + 2 * i + j) for j, samples in enumerate(pair)))
    assert abs(found.best - told) <= 0.1 * EVEN


@settings(max_examples=60)
@given(st.floats(0, EVEN / 2), st.floats(0.2, 0.7), st.integers(0, 2), st.integers(0, 10**6))
def test_a_replica_that_becomes_slow_during_a_change_misleads_nobody(
    fixed: float, speed: float, other: int, seed: int
) -> None:
    found, after = FixedCost(EVEN), [1, 1, 1, 0.5]
    after[other] = speed
    before = measured(HALF[0], (1, 1, 1, 0.5), fixed, 0.003, seed)
    found.learn(before, measured(HALF[1], after, fixed, 0.003, seed + 1))
    assert abs(found.best - fixed) <= 0.1 * EVEN


def test_without_evidence_there_is_none_and_small_ones_are_possible() -> None:
    found = FixedCost(EVEN)
    assert found.best == found.low == 0
    assert found.high >= BELIEVED * EVEN
    found.learn(*(measured(HALF[0], (1, 1, 1, 1), 5, 0.01, i) for i in range(2)))  # shares stayed as they were
    assert found.best == 0
