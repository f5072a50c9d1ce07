"""Hosts are lost while servers own the parameters: the other workers go on, and those of the host come back with it."""

from __future__ import annotations

import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from commands import (
    ended,
    ended_well,
    events,
    losses,
    paceline,
    started,
    wait_for,
    wait_for_events,
    wait_for_step,
    write_job,
)
from host_processes import emulated_host_processes, folders, host_processes, on_emulated_hosts, outcomes
from hosts import cut_of, mend_of

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2, pytest.mark.slow]
STEPS, WORKERS = 300, 3
ON = "server:staleness=4,backup=on"


def training(folder: Path, sync: str) -> AbstractContextManager[tuple[subprocess.Popen[str], Path]]:
    """A run of three workers on as many emulated hosts, once it has taken some steps.

    The first has the server, and the second one its backup.
    """
    job = write_job(folder / "job.yaml", global_batch=24, stop={"steps": STEPS}, checkpoint={"every_steps": 10**6})
    return on_emulated_hosts(job, WORKERS, f"dp={WORKERS} sync={sync}")


def pieces(run: Path) -> dict[str, int]:
    """Pieces that each worker has pushed."""
    told = events(run, "served")
    return {name: worker["pushes"] for name, worker in told[-1]["workers"].items()} if told else {}


@pytest.mark.parametrize("number", [1, 2])
def test_a_host_that_is_killed_is_back_with_its_worker_and_every_piece_counts_once(number: int, tmp_path: Path) -> None:
    with training(tmp_path, ON) as (process, run):
        emulated_host_processes(process)[number - 1].kill()
        wait_for_events(run, "host_back", 1, process)
        outcome = ended_well(process)
    assert outcome.says(f"host host-{number} (number {number}), which had rank", "the others go on")
    assert [event["number"] for event in events(run, "host_lost")] == [number]
    assert not events(run, "restart")
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert sum(pieces(run).values()) == WORKERS * STEPS


def test_a_host_behind_a_cut_link_holds_up_nobody_and_is_back_when_it_is_mended(tmp_path: Path) -> None:
    with training(tmp_path, ON) as (process, run):
        cut_of(process.pid, host=2)
        wait_for_events(run, "host_lost", 1, process)
        wait_for_step(len(losses(run)) + 30, run, process)  # many times the staleness
        mend_of(process.pid, host=2)
        wait_for_events(run, "host_back", 1, process)
        ended_well(process)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert sum(pieces(run).values()) == WORKERS * STEPS


def test_a_host_with_the_only_process_of_a_server_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with training(tmp_path, "server:staleness=inf,servers=2,backup=off") as (process, run):
        emulated_host_processes(process)[0].kill()
        outcome = ended(process)
    assert outcome.code == 1, outcome.err
    assert outcome.says("host host-1 (number 1), which had ranks 1, 4, is lost", "the ranks were stopped")
    assert not events(run, "host_lost")


def test_a_worker_is_added_with_a_host_that_comes_later(tmp_path: Path) -> None:
    endless = {"stop": {"steps": 10**6}, "evaluate": {"every_steps": 100}}
    job, run = write_job(tmp_path / "job.yaml", global_batch=24, **endless), tmp_path / "run"
    arguments = ("train", job, "--plan", "dp=3 sync=server:staleness=inf,backup=off", "--run", run)
    where = folders(tmp_path, 3)
    with host_processes(*arguments, folders=where[:2], later=1) as hosts:
        wait_for_step(5, run, hosts[0])
        environment = {**hosts.environments[1], "PACELINE_HOST_NUMBER": "2"}
        with started("paceline", *arguments, folder=where[2], environment=environment) as third:
            wait_for_events(run, "host_back", 1, hosts[0])
            wait_for(lambda: "rank 2" in pieces(run), hosts[0])
            third.send_signal(signal.SIGTERM)
            ends = outcomes([*hosts, third])
    assert [end.code for end in ends] == [143] * 3, ends[0].err
    assert [event["number"] for event in events(run, "host_back")] == [2]
    assert not events(run, "restart")


def test_a_worker_on_two_hosts_that_are_both_lost_is_back_with_the_later_one(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", global_batch=24, stop={"steps": 10**6}, evaluate={"every_steps": 50})
    plan = "dp=2 fsdp=2 sync=server:staleness=inf,backup=off"
    with on_emulated_hosts(job, 4, plan, from_step=5) as (process, run):
        wait_for(lambda: "rank 2" in pieces(run), process)
        cut_of(process.pid, host=2)
        cut_of(process.pid, host=3)
        wait_for_events(run, "host_lost", 2, process)
        mend_of(process.pid, host=2)
        wait_for_events(run, "host_back", 1, process)
        mend_of(process.pid, host=3)
        wait_for_events(run, "host_back", 2, process)
        before = pieces(run)["rank 2"]
        wait_for(lambda: pieces(run)["rank 2"] > before, process)
        process.send_signal(signal.SIGTERM)
        outcome = ended(process)
    assert outcome.code == 143, outcome.err
    assert [event["ranks"] for event in events(run, "host_back")] == [[], [2, 3]]
    assert not events(run, "restart")


def test_a_host_that_was_lost_too_often_is_left_out_and_asking_for_more_workers_says_so(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 10**6}, evaluate={"every_steps": 50})
    plan, once = "dp=2 sync=server:staleness=inf,backup=off", {"PACELINE_LOSSES_PER_HOUR": "1"}
    with on_emulated_hosts(job, 2, plan, from_step=5, environment=once) as (process, run):
        for losses_so_far in (1, 2):
            emulated_host_processes(process)[0].kill()
            wait_for_events(run, "host_lost", losses_so_far, process)
            if losses_so_far == 1:
                wait_for_events(run, "host_back", 1, process)
        asked = paceline("scale", run, "+1", folder=tmp_path)
        wait_for_step(max(losses(run)) + 50, run, process)
        process.send_signal(signal.SIGTERM)
        outcome = ended(process)
    assert "[scale.left_out]" in asked.error
    assert "rank 1" in asked.error
    assert outcome.code == 143, outcome.err
    assert [event["again"] for event in events(run, "host_lost")] == [True, False]
