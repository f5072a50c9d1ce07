"""The numbers that ride with the gradients: the loss, the votes and the busy times come back as agreed on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.engine.meter import COMPUTE, Meter
from paceline.engine.signals import Notes
from ranks import Ranks


def agreed(asks: dict[int, list[str]], shares: list[float]) -> dict[str, Any]:
    """What the ranks agree on when each asks for something and has a share of the loss and the batch."""
    with joined(deadline_s=30) as group:
        notes, meter = Notes(group), Meter(group.device)
        for what in asks.get(group.rank, []):
            notes.vote(what)
        notes.begin()
        notes.add_loss(torch.tensor(2.0 * shares[group.rank]), shares[group.rank])
        time.sleep(0.05 * group.rank)
        meter.mark(COMPUTE)
        busy_s = notes.seal(meter)
        group.all_reduce(notes.tensor)
        first = notes.read()
        notes.begin()
        notes.add_loss(torch.tensor(2.0 * shares[group.rank]), shares[group.rank])
        notes.seal(meter)
        group.all_reduce(notes.tensor)
        return {"first": first, "second_votes": notes.read().votes, "busy_s": busy_s}


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
    notes = Notes(Group())
    notes.vote("checkpoint")
    notes.begin()
    notes.add_loss(1.5, 1.0)
    notes.seal(Meter(torch.device("cpu")))
    result = notes.read()
    assert (result.loss, result.rescale, result.votes) == (1.5, 1.0, {"checkpoint": 1})
    notes.begin()
    assert notes.read().votes == {}


def asked_in_a_step_that_does_not_agree() -> list[dict[str, int]]:
    """What each of three steps gives of a vote in the first, of which only the last one agrees."""
    with joined(deadline_s=30) as group:
        notes, meter = Notes(group), Meter(group.device)
        if group.rank == 1:
            notes.vote("interrupted")
        votes = []
        for agrees in (False, False, True):
            notes.begin()
            notes.add_loss(1.0 + group.rank, 0.5)
            notes.seal(meter)
            if agrees:
                group.all_reduce(notes.tensor)
            found = notes.read() if agrees else notes.scaled(*notes.share())
            assert (found.everywhere, found.rescale) == (agrees, 1.0 if agrees else 2.0)
            assert found.loss == (3.0 if agrees else 2.0 * (1.0 + group.rank))
            votes.append(found.votes)
        return votes


def test_a_vote_stays_asked_until_a_step_that_agrees(ranks: Ranks) -> None:
    assert ranks(2, asked_in_a_step_that_does_not_agree) == [[{}, {}, {"interrupted": 1}]] * 2
