"""Plans within the prediction error are equal, and the simplest one is preferred."""

from __future__ import annotations

from handmade_search import candidate
from paceline.planning.plan import Plan
from paceline.planning.search.result import equals, moving_parts, preferred


def test_plans_within_the_error_of_predictions_are_equal() -> None:
    fastest, near, far = (
        candidate("dp=8", compute=1.0),
        candidate("fsdp=8", compute=1.045),
        candidate("tp=8", compute=1.07),
    )
    assert equals([fastest, near, far]) == [fastest, near]


def test_of_equal_plans_the_one_with_the_fewest_ranks_is_preferred_to_one_with_more_free_memory() -> None:
    alone, four = candidate("dp=1", memory=2e9, compute=1.0), candidate("dp=4", memory=1e9, compute=0.99)
    assert preferred([four, alone]) is alone


def test_of_equal_plans_the_one_with_the_fewest_moving_parts_then_the_most_free_memory_is_preferred() -> None:
    many = candidate("dp=2 tp=2 pp=2 microbatches=2 remat=block", memory=10e9, compute=1.0)
    full, free = candidate("fsdp=8", memory=70e9, compute=1.01), candidate("dp=4 fsdp=2", memory=30e9, compute=1.02)
    slow = candidate("dp=8", memory=1e9, compute=1.5)
    assert preferred([many, full, free, slow]) is free
    assert [
        moving_parts(Plan.parse(text)) for text in ("dp=8", "fsdp=8", "dp=2 tp=2 pp=2 microbatches=2 remat=block")
    ] == [0, 1, 3]
