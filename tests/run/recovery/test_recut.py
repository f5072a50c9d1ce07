"""The decision on a pipeline's cut: it evens the stages out, is not led by noise, and ends."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.partition import contiguous
from paceline.run.recovery.balance import BLOCK, BLOCKS, WARM_UP
from paceline.run.recovery.recutting import LEAST_GAIN, MOST, Lengths, Pipe, Recut, Stages, proposed, worth

DECIDED = WARM_UP + BLOCK * BLOCKS


def one_each(ranks: int, microbatches: int = 8) -> Pipe:
    return Pipe(ranks, list(range(ranks)), "1f1b", microbatches)


def watched(
    pipe: Pipe, costs: list[float], lengths: Lengths, slowness: list[float], *, noise: float = 0.0, seed: int = 0
) -> Recut | None:
    """The first decision, where the ranks take so many times the cost of their segments."""
    rnd, stages = random.Random(seed), Stages(pipe)
    for step in range(1, DECIDED + 1):
        busy_s = [float(s) * max(0.2, rnd.gauss(1, noise)) for s in pipe.per_rank(costs, lengths) * slowness]
        if stages.step(step, busy_s):
            return stages.better(costs, lengths)
    return None


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.05, 0.5), min_size=4, max_size=14),
    st.lists(st.floats(0.5, 4), min_size=2, max_size=4),
    st.integers(2, 16),
)
def test_no_other_cut_has_a_faster_slowest_rank_and_what_is_gained_is_what_was_promised(
    costs: list[float], slowness: list[float], microbatches: int
) -> None:
    pipe = one_each(len(slowness), microbatches)
    lengths = contiguous(costs, pipe.ranks)
    found = watched(pipe, costs, lengths, slowness)
    if found is None:
        return
    before_s, after_s = (pipe.per_rank(costs, cut) * slowness for cut in (lengths, found.lengths))
    assert pipe.step_s(before_s) - pipe.step_s(after_s) == pytest.approx(found.gain_s)
    assert found.gain >= LEAST_GAIN
    best = min(
        max(pipe.per_rank(costs, tuple(b - a for a, b in pairwise((0, *ends, len(costs))))) * slowness)
        for ends in combinations(range(1, len(costs)), pipe.ranks - 1)
    )
    assert max(after_s) == pytest.approx(best, rel=1e-6)
    assert watched(pipe, costs, found.lengths, slowness) is None, "the new cut stays"


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.05, 0.5), min_size=6, max_size=12),
    st.lists(st.floats(0.1, 20), min_size=3, max_size=3),
)
def test_no_stage_comes_to_hold_more_than_twice_an_even_part(costs: list[float], slowness: list[float]) -> None:
    pipe, lengths = one_each(3), contiguous(costs, 3)
    found = proposed(pipe, costs, lengths, pipe.per_rank(costs, lengths) * np.asarray(slowness))
    most = max(MOST * sum(costs) / 3, *pipe.per_stage(costs, lengths))
    assert max(pipe.per_stage(costs, found)) <= most
    assert sum(found) == len(costs)


def test_a_rank_at_half_speed_is_named_with_its_share_and_since_when() -> None:
    found = watched(one_each(2), [0.1] * 9, (5, 4), [1.0, 2.0])
    assert found is not None
    assert (found.lengths, found.slow, found.since_step) == ((6, 3), 1, WARM_UP + 1)
    assert found.share == pytest.approx(8 / 13)


@pytest.mark.parametrize("seed", range(20))
def test_equal_ranks_keep_their_cut_however_their_times_scatter(seed: int) -> None:
    assert watched(one_each(4), [0.1] * 8, (2, 2, 2, 2), [1.0] * 4, noise=0.1, seed=seed) is None


def test_stages_that_are_uneven_for_a_moment_only_stay() -> None:
    stages = Stages(one_each(2))
    slow = (DECIDED - 2 * BLOCK, DECIDED + BLOCK)
    assert not any(stages.step(s, [1.0, 3.0 if slow[0] < s <= slow[0] + BLOCK else 1.0]) for s in range(1, slow[1]))


def test_a_rank_with_two_stages_is_judged_by_both() -> None:
    pipe = Pipe(2, [0, 1, 1, 0], "zero-bubble", 4)
    found = watched(pipe, [0.1] * 12, (3, 3, 3, 3), [2.0, 1.0])
    assert found is not None
    assert found.slow == 0
    assert sum(found.lengths) == 12
    assert found.lengths[0] + found.lengths[3] == 4


def test_what_is_unlikely_to_pay_in_the_steps_that_are_left_is_left_alone() -> None:
    assert worth(0.1, step=20, total_steps=1000, cost_s=30, recuts=0)
    assert not worth(0.1, step=900, total_steps=1000, cost_s=30, recuts=0)
    assert not worth(0.1, step=20, total_steps=1000, cost_s=30, recuts=2)  # has to be worth four times as much
    assert worth(0.1, step=400, total_steps=None, cost_s=30, recuts=0)
    assert not worth(0.1, step=20, total_steps=None, cost_s=30, recuts=0)
