"""One command on several hosts trains one run, and ends everywhere in the same way."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from commands import (
    checkpoints,
    ended,
    events,
    in_a_process,
    kill_rank,
    losses,
    paceline,
    processes_of,
    rank_of,
    started,
    wait_for,
    wait_for_step,
    write_job,
)
from host_processes import HostProcesses, folders, host_processes, outcomes, ports_in, run_on, stop_all
from hosts import Hosts
from paceline.cluster.network import inside
from paceline.run.record.run import Run

LONG = {"stop": {"steps": 100_000}, "checkpoint": {"every_steps": 20}}
OFF = {"PACELINE_RECOVERY": "off"}


@contextmanager
def training_on(
    folder: Path, plan: str = "dp=2", *options: object, environment: Mapping[str, str] = {}, later: int = 0
) -> Iterator[tuple[HostProcesses, Path]]:
    """Two host processes of a long run, once it has taken some steps."""
    job, run = write_job(folder / "job.yaml", **LONG), folder / "run"
    arguments = ("train", job, "--plan", plan, "--run", run, *options)
    with host_processes(*arguments, folders=folders(folder), environment=environment, later=later) as hosts:
        wait_for_step(5, run, hosts[0])
        yield hosts, run


def lines(run: Path, rank: int) -> list[int]:
    """The lengths in steps that the record of a rank has: the number of every line."""
    return [yaml.safe_load(line)["step"] for line in (run / "steps" / f"rank-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.timeout(240)
def test_two_hosts_train_what_one_process_trains(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    job = write_job(first / "job.yaml", stop={"steps": 6}, checkpoint={"every_steps": 3})
    zero, one = run_on("train", job, "--plan", "dp=2", "--run", "run", folders=[first, second])
    assert (zero.code, one.code) == (0, 0), zero.err + one.err
    alone = paceline("train", job, "--plan", "dp=1", "--run", "alone", folder=first)
    assert alone.code == 0, alone.err
    assert losses(first / "run") == pytest.approx(losses(first / "alone"), rel=1e-5)
    assert lines(first / "run", 1) == [1, 2, 3, 4, 5, 6]
    cluster = yaml.safe_load((first / "run" / "cluster.yaml").read_text())
    assert len(cluster["hosts"]) == 2
    assert all(any(link["kind"] == "measured" for link in host["links"]) for host in cluster["hosts"])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_three_hosts_measure_every_link_unless_told_not_to(tmp_path: Path) -> None:
    where = folders(tmp_path, 3)
    job = write_job(where[0] / "job.yaml")
    for run, environment in (("run", {}), ("unmeasured", {"PACELINE_MEASURE": "off"})):
        arguments = ("train", job, "--plan", "dp=3", "--run", run)
        with host_processes(*arguments, folders=where, environment=environment) as hosts:
            found = outcomes(hosts)
        assert [outcome.code for outcome in found] == [0, 0, 0], found[0].err
        cluster = yaml.safe_load((where[0] / run / "cluster.yaml").read_text())
        measured = [{link["name"] for link in host["links"] if link["kind"] == "measured"} for host in cluster["hosts"]]
        every = [{"channel:1", "channel:2"}, {"channel:0", "channel:2"}, {"channel:0", "channel:1"}]
        assert measured == (every if run == "run" else [set(), set(), set()])


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.timeout(240)
def test_hosts_without_a_common_disk_save_resume_and_record_as_one(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    job = first / "job.yaml"
    for steps in (6, 9):
        write_job(job, stop={"steps": steps}, checkpoint={"every_steps": 3})
        more = ["--resume"] if steps == 9 else []
        arguments = ("train", job, "--plan", "fsdp=2", "--run", first / "run", *more)
        with host_processes(*arguments, folders=[first, second], apart=True) as hosts:
            zero, one = outcomes(hosts)
        assert (zero.code, one.code) == (0, 0), zero.err + one.err
    assert [event["step"] for event in events(first / "run", "resume")] == [6]
    assert lines(first / "run", 1) == list(range(1, 10))
    assert "step-00000009" in checkpoints(first / "run")
    alone = paceline("train", job, "--plan", "dp=1", "--run", "alone", folder=first)
    assert alone.code == 0
    assert losses(first / "run") == pytest.approx(losses(first / "alone"), rel=1e-4)
    assert not [name for name in os.listdir(second) if name.startswith("paceline-scratch")]


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
@pytest.mark.timeout(240)
def test_between_two_networks_every_port_is_behind_the_key(tmp_path: Path, hosts: Hosts) -> None:
    first, second = folders(tmp_path)
    job = write_job(first / "job.yaml", **LONG)
    run, emulated = first / "run", hosts(2, rate="1gbit")
    arguments = ("train", job, "--plan", "dp=2", "--run", run)
    with host_processes(*arguments, folders=[first, second], apart=True, emulated=emulated) as processes:
        wait_for_step(5, run, processes[0])
        listening = [ports_in(host.namespace) for host in emulated.emulation.hosts]
        answers = [
            intruder(host.namespace, *where)
            for host, found in zip(emulated.emulation.hosts, listening, strict=True)
            for where in found
        ]
        wait_for_step(50, run, processes[0])
        stop_all(processes)
        zero, one = outcomes(processes)
    assert (zero.code, one.code) == (143, 143), zero.err + one.err
    for host, found in zip(emulated.emulation.hosts, listening, strict=True):
        assert {address for address, _ in found} <= {host.address}
    assert answers
    assert all(b"paceline" not in answer and len(answer) < 64 for answer in answers), answers
    assert events(run, "start")[0]["transport"] == "tcp"
    assert lines(run, 1) == lines(run, 0)
    alone = paceline("train", write_job(job, stop={"steps": 50}), "--plan", "dp=1", "--run", "alone", folder=first)
    assert alone.code == 0
    together = losses(run)
    assert {step: together[step] for step in range(1, 51)} == pytest.approx(losses(first / "alone"), rel=1e-3)


def intruder(network: str, address: str, port: int) -> bytes:
    """What a port answers to somebody without the key, who speaks plainly."""

    def ask() -> bytes:
        with suppress(OSError), socket.create_connection((address, port), 10) as link:
            link.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(64))
            link.settimeout(10)
            return link.recv(4096)
        return b""  # nothing, or it was closed

    return inside(network, ask)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_with_its_host_and_ends_all(tmp_path: Path, rank: int) -> None:
    with training_on(tmp_path, environment=OFF) as (hosts, _):
        kill_rank(rank, hosts[rank])
        zero, one = outcomes(hosts)
    assert (zero.code, one.code) == (1, 1)
    assert zero.says(f"rank {rank} (host ", f"-{rank}, pid", "SIGKILL", "[launch.rank_killed]")


@pytest.mark.slow
def test_a_restart_starts_the_ranks_of_all_hosts_again(tmp_path: Path) -> None:
    with training_on(tmp_path, "dp=2", "--restarts", 1, environment=OFF) as (hosts, run):
        wait_for(lambda: len(losses(run)) > 50 and checkpoints(run), hosts[0])
        kill_rank(1, hosts[1])
        wait_for(lambda: events(run, "resume"), hosts[0])
        hosts[0].send_signal(signal.SIGTERM)
        zero, one = outcomes(hosts)
    assert (zero.code, one.code) == (143, 143), zero.err
    assert [(event["attempt"], event["rank"]) for event in events(run, "restart")] == [(1, 1)]


@pytest.mark.slow
def test_a_host_that_is_lost_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", stop={"steps": 300})
    with host_processes("train", job, "--plan", "dp=2", "--run", tmp_path / "run", folders=folders(tmp_path)) as hosts:
        wait_for_step(5, tmp_path / "run", hosts[0])
        hosts[1].kill()
        zero, _ = outcomes(hosts)
    assert zero.code == 0, zero.err
    assert [(event["number"], event["ranks"]) for event in events(tmp_path / "run", "host_lost")] == [(1, [1])]
    assert sorted(losses(tmp_path / "run")) == list(range(1, 301))


@pytest.mark.slow
def test_hosts_stop_their_ranks_when_the_coordinator_is_lost(tmp_path: Path) -> None:
    with training_on(tmp_path, environment=OFF) as (hosts, _):
        ranks = [process for process in processes_of(hosts[1]) if rank_of(process) is not None]
        hosts[0].kill()
        _, one = outcomes(hosts)
    assert one.code == 1
    assert one.says("(number 0) is lost")
    assert ranks
    assert not any(process.is_running() for process in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_sigterm_at_any_host_saves_and_ends_a_run_that_needs_all_hosts(tmp_path: Path, number: int) -> None:
    with training_on(tmp_path, environment=OFF) as (hosts, run):
        hosts[number].send_signal(signal.SIGTERM)
        zero, one = outcomes(hosts)
    assert (zero.code, one.code) == (143, 143), zero.err
    assert events(run, "end")[0]["reason"] == "SIGTERM"
    assert len(checkpoints(run)) > 0


def heeds_sigterm(pid: int) -> bool:
    """True if a process has a handler for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
