"""Generations as a launcher announces them, and as one process of a run sees them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.elastic.membership import Member, announce, store_file
from paceline.files import write_whole
from paceline.rank_environment import STORE
from paceline.wire.status import Generation, StatusBoard

GENERATIONS = 100


@pytest.fixture
def board(tmp_path: Path) -> Iterator[StatusBoard]:
    board = StatusBoard.create(tmp_path / "status", 2)
    yield board
    board.close()


def test_a_rank_waits_through_a_generation_without_members_and_meets_at_the_store_of_the_next(
    board: StatusBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE, "10.0.0.1:1")

    def begin(number: int, *members: int) -> None:
        announce(board, tmp_path, generation := Generation(number, members), generation)

    begin(0, 0)
    member = Member(0, board, tmp_path)
    assert member.next_generation().number == 0
    assert os.environ[STORE] == "10.0.0.1:1"
    begin(1)
    assert member.is_over()
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(member.next_generation)
        while board.read()[0].phase != "joining":  # who waits so is not taken for one that hangs
            assert not entered.done()
        write_whole(store_file(tmp_path), "10.0.0.2:2")
        begin(2, 0)
        assert entered.result(60).number == 2
    assert os.environ[STORE] == "10.0.0.2:2"
    assert board.read()[0].generation == 2


def test_however_many_generations_there_were_no_more_files_are_kept(board: StatusBoard, tmp_path: Path) -> None:
    for number in range(GENERATIONS):
        announce(board, tmp_path, Generation(number, (0, 1)), Generation(number + 1, (0,)))
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"status", f"generation-{GENERATIONS - 1}.json", f"generation-{GENERATIONS}.json"}


def test_a_process_that_is_late_enters_the_newest_generation(board: StatusBoard, tmp_path: Path) -> None:
    """Another may be announced after it has read the number of one, and before it reads its members."""

    def announce_all() -> None:
        for number in range(GENERATIONS):
            announce(board, tmp_path, generation := Generation(number, (0, 1, number)), generation)

    own = StatusBoard.at(tmp_path / "status")
    member = Member(1, own, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        launcher = pool.submit(announce_all)
        while member.generation.number < GENERATIONS - 1:
            generation = member.next_generation()
            assert generation.members == (0, 1, generation.number)
        launcher.result(60)
    own.close()


def test_a_process_knows_whether_others_wait_for_it(board: StatusBoard, tmp_path: Path) -> None:
    """One that replaces a lost rank builds its model before they do."""
    member = Member(1, board, tmp_path)
    assert not member.is_awaited(), "there is no generation yet"
    announce(board, tmp_path, generation := Generation(0, (0,)), generation)
    assert not member.is_awaited()
    announce(board, tmp_path, generation := Generation(1, (0, 1)), generation)
    assert member.is_awaited()
    member.next_generation()
    assert not member.is_awaited()
