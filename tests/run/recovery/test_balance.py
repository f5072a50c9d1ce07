"""The decision on shares: it finds the speeds, heeds the limits, and is not led by noise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.job.partition import Shares, even_shares
from paceline.run.recovery.balance import BLOCK, BLOCKS, MOST, WARM_UP, Balance, Move, fastest

Speeds = Callable[[int], Sequence[float]]


def simulated(
    speeds: Speeds,
    steps: int,
    batch: int,
    *,
    ranks: int = 1,
    fixed: float = 0.0,
    noise: float = 0.0,
    least: int = 1,
    ahead: int = 0,
    sample_s: float = 0.02,
    seed: int = 0,
) -> tuple[dict[int, Move], list[Shares]]:
    """Changes by the step of their decision, and the shares of every step, where speeds are those of a formula."""
    rnd, replicas = random.Random(seed), len(speeds(1))
    base = even_shares(batch, replicas * ranks)
    balance, moves, shares, coming = Balance(base, replicas, least), {}, [], {1: base}
    for step in range(1, steps + 1):
        shares.append(coming[max(at for at in coming if at <= step)])
        samples = [max(shares[-1][i : i + ranks]) for i in range(0, len(base), ranks)]
        busy_s = [
            sample_s * (fixed + n) / speed * max(0.2, rnd.gauss(1, noise))
            for n, speed in zip(samples, speeds(step), strict=True)
        ]
        if max(coming) > step:
            continue
        if move := balance.step(step, shares[-1], busy_s):
            moves[step] = move
            coming[step + 1 + ahead] = move.shares
    return moves, shares


def slowest_s(shares: Shares, speeds: Sequence[float], ranks: int = 1, fixed: float = 0.0) -> float:
    return max((fixed + n) / speeds[i // ranks] for i, n in enumerate(shares))


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.25, 4), min_size=2, max_size=6),
    st.integers(1, 2),
    st.integers(16, 60),
    st.integers(0, 3),
    st.floats(0, 10),
)
def test_shares_come_to_follow_the_speeds(speeds: list[float], ranks: int, even: int, ahead: int, fixed: float) -> None:
    batch, least = even * len(speeds) * ranks, 1 + even // 8
    _, shares = simulated(lambda step: speeds, 220, batch, ranks=ranks, ahead=ahead, fixed=fixed, least=least)
    for dealt in shares:
        assert sum(dealt) == batch
        assert least <= min(dealt)
        assert max(dealt) <= MOST * even
    costs = [1 / speed for speed in speeds for _ in range(ranks)]
    best = fastest(costs, [(least, MOST * even)] * len(costs), batch, fixed)
    found, least_s = slowest_s(shares[-1], speeds, ranks, fixed), slowest_s(best, speeds, ranks, fixed)
    assert found <= 1.1 * least_s
    assert shares[-1] == shares[-40], "they do not go to and fro"


@settings(max_examples=100)
@given(st.lists(st.floats(0.1, 3), min_size=2, max_size=4), st.integers(4, 14), st.floats(0, 5))
def test_no_other_shares_have_a_faster_slowest_rank(costs: list[float], batch: int, fixed: float) -> None:
    bounds = [(1, batch)] * len(costs)
    found = fastest(costs, bounds, batch, fixed)
    assert sum(found) == batch

    def time(shares: Sequence[int]) -> float:
        return max(cost * (fixed + n) for cost, n in zip(costs, shares, strict=True))

    every = (s for s in product(range(1, batch + 1), repeat=len(costs)) if sum(s) == batch)
    assert time(found) == pytest.approx(min(map(time, every)))


@pytest.mark.parametrize("replicas", [2, 4, 16])
@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_equal_replicas_keep_equal_shares_however_their_times_scatter(replicas: int, noise: float) -> None:
    for seed in range(3):
        moves, _ = simulated(lambda step: [1.0] * replicas, 300, 16 * replicas, noise=noise, seed=seed)
        assert not moves


def test_a_pause_now_and_then_on_one_rank_or_another_moves_nothing() -> None:
    moves, _ = simulated(lambda step: [0.05 if step % 4 == 0 and r == step % 3 else 1.0 for r in range(3)], 300, 48)
    assert not moves
    moves, _ = simulated(lambda step: [0.01 if step <= WARM_UP else 1.0, 1.0], 100, 32)
    assert not moves
    # a difference of a tenth of a millisecond is nothing to gain
    moves, _ = simulated(lambda step: [1.0, 0.5], 3000, 32, sample_s=1e-5)
    assert not moves


def test_few_steps_name_a_slow_replica_and_few_make_the_shares_even_again() -> None:
    moves, shares = simulated(lambda step: (1, 1, 1, 0.5 if 100 < step <= 200 else 1), 300, 64, fixed=6)
    first, *_, last = moves
    assert 100 < first <= 100 + BLOCK * (BLOCKS + 1)
    assert list(moves[first].slow) == [3]
    assert abs(moves[first].slow[3] - 101) < BLOCK
    assert moves[first].speeds == pytest.approx((1, 1, 1, 0.5), rel=0.01)
    ideal_s = (64 + 4 * 6) / 3.5
    assert slowest_s(shares[198], (1, 1, 1, 0.5), fixed=6) == pytest.approx(ideal_s, rel=0.05)
    assert 200 < last <= 220
    assert moves[last].slow == {}
    assert shares[-1] == (16, 16, 16, 16)


@settings(max_examples=60)
@given(
    st.integers(2, 5),
    st.floats(0.3, 0.8),
    st.floats(0, 0.3),
    st.floats(0, 0.025),
    st.integers(WARM_UP + 1, 60),
    st.integers(60, 90),
    st.integers(0, 10**6),
)
def test_within_twenty_steps_shares_follow_a_replica_that_becomes_slow_and_one_that_recovers(
    replicas: int, speed: float, fixed_part: float, noise: float, slow_at: int, lasts: int, seed: int
) -> None:
    even, slow = 48, (*[1.0] * (replicas - 1), speed)
    over, fixed = slow_at + lasts, fixed_part * even
    _, shares = simulated(
        lambda step: slow if slow_at <= step < over else [1.0] * replicas,
        over + 60,
        even * replicas,
        fixed=fixed,
        noise=noise,
        seed=seed,
    )
    assert all(dealt == (even,) * replicas for dealt in shares[: slow_at - 1]), "equal replicas are left alone"
    best = fastest([1 / one for one in slow], [(1, MOST * even)] * replicas, even * replicas, fixed)
    least_s = slowest_s(best, slow, fixed=fixed)
    taken_s = [slowest_s(dealt, slow, fixed=fixed) / least_s for dealt in shares]
    assert taken_s[slow_at + 20] <= 1.5, "before the fixed cost is known"
    assert taken_s[slow_at + 44] <= 1.12 + 2 * noise, "after a correction"
    assert all(dealt == (even,) * replicas for dealt in shares[over + 20 :]), "even within 20 steps, and for good"


def test_only_the_difference_between_replicas_counts_and_not_that_between_their_own_ranks() -> None:
    moves, shares = simulated(lambda step: (1, 0.5), 60, 60, ranks=2)
    assert moves
    assert shares[-1] == (20, 20, 10, 10)


def test_what_was_measured_before_a_pause_is_not_compared_with_what_comes_after() -> None:
    balance = Balance((8, 8), 2)
    for step in range(1, WARM_UP + BLOCK * BLOCKS):
        assert balance.step(step, (8, 8), (0.1, 0.2)) is None
    balance.forget()
    for step in range(1, WARM_UP + BLOCK * BLOCKS):
        assert balance.step(step, (8, 8), (0.1, 0.2)) is None
    assert balance.step(100, (8, 8), (0.1, 0.2)) is not None


def test_times_of_nothing_stop_no_run() -> None:
    balance = Balance((8, 8), 2)
    for step in range(1, 500):
        assert balance.step(step, (8, 8), (0.0, 0.0) if step % 3 else (5.0, 5.0)) is None


def test_what_the_first_steps_misjudged_in_noise_is_mended_by_more_of_them() -> None:
    speeds, found = (1.0, 1.0, 1.0, 0.5), []
    for seed in range(10):
        moves, shares = simulated(lambda step: speeds, 400, 2048, noise=0.1, sample_s=0.001, ahead=1, seed=seed)
        found.append(slowest_s(shares[-1], speeds) / (2048 / sum(speeds)))
        assert len(moves) < 5, "they do not go to and fro"
    assert statistics.fmean(found) < 1.025
