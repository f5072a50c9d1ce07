"""Ranks on emulated hosts: started, watched and ended like those of this machine, but with a network between them."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import (
    checkpoints,
    ended,
    events,
    losses,
    paceline,
    processes_of,
    started,
    wait_for_step,
    words_of,
    write_job,
)
from forked import python
from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import LinkBytes
from paceline.cluster.host import Emulate
from paceline.elastic.attempt import launch, places_on
from paceline.elastic.ranks import Setting
from paceline.errors import LaunchError
from refusals import raises

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_iproute2]
WHAT = Path(__file__).with_name("what_ranks_do.py")
DIGITS = Path(__file__).parents[2] / "examples" / "digits.yaml"


def run(
    what: str, folder: Path, cluster: Cluster, ranks: int, on_end: Callable[[dict[str, LinkBytes]], None] | None = None
) -> list[Any]:
    """Launch a function of what_ranks_do.py on a cluster's hosts; returns what the ranks wrote."""
    with places_on(cluster, ranks, on_end) as places:
        launch(Setting([f"{WHAT}:{what}", str(folder)], places))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def write_cluster(file: Path, **emulate: Any) -> Path:
    file.write_text(json.dumps({"emulate": emulate}))
    return file


def test_every_rank_finds_its_host_and_its_place_there_in_its_environment(tmp_path: Path) -> None:
    told = run("tell", tmp_path, Cluster(emulate=Emulate(hosts=2, cpu=1)), 3)
    names = ("PACELINE_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PACELINE_ADDRESS", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")
    assert [tuple(t["environment"][name] for name in names) for t in told] == [
        ("host-0", "0", "2", "10.77.0.1", "eth0", "10.77.0.1"),
        ("host-0", "1", "2", "10.77.0.1", "eth0", "10.77.0.1"),
        ("host-1", "0", "1", "10.77.0.2", "eth0", "10.77.0.1"),
    ]
    launchers = [int(t["environment"]["PACELINE_LAUNCHER"]) for t in told]
    assert launchers[:2] == [os.getpid()] * 2
    assert launchers[2] != os.getpid(), "host 1 has a process of its own"


def test_ranks_meet_and_listen_only_at_the_address_of_their_host(tmp_path: Path) -> None:
    carried: list[dict[str, LinkBytes]] = []
    listening = run("list_listeners", tmp_path, Cluster(emulate=Emulate(hosts=2, cpu=1)), 2, carried.append)
    assert [set(addresses) for addresses in listening] == [{"10.77.0.1"}, {"10.77.0.2"}]
    [links] = carried
    assert links["host-0"].sent_bytes == links["host-1"].received_bytes > 0


def test_a_rank_that_fails_is_told_with_its_host(tmp_path: Path) -> None:
    with raises(LaunchError, "launch.rank_raised", rank=1, type="ValueError"):
        run("raise_on_rank_1", tmp_path, Cluster(emulate=Emulate(hosts=2, cpu=1)), 2)


def test_a_rank_that_is_killed_is_told_with_its_host(tmp_path: Path) -> None:
    with raises(LaunchError, "launch.rank_killed"):
        run("be_killed_on_rank_1", tmp_path, Cluster(emulate=Emulate(hosts=2, cpu=1)), 2)


@pytest.mark.parametrize(("keeper", "cpu"), [pytest.param("lives", 1, marks=pytest.mark.slow), ("killed", None)])
def test_ranks_whose_launcher_is_killed_save_while_their_network_is_still_there(
    keeper: str, cpu: float | None, tmp_path: Path
) -> None:
    code = f"""
from forked import python
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Emulate
from paceline.elastic.attempt import launch, places_on
from paceline.elastic.ranks import Setting
with places_on(Cluster(emulate=Emulate(hosts=2, cpu={cpu})), 2) as places:
    launch(Setting([{f"{WHAT}:meet_after_sigterm"!r}, {str(tmp_path)!r}], places))
"""
    until = time.monotonic() + 60
    with python(code, {"TMPDIR": str(tmp_path)}) as process:
        try:
            while len(list(tmp_path.glob("ready-*"))) < 2:
                assert time.monotonic() < until, "waited in vain"
                time.sleep(0.02)
            ranks_and_keeper = processes_of(process)
            if keeper == "killed":
                [it] = [each for each in ranks_and_keeper if "paceline.cluster.emulate" in words_of(each)]
                it.kill()
        finally:
            process.kill()
    while len(list(tmp_path.glob("saved-*"))) < 2:
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    _, alive = psutil.wait_procs(ranks_and_keeper, timeout=until - time.monotonic())
    assert not alive


def test_the_record_of_a_run_on_emulated_hosts_says_where_it_ran_and_what_the_links_carried(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path / "cluster.yaml", hosts=2, rate="1gbit", cpu=1)
    job = write_job(tmp_path / "job.yaml")
    outcome = paceline("train", job, "--cluster", cluster, "--plan", "dp=2", "--run", "run", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.says("2 hosts", "emulated on this machine, links of 1gbit, cpu 1")
    assert Cluster.load(tmp_path / "run" / "cluster.yaml") == Cluster.load(cluster)
    [event] = events(tmp_path / "run", "links")
    assert list(event["links"]) == ["host-0", "host-1"]
    assert event["links"]["host-0"]["sent_bytes"] == event["links"]["host-1"]["received_bytes"] > 10_000


@pytest.mark.slow
def test_a_job_trains_on_emulated_hosts_as_it_does_on_this_machine(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path / "cluster.yaml", hosts=2, rate="1gbit", cpu=1, delay_ms=1)
    for folder, where in (("there", ("--cluster", cluster)), ("here", ())):
        plan = ("--plan", "dp=2 transport=gloo balance=off")
        outcome = paceline("train", DIGITS, *where, *plan, "--run", folder, folder=tmp_path)
        assert outcome.code == 0, outcome.err
    assert losses(tmp_path / "there") == losses(tmp_path / "here")


@pytest.mark.slow
def test_a_run_on_emulated_hosts_saves_when_its_launcher_is_killed_and_goes_on_when_started_again(
    tmp_path: Path,
) -> None:
    cluster = write_cluster(tmp_path / "cluster.yaml", hosts=2, rate="1gbit", cpu=1)
    arguments = ("train", DIGITS, "--cluster", cluster, "--plan", "dp=2", "--run", "run")
    with started("paceline", *arguments, folder=tmp_path) as process:
        wait_for_step(5, tmp_path / "run", process)
        ranks_and_keeper = processes_of(process)
        process.kill()
        process.wait(30)  # else its children are killed as well
    _, alive = psutil.wait_procs(ranks_and_keeper, timeout=60)
    assert not alive
    assert checkpoints(tmp_path / "run")
    with started("paceline", *arguments, "--resume", folder=tmp_path) as process:
        outcome = ended(process, deadline_s=120)
    assert outcome.code == 0
    assert outcome.says("metric_above")


def test_parity_is_checked_on_emulated_hosts(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    cluster = write_cluster(tmp_path / "cluster.yaml", hosts=2, cpu=1)
    outcome = paceline("check", job, "--cluster", cluster, "--plan", "dp=2", folder=tmp_path)
    assert outcome.code == 0
    assert outcome.says("parity holds")
