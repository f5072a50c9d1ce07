"""Shrinking: the shortest part of a failing list."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline_lab.chaos.schedule import shrink


@given(st.integers(1, 24), st.data())
def test_what_fails_together_is_found_and_no_more(length: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=3))
    shortest = shrink(range(length), lambda part: guilty <= set(part), most_tries=10_000)
    assert shortest == sorted(guilty)


@given(st.integers(1, 24), st.data())
def test_where_any_of_several_fails_one_is_left(length: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, length - 1), min_size=1))
    [left] = shrink(range(length), lambda part: bool(guilty & set(part)), most_tries=10_000)
    assert left in guilty


@given(st.lists(st.integers(), min_size=2, max_size=20), st.integers(0, 8))
def test_no_part_is_played_twice_and_tries_are_limited(items: list[int], most: int) -> None:
    played: list[tuple[int, ...]] = []

    def fails(part: Sequence[int]) -> bool:
        played.append(tuple(part))
        return sum(part) % 2 == sum(items) % 2

    numbered = list(enumerate(items))
    shrink(numbered, lambda part: fails([n for n, _ in part]), most)
    assert len(played) <= most
    assert len(set(played)) == len(played)


def test_what_fails_only_sometimes_ends_with_what_failed_last() -> None:
    assert shrink([1, 2, 3], lambda part: False) == [1, 2, 3]
