"""Ranks that hold different things are told so, by name, before they exchange them.

Else they hang, or train on a mixture.
"""

from __future__ import annotations

import pytest

from paceline.comm.backend import joined
from paceline.comm.checks import check_equal
from ranks import RankError, Ranks


def bring(lines: list[list[str]]) -> int:
    with joined(deadline_s=30) as group:
        before = group.bytes_reduced
        check_equal(group, lines[group.rank])
        return group.bytes_reduced - before


def test_ranks_that_hold_the_same_go_on_after_a_few_bytes(ranks: Ranks) -> None:
    assert ranks(3, bring, [["weight (4, 3) float32", "bias (4,) float32"]] * 3) == [16] * 3


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ["weight (4, 2) float32", "bias (4,) float32"],
            r"entry 1 is weight \(4, 3\) float32 on rank 0, but weight \(4, 2\) float32 on rank 1",
        ),
        (
            ["weight (4, 3) float32", "bias (4,) bfloat16"],
            r"entry 2 is bias \(4,\) float32 on rank 0, but bias \(4,\) bfloat16 on rank 1",
        ),
        (["weight (4, 3) float32"], r"entry 2 is bias \(4,\) float32 on rank 0, but nothing more on rank 1"),
    ],
)
def test_the_first_thing_that_differs_is_named_with_what_both_ranks_have(
    ranks: Ranks, other: list[str], message: str
) -> None:
    with pytest.raises(RankError, match=message):
        ranks(2, bring, [["weight (4, 3) float32", "bias (4,) float32"], other])
