"""Emulated hosts have host processes, which meet, serve and end as those of real hosts do."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from commands import (
    checkpoints,
    ended,
    ended_well,
    kill_rank,
    losses,
    paceline,
    processes_of,
    wait_for_events,
    wait_for_step,
    write_job,
)
from host_processes import emulated_host_processes, on_emulated_hosts
from hosts import Hosts
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Emulate
from paceline.elastic.hosts.hosts import current_hosts
from paceline.elastic.hosts.over_hosts import host_processes
from paceline.errors import LaunchError
from refusals import raises

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2]


def job_in(folder: Path, steps: int = 100_000, every_steps: int = 20) -> Path:
    return write_job(folder / "job.yaml", stop={"steps": steps}, checkpoint={"every_steps": every_steps})


def test_hosts_come_and_go_with_the_context(hosts: Hosts) -> None:
    cluster, up = Cluster(emulate=Emulate(hosts=2)), hosts(2)
    with host_processes(cluster, up.emulation.hosts):
        coordinated = current_hosts()
        assert coordinated is not None
        [link] = coordinated.links
        assert (link.name, link.address, link.lost) == ("host-1", "10.77.0.2", None)
        assert coordinated.cluster == cluster
    assert current_hosts() is None


def test_a_host_process_that_cannot_enter_its_host_is_told_at_once(hosts: Hosts) -> None:
    first, second = hosts(2).emulation.hosts
    nowhere = replace(second, namespace="/proc/self/no-such-namespace")
    with (
        raises(LaunchError, "hosts.emulated_ended", host=1),
        host_processes(Cluster(emulate=Emulate(hosts=2)), [first, nowhere]),
    ):
        pytest.fail("it has come")


@pytest.mark.slow
def test_a_host_process_that_is_killed_ends_a_run_that_does_not_recover_and_is_named(tmp_path: Path) -> None:
    off = {"PACELINE_RECOVERY": "off"}
    with on_emulated_hosts(job_in(tmp_path), 2, "dp=2", environment=off) as (process, _):
        emulated_host_processes(process)[0].kill()
        outcome = ended(process)
    assert outcome.code == 1
    assert outcome.says("host host-1 (number 1), which had rank 1, is lost")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "number"),
    # SIGTERM at one of several hosts lets that host leave: `test_departures.py`
    [("at the command", signal.SIGINT), ("at the command", signal.SIGTERM), ("at host 1", signal.SIGINT)],
)
def test_a_signal_that_stops_the_run_ends_it_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals, where: str
) -> None:
    with on_emulated_hosts(job_in(tmp_path), 2, "dp=2") as (process, run):
        (process if where == "at the command" else emulated_host_processes(process)[0]).send_signal(number)
        outcome = ended(process)
    assert outcome.code == 128 + number, outcome.err
    assert checkpoints(run)


@pytest.mark.slow
def test_a_rank_of_another_host_that_dies_is_started_again(tmp_path: Path) -> None:
    with on_emulated_hosts(job_in(tmp_path, 200), 2, "dp=2", "--restarts", "1", from_step=25) as (process, _):
        kill_rank(1, process)
        outcome = ended_well(process)
    assert outcome.says("rank 1 (host host-1, pid")


@pytest.mark.slow
def test_ranks_of_any_host_are_replaced_while_the_others_go_on(tmp_path: Path) -> None:
    job = job_in(tmp_path, 300, every_steps=100)
    with on_emulated_hosts(job, 2, "dp=2") as (process, run):
        for count, rank in enumerate((1, 0), 1):
            wait_for_step(20 * count, run, process)
            kill_rank(rank, process)
            wait_for_events(run, "healed", count, process)
        outcome = ended_well(process)
    assert outcome.says("rank 1 is back", "rank 0 is back")
    alone = paceline("train", job, "--plan", "dp=1", "--run", "alone", folder=tmp_path)
    assert alone.code == 0, alone.err
    assert sorted(losses(run)) == list(range(1, 301))
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)


@pytest.mark.slow
def test_a_host_that_dies_again_and_again_leaves_no_process_and_no_descriptor(tmp_path: Path) -> None:
    often = {"PACELINE_LOSSES_PER_HOUR": "100"}
    with on_emulated_hosts(job_in(tmp_path), 2, "dp=2", environment=often) as (process, run):
        sizes = []
        for count in range(1, 5):
            wait_for_step(max(losses(run)) + 5, run, process)
            sizes.append((len(processes_of(process)), psutil.Process(process.pid).num_fds()))
            emulated_host_processes(process)[0].kill()
            wait_for_events(run, "healed", count, process)
    assert sizes[-1] == sizes[1], "after the first loss nothing is added"


@pytest.mark.slow
def test_hosts_do_without_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_FORK", "0")
    with on_emulated_hosts(job_in(tmp_path, 4), 2, "dp=2", from_step=1) as (process, _):
        ended_well(process)
