"""The combinations of a sweep are the ones that its grid and ranges say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.run.sweep.space import Range, combinations, short_names, values_of
from refusals import raises


def test_values_are_yaml() -> None:
    texts = [
        "optimizer.lr=1e-4,3e-4",
        "metrics=[accuracy, f1], [accuracy]",
        "optimizer={name: sgd, lr: 1},adamw",
        "seed=7",
    ]
    assert values_of(texts) == {
        "optimizer.lr": (1e-4, 3e-4),
        "metrics": (["accuracy", "f1"], ["accuracy"]),
        "optimizer": ({"name": "sgd", "lr": 1}, "adamw"),
        "seed": (7,),
    }
    assert values_of(["a=loguniform(1e-5, 1e-2)"]) == {"a": Range("loguniform", 1e-5, 1e-2)}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("optimizer.lr", "sweep.not_key_values"),
        ("optimizer.lr=", "sweep.not_key_values"),
        ("=1,2", "sweep.not_key_values"),
        ("a=[1,2", "sweep.not_yaml"),
        ("a=1], [2", "sweep.not_yaml"),
        ("a=normal(0,1)", "sweep.unknown_range"),
        ("a=uniform(1)", "sweep.range_ends"),
        ("a=uniform(2,1)", "sweep.range_order"),
        ("a=uniform(0,inf)", "sweep.range_order"),
        ("a=loguniform(0,1)", "sweep.range_not_positive"),
        ("a=int(1.5,3)", "sweep.range_not_whole"),
    ],
)
def test_what_are_no_values_is_refused(text: str, code: str) -> None:
    with raises(JobError, code):
        values_of([text])


def test_a_key_comes_once_and_a_sweep_has_one() -> None:
    with raises(JobError, "sweep.key_twice", key="a"):
        values_of(["a=1", "a=2"])
    with raises(JobError, "sweep.no_key"):
        values_of([])


GRIDS = st.dictionaries(
    st.sampled_from(["a", "b.c", "d"]),
    st.lists(st.integers(), min_size=1, max_size=4, unique=True).map(tuple),
    min_size=1,
)


@given(space=GRIDS)
def test_a_grid_is_every_combination_once(space: Mapping[str, tuple[Any, ...]]) -> None:
    found = [tuple(each.values()) for each in combinations(space)]
    assert found == list(itertools.product(*space.values()))


@given(space=GRIDS, low=st.integers(-5, 5), data=st.data(), seed=st.integers(0, 9))
def test_draws_of_finite_values_are_distinct_and_repeatable(
    space: dict[str, Any], low: int, data: st.DataObject, seed: int
) -> None:
    space["whole"] = Range("int", low, low + 2)
    every = [
        dict(zip(space, each, strict=True))
        for each in itertools.product(*list(space.values())[:-1], range(low, low + 3))
    ]
    draws = data.draw(st.integers(1, len(every)))
    found = combinations(space, draws, seed)
    assert len(found) == draws
    assert all(found.count(each) == 1 and each in every for each in found)
    assert found == combinations(space, draws, seed)
    with raises(JobError, "sweep.too_many_draws", size=len(every)):
        combinations(space, len(every) + 1)


@given(low=st.floats(1e-9, 1), factor=st.floats(1.001, 1e6), kind=st.sampled_from(["uniform", "loguniform"]))
def test_draws_lie_within_their_range(low: float, factor: float, kind: Any) -> None:
    for each in combinations({"a": Range(kind, low, low * factor), "b": (1, 2)}, 5):
        assert low <= each["a"] <= low * factor
        assert each["b"] in (1, 2)


def test_a_range_without_so_many_numbers_is_refused() -> None:
    with raises(JobError, "sweep.range_too_narrow", draws=50):
        combinations({"a": Range("uniform", 1.0, 1.0000000000000002)}, 50)


def test_a_range_needs_draws() -> None:
    with raises(JobError, "sweep.range_in_grid", key="a"):
        combinations({"a": Range("uniform", 0, 1)})


def test_short_names_tell_keys_apart() -> None:
    assert short_names(["optimizer.lr", "model.args.hidden"]) == ["lr", "hidden"]
    assert short_names(["optimizer.name", "loss.name"]) == ["optimizer.name", "loss.name"]
    assert short_names(["seed", "model.seed"]) == ["seed", "model.seed"]
