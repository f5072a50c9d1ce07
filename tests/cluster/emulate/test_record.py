"""Whose emulated hosts these are: mistaken, and a run in progress loses its network, or a dead one's stays for ever."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.emulate.record import Owner, Record, remove_abandoned


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    monkeypatch.setattr("paceline.cluster.emulate.record.FOLDER", tmp_path / "run")
    own = Owner.of(os.getpid())
    return Record("paceline-0", own, own, ("paceline-0-bridge",), (tmp_path / "group",))


def test_a_later_process_of_the_same_number_is_not_the_owner() -> None:
    own = Owner.of(os.getpid())
    assert own.alive
    assert not replace(own, started=own.started - 1).alive


def test_a_dead_process_is_no_owner_even_while_nobody_has_asked_for_its_exit_code() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    owner = Owner.of(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not owner.alive
    process.wait()
    assert not owner.alive


def test_a_record_reads_back_and_goes_once_all_is_removed(record: Record) -> None:
    record.write()
    assert Record.all() == [record]
    record.groups[0].mkdir()
    record.take_down()
    assert Record.all() == []
    assert not record.groups[0].exists()
    record.take_down()  # by another process, a moment later


def test_only_what_nobody_can_take_down_any_more_is_removed(record: Record) -> None:
    dead = Owner(record.launcher.pid, 0)
    kept = replace(record, launcher=dead)  # its keeper waits for the ranks to save
    gone = replace(record, name="paceline-1", launcher=dead, keeper=dead)
    for each in (record, kept, gone):
        replace(each, groups=()).write()
    assert [each.name for each in remove_abandoned()] == ["paceline-1"]
    assert [each.name for each in Record.all()] == ["paceline-0"]