def test_sigterm_while_hosts_wait_for_one_another_ends_each_cleanly(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    where = folders(tmp_path, 3)
    with host_processes("train", job, folders=where, environment={"PACELINE_HOSTS": "4"}) as hosts:
        for host in hosts:
            wait_for(partial(heeds_sigterm, host.pid), host)  # so it is about to meet the others
            host.send_signal(signal.SIGTERM)
        found = outcomes(hosts)
    assert found[0].code == 143
    assert all(outcome.code in (143, 1) for outcome in found)  # 1: host 0 was gone before it was reached
    assert found[0].says("ended by SIGTERM")
    assert not any("Traceback" in outcome.err for outcome in found)


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.timeout(240)
def test_check_compares_on_hosts_without_a_common_folder(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    job = write_job(first / "job.yaml")
    arguments = ("check", job, "--plan", "fsdp=2", "--steps", 2)
    with host_processes(*arguments, folders=[first, second], apart=True) as hosts:
        zero, one = outcomes(hosts)
    assert (zero.code, one.code) == (0, 0), zero.err + zero.out
    assert zero.says("parity holds")
    assert not [*first.glob("paceline-scratch*"), *second.glob("paceline-scratch*")]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_links_run_over_hosts(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    words = ("links", "--ranks", 2, "--sizes", "1KiB", "--collectives", "all_reduce", "--transports", "shm")
    zero, one = run_on(*words, folders=[first, second])
    assert (zero.code, one.code) == (0, 0), zero.err
    assert zero.says("2 hosts", "none wrong")


@pytest.mark.slow
def test_the_key_of_the_user_is_found_where_none_was_handed_over_and_a_host_without_one_is_told(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    job = write_job(first / "job.yaml")
    home = {"PACELINE_KEY_FILE": "", "PACELINE_HOME": str(tmp_path / "home")}
    with host_processes("train", job, "--run", "none", folders=[first, second], environment=home) as hosts:
        for outcome in outcomes(hosts):
            assert outcome.code == 1
            assert f"{tmp_path}/home/key" in outcome.error
            assert "[key.host_without]" in outcome.error
    assert in_a_process("key", folder=first, **home).code == 0
    words = ("train", job, "--plan", "dp=2", "--run", "run")
    with host_processes(*words, folders=[first, second], environment=home) as hosts:
        assert [outcome.code for outcome in outcomes(hosts)] == [0, 0]


@pytest.mark.slow
def test_a_host_that_a_plan_leaves_without_a_rank_is_named(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    zero, one = run_on(
        "train", write_job(first / "job.yaml"), "--plan", "dp=1", "--run", "run", folders=[first, second]
    )
    assert (zero.code, one.code) == (0, 0), zero.err
    assert zero.says("plan dp=1 fills the hosts in order and leaves no ranks for", "A plan of 2 ranks uses all")


@pytest.mark.slow
def test_a_host_on_which_the_command_is_started_again_is_back(tmp_path: Path) -> None:
    with training_on(tmp_path) as (hosts, run):
        hosts[1].kill()
        wait_for(lambda: events(run, "host_lost"), hosts[0])
        hosts.start_again(1)
        wait_for(lambda: events(run, "healed"), hosts[0])
        stop_all(hosts)
        zero, one = outcomes(hosts)
    assert (zero.code, one.code) == (143, 143), zero.err + one.err
    assert [event["number"] for event in events(run, "host_back")] == [1]
    assert [event["rank"] for event in events(run, "healed")] == [1]


@pytest.mark.slow
def test_a_run_begins_with_the_hosts_that_are_there_and_takes_in_one_that_comes_later(tmp_path: Path) -> None:
    job, run = write_job(tmp_path / "job.yaml", **LONG), tmp_path / "run"
    arguments, where = ("train", job, "--plan", "dp=3", "--run", run), folders(tmp_path, 3)
    with host_processes(*arguments, folders=where[:2], later=1) as hosts:
        wait_for_step(5, run, hosts[0])
        environment = {**hosts.environments[1], "PACELINE_HOST_NUMBER": "2"}
        with started("paceline", *arguments, folder=where[2], environment=environment) as third:
            wait_for(lambda: events(run, "healed"), hosts[0])
            stop_all([*hosts, third])
            zero, one, two = outcomes([*hosts, third])
    assert (zero.code, one.code, two.code) == (143, 143, 143), zero.err + one.err + two.err
    assert [event["number"] for event in events(run, "host_back")] == [2]
    assert [event["rank"] for event in events(run, "healed")] == [2]
    assert [event["replicas"] for event in events(run, "generation")] == [3]


@pytest.mark.slow
def test_a_run_with_fewer_hosts_than_the_least_waits_and_ends_when_none_comes_back(tmp_path: Path) -> None:
    with training_on(tmp_path, environment={"PACELINE_HOSTS_WAIT_S": "40"}, later=1) as (hosts, run):
        assert "[scale.fewest_hosts]" in paceline("scale", run, "-1", folder=tmp_path).error
        hosts[1].kill()
        wait_for(lambda: events(run, "host_lost"), hosts[0])
        hosts.start_again(1)
        wait_for(lambda: events(run, "healed"), hosts[0])
        hosts[1].kill()
        wait_for(lambda: len(events(run, "host_lost")) == 2, hosts[0])
        zero = ended(hosts[0])
    assert zero.code == 1, zero.err
    assert [event["rank"] for event in events(run, "healed")] == [1]
    assert {event["waits_s"] for event in events(run, "host_lost")} == {40.0}
    lost_at = events(run, "host_lost")[-1]["time"]
    assert sum(step["time"] > lost_at for step in Run(run).steps()) <= 1, "it went on with too few"


@pytest.mark.slow
def test_a_run_that_needs_all_hosts_says_so_where_one_has_not_come(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    arguments, where = ("train", job, "--plan", "fsdp=3", "--run", tmp_path / "run"), folders(tmp_path)
    with host_processes(*arguments, folders=where, later=1) as hosts:
        zero, one = outcomes(hosts)
    assert (zero.code, one.code) == (1, 1)
    assert zero.says("host-2 (number 2)", "[hosts.no_whole_replica]")


@pytest.mark.slow
def test_a_host_is_released_from_a_run_that_goes_on_and_is_taken_in_again(tmp_path: Path) -> None:
    with training_on(tmp_path) as (hosts, run):
        assert paceline("scale", run, "-1", folder=tmp_path).says("host number 1", "rank 1")
        released = ended(hosts[1])
        assert released.code == 0, released.err
        assert "[scale.cannot_shrink]" in paceline("scale", run, "-1", folder=tmp_path).error
        assert paceline("scale", run, "+1", folder=tmp_path).says("host number 1")
        hosts.start_again(1)
        wait_for(lambda: events(run, "healed"), hosts[0])
        stop_all(hosts)
        zero, one = outcomes(hosts)
    assert (zero.code, one.code) == (143, 143), zero.err + one.err
    scaled = [(event["by"], event["ranks"], event["host"]) for event in events(run, "scaled")]
    assert scaled == [(-1, [1], 1), (1, [1], 1)]
    assert [event["rank"] for event in events(run, "healed")] == [1]
    assert not events(run, "host_lost")
    assert not events(run, "lost")


def test_a_least_number_of_hosts_is_an_option_of_the_command_that_each_host_is_started_with(tmp_path: Path) -> None:
    outcome = in_a_process("train", write_job(tmp_path / "job.yaml"), "--num-hosts", "2..8", folder=tmp_path)
    assert "PACELINE_HOST_NUMBER" in outcome.error
    assert "[launcher.variable_missing]" in outcome.error
