"""The launcher sees what each rank does, in the moment that it does it."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.rank_environment import RankEnvironment
from paceline.wire.status import PHASES, Phase, StatusBoard


@pytest.fixture
def board(tmp_path: Path) -> Iterator[StatusBoard]:
    board = StatusBoard.create(tmp_path / "status", ranks=3, attempt=4)
    yield board
    board.close()


def mark_as(rank: int, file: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, step: int) -> None:
    for name, value in RankEnvironment(rank, 3, "127.0.0.1", 1, status_file=file).to_env().items():
        monkeypatch.setenv(name, value)
    own = StatusBoard.of_this_rank()
    own.mark(phase, step)
    own.close()


def test_every_rank_is_starting_before_it_says_anything(board: StatusBoard) -> None:
    assert [(s.rank, s.attempt, s.phase, s.step) for s in board.read()] == [
        (rank, 4, "starting", 0) for rank in range(3)
    ]


@pytest.mark.parametrize("phase", PHASES)
def test_a_mark_changes_the_rank_s_own_slot_only(
    board: StatusBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    before = board.read()
    mark_as(1, tmp_path / "status", monkeypatch, phase, step=2**40)
    after = board.read()
    assert (after[0], after[2]) == (before[0], before[2])
    assert (after[1].pid, after[1].attempt, after[1].phase, after[1].step) == (os.getpid(), 4, phase, 2**40)


def test_a_mark_of_the_same_phase_counts_as_a_change(
    board: StatusBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_as(0, tmp_path / "status", monkeypatch, "evaluate", 5)
    first = board.read()[0].changed_ns
    mark_as(0, tmp_path / "status", monkeypatch, "evaluate", 5)
    status = board.read()[0]
    assert status.changed_ns > first
    assert status.idle_s(status.changed_ns + 2 * 10**9) == 2.0


def test_marks_of_another_process_are_seen(board: StatusBoard, tmp_path: Path) -> None:
    code = "from paceline.wire.status import StatusBoard; StatusBoard.of_this_rank().mark('sync', 9)"
    environment = os.environ | RankEnvironment(2, 3, "127.0.0.1", 1, status_file=tmp_path / "status").to_env()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert (board.read()[2].phase, board.read()[2].step) == ("sync", 9)


def test_without_a_launcher_marks_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_STATUS", raising=False)
    board = StatusBoard.of_this_rank()
    board.mark("compute", 1)
    board.close()


def test_only_its_owner_may_read_or_change_the_file(board: StatusBoard, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "status").stat().st_mode) == 0o600
