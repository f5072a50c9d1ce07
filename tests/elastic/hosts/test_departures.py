"""A host that receives SIGTERM leaves a run after a step; the others continue, and admit the host again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from commands import checkpoints, ended, events, losses, losses_of, wait_for, wait_for_events, write_job
from host_processes import (
    assert_whole,
    emulated_host_processes,
    folders,
    host_processes,
    on_emulated_hosts,
    outcomes,
    slow_job,
    slow_training_on,
    stop_all,
)
from hosts import Hosts
from paceline.elastic.membership import Membership
from paceline.wire.status import Generation

SLOWLY: dict[str, Any] = {"sleep_s": 0.1, "from_step": 5}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of an undisturbed run."""
    return losses_of(slow_job(tmp_path_factory.mktemp("undisturbed"), sleep_s=0))


def assert_no_rank_was_lost(run: Path) -> None:
    assert not [event for kind in ("lost", "host_lost", "resume", "restart") for event in events(run, kind)]


@pytest.mark.slow
def test_a_host_with_a_notice_leaves_and_is_taken_in_again(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", **SLOWLY) as (hosts, run):
        hosts[1].send_signal(signal.SIGTERM)
        assert ended(hosts[1]).code == 143
        wait_for_events(run, "host_left", 1, hosts[0])
        hosts.start_again(1)
        wait_for_events(run, "healed", 1, hosts[0])
        (tmp_path / "fast").touch()
        zero, one, two = outcomes(hosts)
    assert (zero.code, one.code, two.code) == (0, 0, 0), zero.err + one.err + two.err
    [left], [back] = events(run, "host_left"), events(run, "host_back")
    assert (left["number"], left["ranks"]) == (back["number"], back["ranks"]) == (1, [1])
    assert left["host"] == back["host"]
    assert [event["replicas"] for event in events(run, "generation")] == [2, 3]
    assert_no_rank_was_lost(run)
    assert_whole(run, undisturbed, zero)


@pytest.mark.slow
def test_a_coordinator_with_a_notice_hands_the_run_over_and_is_taken_in_again(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", **SLOWLY) as (hosts, run):
        hosts[0].send_signal(signal.SIGTERM)
        assert ended(hosts[0]).code == 143
        wait_for_events(run, "coordinator", 1, hosts[1])
        hosts.start_again(0)
        wait_for_events(run, "healed", 1, hosts[1])
        (tmp_path / "fast").touch()
        zero, one, two = outcomes(hosts)
    assert (zero.code, one.code, two.code) == (0, 0, 0), zero.err + one.err + two.err
    assert [(event["number"], event["ranks"]) for event in events(run, "host_left")] == [(0, [0])]
    assert [event["by"].partition(" (")[2] for event in events(run, "coordinator")] == ["number 1)"]
    assert_no_rank_was_lost(run)
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
def test_each_host_may_leave_in_turn_until_one_is_left(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", **SLOWLY) as (hosts, run):
        for number in (0, 1):
            hosts[number].send_signal(signal.SIGTERM)
            assert ended(hosts[number]).code == 143
            wait_for_events(run, "coordinator", number + 1, hosts[2])
        (tmp_path / "fast").touch()
        two = ended(hosts[2])
    assert two.code == 0, two.err
    assert_no_rank_was_lost(run)
    assert_whole(run, undisturbed, two)


@pytest.mark.slow
@pytest.mark.parametrize("noticed", [(0, 2), (1, 2)])
def test_several_hosts_with_a_notice_leave_together(
    tmp_path: Path, undisturbed: dict[int, float], noticed: tuple[int, ...]
) -> None:
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", **SLOWLY) as (hosts, run):
        stop_all([hosts[number] for number in noticed])
        assert [ended(hosts[number]).code for number in noticed] == [143, 143]
        [stays] = {0, 1, 2}.difference(noticed)
        (tmp_path / "fast").touch()
        last = ended(hosts[stays])
    assert last.code == 0, last.err
    assert sorted(event["number"] for event in events(run, "host_left")) == sorted(noticed)
    assert_no_rank_was_lost(run)
    assert_whole(run, undisturbed, last)


@pytest.mark.slow
def test_a_run_whose_hosts_all_have_a_notice_saves_and_ends(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", **SLOWLY) as (hosts, run):
        stop_all(hosts)
        found = outcomes(hosts)
    assert [outcome.code for outcome in found] == [143] * 3, found[0].err
    assert events(run, "end")[0]["reason"] == "SIGTERM"
    assert not events(run, "host_left")
    assert checkpoints(run)[-1] == f"step-{max(losses(run)):08d}"
    assert losses(run) == pytest.approx({step: undisturbed[step] for step in losses(run)}, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("least", [2, 3])
def test_a_run_with_too_few_hosts_after_a_notice_saves_and_ends(tmp_path: Path, least: int) -> None:
    environment = {"PACELINE_HOSTS": f"{least}..3"}
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", **SLOWLY, environment=environment) as (hosts, run):
        hosts[2].send_signal(signal.SIGTERM)
        if least == 2:
            wait_for_events(run, "host_left", 1, hosts[0])
            hosts[0].send_signal(signal.SIGTERM)
        found = outcomes(hosts)
    assert [outcome.code for outcome in found] == [143] * 3, found[0].err
    assert len(events(run, "host_left")) == 3 - least
    assert checkpoints(run)[-1] == f"step-{max(losses(run)):08d}"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_host_with_a_part_of_the_only_replica_saves_and_ends_the_run(tmp_path: Path, number: int) -> None:
    with slow_training_on(tmp_path, 2, "fsdp=2", **SLOWLY) as (hosts, run):
        hosts[number].send_signal(signal.SIGTERM)
        found = outcomes(hosts)
    assert [outcome.code for outcome in found] == [143, 143], found[0].err
    assert not events(run, "host_left")
    assert checkpoints(run)[-1] == f"step-{max(losses(run)):08d}"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3])
def test_a_host_with_a_part_of_a_replica_leaves_and_the_rest_of_it_waits(
    tmp_path: Path, undisturbed: dict[int, float], number: int
) -> None:
    with slow_training_on(tmp_path, 4, "dp=2 fsdp=2 balance=off", **SLOWLY) as (hosts, run):
        hosts[number].send_signal(signal.SIGTERM)
        assert ended(hosts[number]).code == 143
        coordinator = hosts[0] if number else hosts[1]
        wait_for_events(run, "host_left" if number else "coordinator", 1, coordinator)
        hosts.start_again(number)
        wait_for_events(run, "healed", 1, coordinator)
        (tmp_path / "fast").touch()
        found = outcomes(hosts)
    assert [outcome.code for outcome in found] == [0] * 4, [outcome.err for outcome in found]
    assert_no_rank_was_lost(run)
    assert_whole(run, undisturbed, found[1])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=3 sync=local:8", "dp=3 sync=diloco:8"])
def test_a_replica_with_local_steps_leaves_when_replicas_synchronize(tmp_path: Path, plan: str) -> None:
    with slow_training_on(tmp_path, 3, plan, sleep_s=0.02, from_step=10) as (hosts, run):
        hosts[2].send_signal(signal.SIGTERM)
        assert ended(hosts[2]).code == 143
        (tmp_path / "fast").touch()
        zero, one = outcomes(hosts[:2])
    assert (zero.code, one.code) == (0, 0), zero.err + one.err
    assert_no_rank_was_lost(run)
    assert sorted(losses(run)) == list(range(1, 301))


@pytest.mark.slow
@pytest.mark.needs_root
def test_a_coordinator_that_only_knows_its_own_disk_saves_and_ends_the_run(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    job = slow_job(first, 0.1)
    arguments = ("train", job, "--plan", "dp=2", "--run", first / "run")
    with host_processes(*arguments, folders=[first, second], apart=True) as hosts:
        wait_for(lambda: len(losses(first / "run")) > 5, hosts[0])
        hosts[0].send_signal(signal.SIGTERM)
        found = outcomes(hosts)
    assert [outcome.code for outcome in found] == [143, 143], found[0].err
    assert not events(first / "run", "host_left")


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
@pytest.mark.parametrize("number", [0, 1])
def test_a_host_in_a_network_of_its_own_leaves_and_is_taken_in_again(
    tmp_path: Path, hosts: Hosts, undisturbed: dict[int, float], number: int
) -> None:
    emulated = hosts(3, rate="1gbit")
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", **SLOWLY, emulated=emulated) as (processes, run):
        processes[number].send_signal(signal.SIGTERM)
        assert ended(processes[number]).code == 143
        wait_for_events(run, "host_left" if number else "coordinator", 1, processes[2])
        processes.start_again(number)
        wait_for_events(run, "healed", 1, processes[2])
        (tmp_path / "fast").touch()
        found = outcomes(processes)
    assert [outcome.code for outcome in found] == [0] * 3, [outcome.err for outcome in found]
    assert_no_rank_was_lost(run)
    assert_whole(run, undisturbed, found[2])


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_an_emulated_host_with_a_notice_is_back_at_once(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 100_000})
    with on_emulated_hosts(job, 2, "dp=2 balance=off") as (process, run):
        emulated_host_processes(process)[0].send_signal(signal.SIGTERM)
        wait_for_events(run, "healed", 1, process)
        process.send_signal(signal.SIGTERM)
        outcome = ended(process)
    assert outcome.code == 143, outcome.err
    assert [event["ranks"] for event in events(run, "host_left")] == [[1]]
    assert_no_rank_was_lost(run)


def test_members_leave_together_only_after_their_last_step() -> None:
    membership = Membership(3)
    membership.pausing = True
    entered = dict.fromkeys(range(3), 0)
    membership.note(entered, set())
    assert membership.newest == Generation(1, ())
    for waiting in ({0}, {0, 2}):
        membership.note(entered, waiting)
        assert membership.current.number == 0, "a member that still computes would break its step off"
    membership.note(entered, {0, 1, 2})
    assert membership.current == Generation(1, ())


def test_the_other_ranks_of_a_replica_leave_with_a_departing_rank_and_wait() -> None:
    membership = Membership(4, replica_size=2)
    membership.departing = {3}
    membership.note(dict.fromkeys(range(4), 0), set())
    assert membership.newest.members == (0, 1)
    entered = {0: 1, 1: 1, 2: 0, 3: 0}
    membership.note(entered, {2, 3})
    membership.note(entered, {2, 3})
    assert membership.current.members == membership.newest.members == (0, 1)
