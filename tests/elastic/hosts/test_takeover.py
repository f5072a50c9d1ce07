"""A run goes on when its coordinating host is lost: the next host continues it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from commands import events, kill_rank, losses, losses_of, processes_of, wait_for, wait_for_step
from host_processes import assert_whole, folders, host_processes, outcomes, slow_job, slow_training_on
from hosts import Hosts


def kill_host(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a host process and all that it has started."""
    for one in [psutil.Process(process.pid), *processes_of(process)]:
        one.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses when nothing happens."""
    return losses_of(slow_job(tmp_path_factory.mktemp("undisturbed"), sleep_s=0))


@pytest.mark.slow
def test_a_coordinator_that_was_lost_comes_back_as_another_host_and_its_rank_is_healed(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", sleep_s=0.1, from_step=5) as (hosts, run):
        kill_host(hosts[0])
        wait_for(lambda: events(run, "host_lost"), hosts[1])
        hosts.start_again(0)
        wait_for(lambda: events(run, "healed"), hosts[1])
        (tmp_path / "fast").touch()
        zero, one, two = outcomes(hosts)
    assert (zero.code, one.code, two.code) == (0, 0, 0), zero.err + one.err + two.err
    assert zero.says("the run continues under host", "the run has ended on")
    assert one.says("which had rank 0, is lost", "is back", "rank 0 is back at step")
    assert not events(run, "resume"), "nothing was read from the disk"
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
def test_a_rank_whose_host_came_back_is_replaced_again_under_a_later_coordinator(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", sleep_s=0.1, from_step=5) as (hosts, run):
        kill_host(hosts[2])
        wait_for(lambda: events(run, "host_lost"), hosts[0])
        hosts.start_again(2)
        wait_for(lambda: events(run, "healed"), hosts[0])
        kill_host(hosts[0])
        wait_for(lambda: events(run, "coordinator"), hosts[1])
        kill_rank(2, hosts[2])
        wait_for(lambda: len(events(run, "healed")) > 1, hosts[1])
        (tmp_path / "fast").touch()
        _, one, two = outcomes(hosts)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert [(event["rank"], event["again"]) for event in events(run, "lost")] == [(2, True)]
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_another_host_comes_back_to_the_new_coordinator_where_the_first_one_stays_away(
    tmp_path: Path, hosts: Hosts, undisturbed: dict[int, float]
) -> None:
    emulated = hosts(3, rate="1gbit")
    with slow_training_on(tmp_path, 3, "dp=3 balance=off", sleep_s=0.1, from_step=5, emulated=emulated) as (
        processes,
        run,
    ):
        for number, lost in enumerate((0, 2), 1):
            kill_host(processes[lost])
            wait_for(lambda: len(events(run, "host_lost")) >= number, processes[1])  # noqa: B023
        processes.start_again(2)
        wait_for(lambda: events(run, "healed"), processes[1])
        (tmp_path / "fast").touch()
        _, one, two = outcomes(processes)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert two.says("the run continues under host", "the run has ended on")
    assert not events(run, "resume"), "nothing was read from the disk"
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
def test_when_the_coordinator_is_killed_the_next_host_continues_the_run_without_the_loss_of_a_step(
    tmp_path: Path, undisturbed: dict[int, float], lost: int
) -> None:
    with slow_training_on(tmp_path, lost + 2, f"dp={lost + 2}") as (hosts, run):
        for host in hosts[:lost]:
            host.kill()
        new, other = outcomes(hosts)[lost:]
    assert (new.code, other.code) == (0, 0), new.err + other.err
    assert new.says("(number 0) is lost", f"(number {lost}) coordinates now with", "which had rank 0, is lost")
    assert other.says(f"(number {lost}) coordinates now", "the run has ended on")
    assert_whole(run, undisturbed, new)
    assert not events(run, "resume"), "nothing was read from the disk"


@pytest.mark.slow
def test_a_new_coordinator_knows_who_was_lost_before_and_how_often(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(
        tmp_path, 4, "dp=4 balance=off", sleep_s=0.1, from_step=5, environment={"PACELINE_LOSSES_PER_HOUR": "2"}
    ) as (hosts, run):
        kill_rank(3, hosts[3])
        wait_for(lambda: events(run, "healed"), hosts[0])
        for number, lost in enumerate((2, 0), 1):
            kill_host(hosts[lost])
            wait_for(lambda: len(events(run, "host_lost")) >= number, hosts[1])  # noqa: B023
        kill_rank(3, hosts[3])
        wait_for(lambda: len(events(run, "lost")) > 1, hosts[1])
        (tmp_path / "fast").touch()
        one, three = outcomes([hosts[1], hosts[3]])
    assert (one.code, three.code) == (0, 0), one.err + three.err
    assert [event["ranks"] for event in events(run, "host_lost")] == [[2], [0]], "each once"
    assert [(event["rank"], event["again"]) for event in events(run, "lost")] == [(3, True), (3, False)]
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
def test_the_new_coordinator_replaces_ranks_of_its_own_and_of_other_hosts(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(tmp_path, 3, "dp=3", sleep_s=0.02, from_step=10) as (hosts, run):
        kill_host(hosts[0])
        wait_for(lambda: events(run, "host_lost"), hosts[1])
        for rank in (1, 2):
            kill_rank(rank, hosts[rank])
            wait_for(lambda: any(event["rank"] == rank for event in events(run, "healed")), hosts[1])  # noqa: B023
        one, two = outcomes(hosts)[1:]
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert [event["rank"] for event in events(run, "healed")] == [1, 2]
    assert not events(run, "resume"), "one of them had the state"
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
def test_ranks_wait_for_a_new_coordinator_for_longer_than_for_a_lost_peer(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(tmp_path, 4, "dp=3") as (hosts, run):
        psutil.Process(hosts[3].pid).suspend()  # it has no rank, and is waited for
        kill_host(hosts[0])
        one, two = outcomes(hosts[1:3])
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert not events(run, "resume"), "nothing was read from the disk"
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
def test_a_rank_that_dies_while_the_hosts_meet_is_replaced(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with slow_training_on(tmp_path, 4, "dp=3 balance=off", sleep_s=0.1, from_step=5) as (hosts, run):
        psutil.Process(hosts[3].pid).suspend()  # it has no rank, and is waited for
        kill_host(hosts[0])
        kill_rank(2, hosts[2])
        wait_for(lambda: events(run, "healed"), hosts[1])
        (tmp_path / "fast").touch()
        one, two = outcomes(hosts[1:3])
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert [event["rank"] for event in events(run, "healed")] == [2]
    assert not events(run, "resume"), "nothing was read from the disk"
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "resumes"), [("dp=2", 0), ("dp=2 transport=gloo", 1)])
def test_when_one_of_two_hosts_dies_whole_the_other_continues_the_run(
    tmp_path: Path, undisturbed: dict[int, float], plan: str, resumes: int
) -> None:
    with slow_training_on(tmp_path, 2, plan) as (hosts, run):
        kill_host(hosts[0])
        one = outcomes(hosts)[1]
    assert one.code == 0, one.err
    assert [event["by"].partition(" (")[2] for event in events(run, "coordinator")] == ["number 1)"]
    assert len(events(run, "resume")) == resumes, "ranks over gloo cannot go on in place"
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
def test_a_whole_replica_of_several_ranks_goes_on_when_the_coordinator_is_lost(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(tmp_path, 4, "dp=2 fsdp=2 balance=off", sleep_s=0.1, from_step=5) as (hosts, run):
        kill_host(hosts[0])
        wait_for(lambda: events(run, "host_lost"), hosts[1])
        hosts.start_again(0)
        wait_for(lambda: events(run, "healed"), hosts[1])
        (tmp_path / "fast").touch()
        ended = outcomes(hosts)
    assert [outcome.code for outcome in ended] == [0, 0, 0, 0], [outcome.err for outcome in ended]
    assert not events(run, "resume"), "nothing was read from the disk"
    assert_whole(run, undisturbed, ended[1])


@pytest.mark.slow
def test_parts_of_replicas_go_on_from_a_checkpoint_when_the_coordinator_had_some_of_each(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(tmp_path, 4, "dp=2 fsdp=2 balance=off", from_step=25) as (hosts, run):
        for host in (hosts[0], hosts[2]):
            kill_host(host)
        one, three = outcomes([hosts[1], hosts[3]])
    assert (one.code, three.code) == (0, 0), one.err + three.err
    assert len(events(run, "resume")) == 1
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
def test_a_coordinator_that_was_stopped_finds_the_run_taken_when_it_goes_on(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with slow_training_on(tmp_path, 3, "dp=3") as (hosts, run):
        stopped = [psutil.Process(hosts[0].pid), *processes_of(hosts[0])]
        for process in stopped:
            process.suspend()
        wait_for(lambda: events(run, "coordinator"), hosts[1])
        for process in stopped:
            process.resume()
        zero, one, two = outcomes(hosts)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert zero.code == 1
    assert zero.says("[run.taken_over]")
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
def test_of_a_network_that_is_cut_the_side_with_the_quorum_goes_on(
    tmp_path: Path, hosts: Hosts, undisturbed: dict[int, float]
) -> None:
    emulated = hosts(3, rate="1gbit")
    with slow_training_on(tmp_path, 3, "dp=3", emulated=emulated) as (processes, run):
        emulated.cut(0)
        zero, one, two = outcomes(processes)
    assert (zero.code, one.code, two.code) == (1, 0, 0), zero.err + one.err + two.err
    assert zero.says("as these may go on, this side stops")
    assert not events(run, "resume")
    assert_whole(run, undisturbed, one)


@pytest.mark.slow
def test_a_host_that_has_taken_over_may_be_lost_as_well(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with slow_training_on(tmp_path, 3, "dp=3") as (hosts, run):
        hosts[0].kill()
        wait_for(lambda: events(run, "coordinator"), hosts[1])
        wait_for_step(len(losses(run)) + 20, run, hosts[1])
        hosts[1].kill()
        two = outcomes(hosts)[2]
    assert two.code == 0, two.err
    assert [event["by"].partition(" (")[2] for event in events(run, "coordinator")] == ["number 1)", "number 1)"]
    assert_whole(run, undisturbed, two)


@pytest.mark.slow
def test_fewer_than_half_of_the_hosts_stop_and_say_so(tmp_path: Path) -> None:
    with slow_training_on(tmp_path, 3, "dp=3") as (hosts, run):
        for host in hosts[:2]:
            kill_host(host)
        two = outcomes(hosts)[2]
    assert two.code == 1
    assert two.says("[hosts.too_few_met]")
    assert "Traceback" not in two.err
    assert not events(run, "coordinator")


@pytest.mark.slow
@pytest.mark.needs_root
def test_a_run_that_was_on_the_lost_hosts_disk_alone_stops_and_says_what_is_lost(tmp_path: Path) -> None:
    first, second = folders(tmp_path, 2)
    job = slow_job(first)
    arguments = ("train", job, "--plan", "dp=2", "--run", first / "run")
    with host_processes(*arguments, folders=[first, second], apart=True) as hosts:
        wait_for_step(50, first / "run", hosts[0])
        kill_host(hosts[0])
        one = outcomes(hosts)[1]
    assert one.code == 1
    assert one.says(f"{first}/run", "[hosts.directory_lost]")
    assert "Traceback" not in one.err
