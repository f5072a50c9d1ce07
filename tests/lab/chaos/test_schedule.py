"""Schedules of faults: what a seed draws, and what a file of somebody else's may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ClusterError, JobError
from paceline_lab.chaos.faults import kinds_in, refuse_impossible
from paceline_lab.chaos.schedule import KINDS, Schedule, draw
from refusals import raises

ARGUMENTS: dict[str, Any] = {"plan": "dp=3", "ranks": 3, "hosts": 4, "steps": 100}
kinds = st.lists(st.sampled_from(KINDS), min_size=1, unique=True)


@given(kinds, st.integers(0, 2**31), st.integers(1, 40))
def test_a_seed_draws_one_schedule_with_every_kind(kinds: list[Any], seed: int, count: int) -> None:
    schedule = draw(kinds, seed, count=count, **ARGUMENTS)
    assert schedule == draw(kinds, seed, count=count, **ARGUMENTS)
    assert len(schedule.faults) == count
    drawn = {fault.kind for fault in schedule.faults}
    assert drawn <= set(kinds)
    assert drawn == set(kinds) or count < len(kinds)
    assert [fault.at for fault in schedule.faults] == sorted(fault.at for fault in schedule.faults)


def test_where_there_are_more_kinds_than_faults_each_is_drawn_by_some_seed() -> None:
    drawn = {fault.kind for seed in range(40) for fault in draw(KINDS, seed, count=3, **ARGUMENTS).faults}
    assert drawn == set(KINDS)


def test_the_command_itself_is_killed_sometimes_and_stopped_where_its_store_is_to_be_gone() -> None:
    faults = [fault for seed in range(30) for fault in draw(["kill", "store"], seed, count=8, **ARGUMENTS).faults]
    kills = {fault.target for fault in faults if fault.kind == "kill"}
    assert kills == {"rank", "others", "ranks", "host", "command"}
    assert {fault.target for fault in faults if fault.kind == "store"} == {"command"}


@given(kinds, st.integers(0, 2**31), st.integers(1, 40))
def test_what_faults_hit_is_there(kinds: list[Any], seed: int, count: int) -> None:
    for fault in draw(kinds, seed, count=count, **ARGUMENTS).faults:
        assert fault.number < (3 if fault.target in ("rank", "weights") else 4)
        assert fault.kind != "partition" or 1 <= fault.number <= 2, "the larger side has half of the hosts or more"


def test_faults_come_also_during_start_evaluations_checkpoints_recoveries_and_at_once() -> None:
    schedules = [draw(["kill", "stop"], seed, count=12, **ARGUMENTS) for seed in range(30)]
    assert {fault.during for schedule in schedules for fault in schedule.faults} == {
        "any",
        "start",
        "evaluate",
        "checkpoint",
        "recovery",
    }
    together = [a.at == b.at for s in schedules for a, b in zip(s.faults, s.faults[1:], strict=False)]
    assert any(together)


@given(kinds, st.integers(0, 2**31))
def test_a_schedule_reads_back_from_its_file(tmp_path_factory: pytest.TempPathFactory, kinds: Any, seed: int) -> None:
    schedule = draw(kinds, seed, count=5, **ARGUMENTS)
    file = tmp_path_factory.mktemp("schedule") / "schedule.json"
    schedule.write(file)
    assert Schedule.read(file) == schedule


BAD = {
    "empty": "",
    "a list": "[]",
    "deep": "{" * 100_000,
    "of nothing": '{"seed": 1}',
    "no steps": '{"seed": 1, "plan": "dp=2", "steps": 0, "hosts": 0, "faults": []}',
    "more keys": '{"seed": 1, "plan": "dp=2", "steps": 9, "hosts": 0, "faults": [], "run": "rm"}',
}
BAD_FAULTS = {
    "unknown kind": '{"kind": "melt", "at": 0, "target": "rank"}',
    "at no number": '{"kind": "kill", "at": NaN, "target": "rank"}',
    "after the end": '{"kind": "kill", "at": 2, "target": "rank"}',
}
BAD |= {
    name: f'{{"seed": 1, "plan": "dp=2", "steps": 9, "hosts": 0, "faults": [{fault}]}}'
    for name, fault in BAD_FAULTS.items()
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_file_that_is_no_schedule_is_refused(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "schedule.json").write_text(text)
    with raises(JobError, "chaos.schedule_invalid"):
        Schedule.read(file)


def test_a_file_that_is_not_there_or_too_long_is_refused(tmp_path: Path) -> None:
    with raises(JobError, "file.unreadable"):
        Schedule.read(tmp_path / "none.json")
    (file := tmp_path / "long.json").write_text(" " * 2**21)
    with pytest.raises(JobError):
        Schedule.read(file)


def test_a_schedule_with_fewer_faults_is_of_the_same_run() -> None:
    schedule = draw(["kill"], 1, count=4, **ARGUMENTS)
    shorter = schedule.with_only(schedule.faults[:1])
    assert msgspec.structs.replace(shorter, faults=schedule.faults) == schedule


def test_an_unknown_kind_names_the_nearest() -> None:
    with raises(ClusterError, "chaos.fault_unknown"):
        kinds_in("kill,partiton")


def test_faults_that_cannot_be_made_here_are_refused_with_the_reason() -> None:
    with raises(ClusterError, "chaos.faults_impossible") as refused:
        refuse_impossible(["kill", "clock", "cut"], hosts=0)
    assert "cut: it needs the links of emulated hosts" in str(refused.value)
    assert "kill" not in str(refused.value)
