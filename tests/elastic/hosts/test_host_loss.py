"""Hosts are lost while a run trains: it goes on without them, takes no step twice, and takes them in again."""

from __future__ import annotations

import re
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from commands import ended, ended_well, events, losses, losses_of, rank_of, wait_for, write_job
from host_processes import emulated_host_processes, is_alive, on_emulated_hosts
from hosts import cut_of, mend_of

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2, pytest.mark.slow]
STEPS = 400


def job_in(folder: Path, steps: int = STEPS) -> Path:
    return write_job(folder / "job.yaml", stop={"steps": steps}, checkpoint={"every_steps": 100})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the job when nothing happens."""
    return losses_of(job_in(tmp_path_factory.mktemp("undisturbed")))


def training(
    folder: Path, hosts: int, ranks: int, steps: int = STEPS, **environment: str
) -> AbstractContextManager[tuple[subprocess.Popen[str], Path]]:
    """A run on emulated hosts, once it has taken some steps."""
    return on_emulated_hosts(job_in(folder, steps), hosts, f"dp={ranks} balance=off", environment=environment)


def ranks_of(host: psutil.Process) -> list[psutil.Process]:
    return [process for process in host.children(recursive=True) if rank_of(process) is not None]


def test_a_host_process_that_is_killed_is_one_loss_of_all_its_ranks_and_no_step(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with training(tmp_path, hosts=2, ranks=4) as (process, run):
        [host] = emulated_host_processes(process)
        ranks = ranks_of(host)
        host.kill()
        ended_well(process)
    assert [(event["host"], event["ranks"]) for event in events(run, "host_lost")] == [("host-1", [2, 3])]
    assert len(ranks) == 2
    assert not any(map(is_alive, ranks)), "they went on without their host"
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(undisturbed, rel=1e-3)


def test_two_hosts_that_die_whole_at_once_are_left_out(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with training(tmp_path, hosts=3, ranks=3) as (process, run):
        hosts = emulated_host_processes(process)
        for dying in [child for host in hosts for child in [*ranks_of(host), host]]:
            dying.kill()
        ended_well(process)
    assert sorted(event["host"] for event in events(run, "host_lost")) == ["host-1", "host-2"]
    assert losses(run) == pytest.approx(undisturbed, rel=1e-3)


def test_a_host_whose_link_is_cut_is_left_out_and_stops_its_ranks(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    with training(tmp_path, hosts=2, ranks=2) as (process, run):
        [host] = emulated_host_processes(process)
        ranks = ranks_of(host)
        cut_of(process.pid, host=1)
        outcome = ended_well(process)
    assert outcome.says("host host-1 (number 1), which had rank 1, is lost: nothing has come from it for")
    assert outcome.says("host host-0 (number 0) is lost (nothing has come from it for", "the ranks here are stopped")
    silences_s = re.findall(r"nothing has come from it for ([\d.]+) s", outcome.err)
    assert all(float(silence_s) < 2 for silence_s in silences_s), "the limit of silence, although no kernel answered"
    assert not any(map(is_alive, ranks))
    assert losses(run) == pytest.approx(undisturbed, rel=1e-3)


def test_a_coordinator_that_reaches_less_than_half_of_the_hosts_stops_and_says_so(tmp_path: Path) -> None:
    with training(tmp_path, hosts=3, ranks=3) as (process, run):
        cut_of(process.pid, host=0)
        outcome = ended(process)
    assert outcome.code == 1
    assert outcome.says("of 3 hosts this one reaches 0", "as these may go on, this side stops")
    assert max(losses(run)) < STEPS


def test_a_host_whose_process_was_killed_is_back_with_its_ranks(tmp_path: Path) -> None:
    with training(tmp_path, hosts=2, ranks=4, steps=100_000) as (process, run):
        [host] = emulated_host_processes(process)
        host.kill()
        wait_for(lambda: healed(run) >= {2, 3}, process)
        process.send_signal(signal.SIGTERM)
        outcome = ended(process)
    assert outcome.code == 143, outcome.err
    [lost] = events(run, "host_lost")
    assert (lost["again"], lost["revived"]) == (True, True)
    [back] = events(run, "host_back")
    assert (back["host"], back["ranks"]) == ("host-1", [2, 3])


def test_a_host_behind_a_cut_link_is_back_when_it_is_mended(tmp_path: Path) -> None:
    with training(tmp_path, hosts=3, ranks=3, steps=100_000) as (process, run):
        cut_of(process.pid, host=2)
        wait_for(lambda: events(run, "host_lost"), process)
        mend_of(process.pid, host=2)
        wait_for(lambda: healed(run) >= {2}, process)
        process.send_signal(signal.SIGTERM)
        outcome = ended(process)
    assert outcome.code == 143, outcome.err


def test_a_host_that_is_lost_too_often_is_left_out_and_named(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with training(tmp_path, hosts=2, ranks=2, PACELINE_LOSSES_PER_HOUR="1") as (process, run):
        [host] = emulated_host_processes(process)
        host.kill()
        ended_well(process)
    assert [(event["host"], event["again"]) for event in events(run, "host_lost")] == [("host-1", False)]
    assert not events(run, "host_back")
    assert losses(run) == pytest.approx(undisturbed, rel=1e-3)


def healed(run: Path) -> set[int]:
    """Ranks that take part again."""
    return {event["rank"] for event in events(run, "healed")}
