"""The sentence about NaN and Inf: the same on every rank, it names the step, the quantity, and where it came from."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.engine.guard import explain, gave_up, stop
from ranks import Ranks


def batch(*bad: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.zeros(size, 2)
    inputs[list(bad), 1] = math.inf
    return inputs, torch.zeros(size, dtype=torch.long)


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [
        (math.nan, 1.0, "the loss of step 7 is nan"),
        (math.inf, math.nan, "the loss of step 7 is inf"),
        (1.0, math.inf, "the gradient of step 7 is inf"),
    ],
)
def test_the_quantity_and_the_step_are_named(loss: float, norm: float, what: str) -> None:
    said = explain(Group(), batch(), list(range(12)), step=7, loss=loss, norm=norm)
    assert said == f"{what} (the data of the batch is finite, so the model or the learning rate made it)"


def test_samples_are_named_by_their_index_in_the_data_set_and_at_most_eight() -> None:
    said = explain(Group(), batch(1, 3), [100 + i for i in range(12)], step=1, loss=math.nan, norm=0.0)
    assert "rank 0's share of the batch has it in samples [101, 103]" in said
    said = explain(Group(), batch(*range(12)), list(range(12)), step=1, loss=math.nan, norm=0.0)
    assert "in samples [0, 1, 2, 3, 4, 5, 6, 7]" in said


def explained() -> str:
    """Ranks 1 and 2 have bad samples, rank 3 has none at all."""
    with joined(deadline_s=30) as group:
        shares = [batch(), batch(0), batch(2, 5), None]
        return explain(
            group, shares[group.rank], [20 * group.rank + i for i in range(12)], step=4, loss=math.nan, norm=1.0
        )


def test_every_rank_says_the_same_of_all_ranks(ranks: Ranks) -> None:
    said = ranks(4, explained)
    assert len(set(said)) == 1
    assert (
        "(rank 1's share of the batch has it in samples [20]; rank 2's share of the batch has it in samples [42, 45])"
        in said[0]
    )


def test_the_errors_say_what_to_do() -> None:
    assert "Nothing was updated" in str(stop("problem"))
    for way_out in ("Clean the data", "clip_norm", "`nonfinite: skip`", "`nonfinite: rewind`"):
        assert way_out in str(stop("problem"))
    assert str(gave_up("problem", 20)).startswith("problem, and 20 updates in a row were left out")
