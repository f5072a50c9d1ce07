"""Slurm's list of nodes has the names that were written into it."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.launch_engines import expand
from paceline.errors import LaunchError
from refusals import raises

words = st.text("abz-_.09", min_size=1, max_size=4)
numbers = st.integers(0, 120)


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Text of a bracket, and the numbers that it stands for."""
    texts, found = [], []
    for first, more in draw(st.lists(st.tuples(numbers, st.integers(0, 9)), min_size=1, max_size=3)):
        width = draw(st.integers(len(str(first)), 4))
        texts.append(f"{first:0{width}}" + (f"-{first + more:0{width}}" if more else ""))
        found += [f"{number:0{width}}" for number in range(first, first + more + 1)]
    return f"[{','.join(texts)}]", found


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Text of an entry, and the names that it stands for."""
    parts = draw(st.lists(st.one_of(words.map(lambda word: (word, [word])), brackets()), min_size=1, max_size=3))
    return "".join(text for text, _ in parts), ["".join(name) for name in itertools.product(*(all for _, all in parts))]


@given(st.lists(entries(), min_size=1, max_size=4))
def test_a_list_stands_for_the_names_in_it(parts: list[tuple[str, list[str]]]) -> None:
    assert expand(",".join(text for text, _ in parts)) == [name for _, names in parts for name in names]


def test_a_list_as_slurm_writes_it_keeps_zeros_and_order() -> None:
    assert expand("n[01-03,7],m1,r[0-1]n[2-3]") == ["n01", "n02", "n03", "n7", "m1", "r0n2", "r0n3", "r1n2", "r1n3"]


@pytest.mark.parametrize("text", ["", "n[", "n]", "n[]", "n[2-1]", "n[a]", "n[1-2-3]", "n[1", "a,,b", ",", "a,", "a b"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with raises(LaunchError, "launcher.node_list_invalid"):
        expand(text)


@pytest.mark.parametrize(
    "text", ["n[0-999999999]", "n[0-999][0-999]", "n" + "[0-9]" * 5000], ids=("range", "two", "many")
)
def test_a_short_text_for_many_nodes_takes_no_memory(text: str) -> None:
    with pytest.raises(LaunchError, match="nodes"):
        expand(text)


@given(st.text("n[]-,019 ", max_size=12))
def test_any_text_is_a_list_or_is_refused(text: str) -> None:
    with suppress(LaunchError):
        assert all(expand(text))
