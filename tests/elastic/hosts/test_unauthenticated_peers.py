"""Unauthenticated peers at every port of a whole run: it trains what it trains without them."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

import pytest

from commands import events, losses, wait_for_step, write_job
from host_processes import host_processes, outcomes, ports_in, stop_all
from hosts import EmulatedHosts, Hosts
from paceline.cluster.network import inside
from unauthenticated import mutated_hello

CONNECTIONS, OPEN_AT_A_TIME = 6000, 500


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.needs_iproute2
@pytest.mark.timeout(400)
def test_a_run_that_unauthenticated_peers_flood_has_the_losses_of_one_that_is_left_alone(
    tmp_path: Path, hosts: Hosts
) -> None:
    emulated, folders = hosts(3, rate="1gbit"), [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    flooded, told = trained(tmp_path / "flooded", folders, emulated, steps=100_000, flood=True)
    assert "does not belong to this run and was turned away" in told
    assert events(tmp_path / "flooded", "start")[0]["transport"] == "tcp"
    assert events(tmp_path / "flooded", "unauthenticated")[0]["connections"] > 0
    alone, told = trained(tmp_path / "alone", folders, emulated, steps=max(flooded), flood=False)
    assert "turned away" not in told
    assert events(tmp_path / "alone", "unauthenticated") == []
    assert alone == flooded


def trained(
    run: Path, folders: list[Path], emulated: EmulatedHosts, *, steps: int, flood: bool
) -> tuple[dict[int, float], str]:
    """The losses of a run on the first two hosts, and what these said.

    A flood comes from the third host while they train, and then they are asked to end.
    """
    job = write_job(folders[0] / "job.yaml", stop={"steps": steps})
    two, third = emulated.emulation.hosts[:2], emulated.emulation.hosts[2]
    with host_processes("train", job, "--plan", "dp=2", "--run", run, folders=folders, emulated=emulated) as processes:
        if flood:
            wait_for_step(5, run, processes[0])
            doors = [door for host in two for door in sorted(ports_in(host.namespace))]
            assert {address for address, _ in doors} == {host.address for host in two}
            inside(third.namespace, lambda: knock(doors))
            wait_for_step(len(losses(run)) + 5, run, processes[0])
            stop_all(processes)
        found = outcomes(processes)
    said = "".join(outcome.err for outcome in found)
    assert [outcome.code for outcome in found] == ([143, 143] if flood else [0, 0]), said
    return losses(run), said


def knock(doors: list[tuple[str, int]]) -> None:
    """At all of them in turns; a third say nothing, the others send a changed handshake, and all stay."""
    there: list[socket.socket] = []
    for number in range(CONNECTIONS):
        intruder = socket.socket()
        intruder.settimeout(2)
        there.append(intruder)
        with suppress(OSError):  # a queue that is full answers nobody
            intruder.connect(doors[number % len(doors)])
            if number % 3:
                intruder.sendall(mutated_hello(number))
        if len(there) > OPEN_AT_A_TIME:
            there.pop(0).close()
    for intruder in there:
        intruder.close()
