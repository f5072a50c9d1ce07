"""One partition for what is predicted and what runs: no other cut has a faster slowest part."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.partition import contiguous, starts

_COSTS = st.lists(st.one_of(st.integers(0, 5), st.floats(0.01, 10)), min_size=1, max_size=8)


def times(cut: tuple[int, ...], costs: list[float], speeds: list[float] | None) -> list[float]:
    parts = pairwise((0, *starts(cut), len(costs)))
    return [sum(costs[a:b]) / speed for (a, b), speed in zip(parts, speeds or [1.0] * len(cut), strict=True)]


def every_cut(count: int, parts: int) -> list[tuple[int, ...]]:
    return [tuple(b - a for a, b in pairwise((0, *inner, count))) for inner in combinations(range(1, count), parts - 1)]


@settings(max_examples=150)
@given(_COSTS, st.data(), st.booleans())
def test_no_other_cut_has_a_faster_slowest_part_or_is_as_fast_and_more_even(
    costs: list[float], data: st.DataObject, uneven: bool
) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    speeds = (
        data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.3]), min_size=parts, max_size=parts)) if uneven else None
    )
    cut = contiguous(costs, parts, speeds)
    assert (len(cut), sum(cut), min(cut) >= 1) == (parts, len(costs), True)
    found, others = times(cut, costs, speeds), [times(other, costs, speeds) for other in every_cut(len(costs), parts)]
    best = min(map(max, others))
    assert max(found) == pytest.approx(best, rel=1e-6, abs=1e-9)
    evenest = min(sum(t * t for t in other) for other in others if max(other) <= best * (1 + 1e-12))
    assert sum(t * t for t in found) <= evenest * (1 + 1e-6) + 1e-9


@given(
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 1.7]), min_size=2, max_size=12), st.integers(1, 5), st.floats(1e-6, 1e6)
)
def test_the_unit_of_the_costs_changes_no_cut(costs: list[float], parts: int, unit: float) -> None:
    parts = min(parts, len(costs))
    assert contiguous([unit * cost for cost in costs], parts) == contiguous(costs, parts)


def test_costs_count_not_numbers() -> None:
    assert contiguous([1, 1, 1, 1, 1, 5], 2) == (5, 1)
    assert contiguous([1] * 5, 3) == (1, 2, 2)
    assert contiguous([0, 0, 0], 2) == (1, 2)
    assert starts((1, 2, 2)) == [1, 3]


def test_a_model_of_many_blocks_and_stages_keeps_every_stage_as_fast_as_the_slowest_block_allows() -> None:
    costs = [0.3, *[1.0] * 128, 0.8]
    assert max(times(contiguous(costs, 64), costs, None)) == pytest.approx(2.8)


def test_more_parts_than_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="2 elements cannot be cut into 3 parts"):
        contiguous([1, 1], 3)
