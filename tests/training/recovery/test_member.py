"""Epochs as one process of a run sees them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.engine.status import StatusBoard
from paceline.files import write_whole
from paceline.rank_environment import STORE
from paceline.training.recovery.member import Member, members_file, store_file


def test_a_rank_waits_through_an_epoch_without_members_and_meets_at_the_store_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE, "10.0.0.1:1")
    board = StatusBoard.create(tmp_path / "status", 1)

    def announce(number: int, members: list[int]) -> None:
        write_whole(members_file(tmp_path, number), json.dumps(members))
        board.announce(number, number)

    announce(0, [0])
    member = Member(0, board, tmp_path)
    assert member.next_epoch().number == 0
    assert os.environ[STORE] == "10.0.0.1:1"
    announce(1, [])
    assert member.is_over()
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(member.next_epoch)
        while board.read()[0].phase != "joining":  # who waits so is not taken for one that hangs
            assert not entered.done()
        write_whole(store_file(tmp_path), "10.0.0.2:2")
        announce(2, [0])
        assert entered.result(60).number == 2
    assert os.environ[STORE] == "10.0.0.2:2"
    assert board.read()[0].epoch == 2
    board.close()
