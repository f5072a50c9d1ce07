"""The numbers that ride with the gradients.

The loss, the votes and the busy times come back as agreed on every rank.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.engine.compute import LocalLoss
from paceline.engine.meter import COMPUTE, Meter
from paceline.engine.reduction import StepSignals, numbers
from ranks import Ranks


def agreed(asks: dict[int, list[str]], shares: list[float]) -> dict[str, Any]:
    """What the ranks agree on when each asks for something and has a share of the loss and the batch."""
    with joined(deadline_s=30) as group:
        signals, meter = StepSignals(group), Meter(group.device)
        for what in asks.get(group.rank, []):
            signals.vote(what)
        local = LocalLoss(torch.tensor(2.0 * shares[group.rank]), shares[group.rank])
        time.sleep(0.05 * group.rank)
        meter.mark(COMPUTE)
        busy_s = signals.seal(meter, local)
        group.all_reduce(signals.tensor)
        first = signals.read(numbers(signals.sums(local)))
        signals.seal(meter, local)
        group.all_reduce(signals.tensor)
        return {"first": first, "second_votes": signals.read(numbers(signals.sums(local))).votes, "busy_s": busy_s}


def test_every_rank_learns_every_vote_once(ranks: Ranks) -> None:
    results = ranks(3, agreed, {0: ["checkpoint"], 1: ["interrupted"], 2: ["interrupted"]}, [0.5, 0.25, 0.25])
    for result in results:
        assert result["first"].votes == {"checkpoint": 1, "interrupted": 2}
        assert result["second_votes"] == {}
        assert result["first"].loss == pytest.approx(2.0)
        assert result["first"].rescale == 1.0
        assert result["first"].slowest_busy_s == pytest.approx(max(r["busy_s"] for r in results), rel=1e-5)


def test_the_mean_is_over_the_items_that_there_were(ranks: Ranks) -> None:
    for result in ranks(2, agreed, {}, [0.5, 0.25]):  # a quarter fewer items than expected
        assert result["first"].loss == pytest.approx(2.0)
        assert result["first"].rescale == pytest.approx(4 / 3)


def test_a_group_of_one_agrees_with_itself() -> None:
    signals = StepSignals(Group())
    signals.vote("checkpoint")
    local = LocalLoss(1.5, 1.0)
    signals.seal(Meter(torch.device("cpu")), local)
    result = signals.read(numbers(signals.sums(local)))
    assert (result.loss, result.rescale, result.votes) == (1.5, 1.0, {"checkpoint": 1})
    assert signals.read(numbers(signals.sums(local))).votes == {}


def asked_in_a_step_that_does_not_agree() -> list[dict[str, int]]:
    """What each of three steps gives of a vote in the first, of which only the last one agrees."""
    with joined(deadline_s=30) as group:
        signals, meter = StepSignals(group), Meter(group.device)
        if group.rank == 1:
            signals.vote("interrupted")
        votes = []
        for agrees in (False, False, True):
            local = LocalLoss(1.0 + group.rank, 0.5)
            signals.seal(meter, local)
            if agrees:
                group.all_reduce(signals.tensor)
            found = signals.read(numbers(signals.sums(local))) if agrees else signals.scaled(1.0 + group.rank, 0.5)
            assert (found.everywhere, found.rescale) == (agrees, 1.0 if agrees else 2.0)
            assert found.loss == (3.0 if agrees else 2.0 * (1.0 + group.rank))
            votes.append(found.votes)
        return votes


def test_a_vote_stays_asked_until_a_step_that_agrees(ranks: Ranks) -> None:
    assert ranks(2, asked_in_a_step_that_does_not_agree) == [[{}, {}, {"interrupted": 1}]] * 2
