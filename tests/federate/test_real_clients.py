"""A server and clients in processes of their own: what they compute, and what they survive."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import DEADLINE_S, ended, events, wait_for
from federate.federation import distance
from federate.processes import CLIENTS, address_on, end, federation, write_federated_job
from paceline.job.job import Job
from paceline.wire.key import read_key
from paceline_federated.client import LocalTraining, first_model
from paceline_federated.real.join import Joining, Participant, checked, connected, own_samples, take_part
from paceline_federated.real.kept import ClientFolder
from paceline_federated.real.terms import digest_of
from paceline_server.client import Client


@pytest.mark.parametrize("rule", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_a_server_and_clients_do_what_the_simulation_does(tmp_path: Path, rule: str) -> None:
    write_federated_job(tmp_path, rule=rule)
    with federation(tmp_path) as processes:
        server, address, screen = processes.serve()
        clients = [processes.join(address, number) for number in range(CLIENTS)]
        _, *joined = end([(server, screen), *clients])
        assert all("ended        steps: 3 done" in outcome.out for outcome in joined)
        assert distance(processes.weights(), processes.simulated()) < 1e-12
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps" / "rank-0.jsonl").read_text().splitlines()]
    assert [(line["clients"], line["dropped"], line["refused"]) for line in lines] == [(CLIENTS, 0, 0)] * 3
    assert all(line["up_bytes"] > 6000 * 8 * CLIENTS for line in lines)


def test_a_killed_server_goes_on_from_its_run_and_its_clients_with_it(tmp_path: Path) -> None:
    write_federated_job(tmp_path, steps=6, rule="scaffold")
    with federation(tmp_path) as processes:
        server, address, _ = processes.serve()
        clients = [processes.join(address, number) for number in range(CLIENTS)]
        rounds = tmp_path / "run" / "steps" / "rank-0.jsonl"
        wait_for(lambda: rounds.exists() and rounds.read_text().count("\n") >= 2, server)
        server.send_signal(signal.SIGKILL)
        server.wait()
        again, _, screen = processes.serve("--resume", listen=address)
        end([(again, screen), *clients])
        assert events(tmp_path / "run", "resume")
        assert distance(processes.weights(), processes.simulated()) < 1e-12


def test_a_killed_client_returns_under_its_identity_with_what_it_kept(tmp_path: Path) -> None:
    write_federated_job(tmp_path, steps=6, rule="scaffold")
    with federation(tmp_path) as processes:
        server, address, screen = processes.serve()
        first, *others = [processes.join(address, number) for number in range(CLIENTS)]
        rounds = tmp_path / "run" / "steps" / "rank-0.jsonl"
        wait_for(lambda: rounds.exists() and rounds.read_text().count("\n") >= 2, server)
        first[0].send_signal(signal.SIGKILL)
        first[0].wait()
        back = processes.join(address, 0)
        end([(server, screen), back, *others])
        assert "client 0 of" in back[1].read_text()
        assert distance(processes.weights(), processes.simulated()) < 1e-12


def test_clients_of_an_edge_count_as_if_they_had_joined_the_server(tmp_path: Path) -> None:
    job = write_federated_job(tmp_path)
    with federation(tmp_path) as processes:
        expected = processes.simulated()
        job.write_text(job.read_text().replace(f"clients: {CLIENTS}", "clients: 2"))
        server, address, screen = processes.serve()
        options = ("--listen", "127.0.0.1:0", "--clients", 2)
        edges = [processes.start("edge", address, *options, "--name", f"edge-{n}", "--number", n) for n in range(2)]
        listening = [address_on(shown, process) for process, shown in edges]
        clients = [processes.join(listening[number // 2], number) for number in range(CLIENTS)]
        end([(server, screen), *edges, *clients])
        assert distance(processes.weights(), expected) < 1e-12


def test_a_client_with_another_key_or_job_or_without_samples_is_turned_away(tmp_path: Path) -> None:
    write_federated_job(tmp_path, steps=1)
    other = tmp_path / "other"
    other.mkdir()
    write_federated_job(other, steps=1, local_steps=7)
    np.savez(tmp_path / "empty.npz", x=np.zeros((0, 1, 28, 28), np.float32), y=np.zeros(0, np.int64))
    with federation(tmp_path) as processes, federation(other) as others:
        server, address, screen = processes.serve()
        for join, says in (
            (others.join(address, 0), "does not have this run's key"),
            (processes.join(address, 0, "--job", "other/job.yaml"), "another job than this client"),
            (processes.join(address, 1, "--data", "empty.npz"), "no samples|0 samples|empty"),
            (processes.join(address, 9, "--data", "0.npz"), "finds no place"),
            (processes.join(address, 2, "--data", "nothing.npz"), "nothing.npz"),
        ):
            assert ended(join[0]).code == 1
            assert re.search(says, join[1].read_text()), join[1].read_text()
            assert "Traceback" not in join[1].read_text()
        end([(server, screen), *(processes.join(address, number) for number in range(CLIENTS))])


def memory_has(process: int, pieces: Sequence[bytes]) -> bool:
    """True if any of the pieces lies in the writable memory of a process."""
    with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
        for line in maps:
            place, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            begin, stop = (int(number, 16) for number in place.split("-"))
            with suppress(OSError, OverflowError):
                memory.seek(begin)
                content = memory.read(stop - begin)
                if any(piece in content for piece in pieces):
                    return True
    return False


@pytest.mark.parametrize("secure", [True, False])
def test_the_server_has_no_update_in_its_memory_where_sums_are_secure(tmp_path: Path, secure: bool) -> None:
    """This process is one of the clients, and knows its own update; the median keeps them all, as a cross-check."""
    how = {"secure": {"clip": 5.0, "phase_s": DEADLINE_S}} if secure else {"aggregate": "median"}
    write_federated_job(tmp_path, steps=1, **how)
    with federation(tmp_path) as processes, ExitStack() as held:
        server, address, screen = processes.serve()
        clients = [processes.join(address, number) for number in range(1, CLIENTS)]
        host, port = address.split(":")
        joining = Joining((host, int(port)), read_key(tmp_path / "key"), "client-0", 0)
        folder = held.enter_context(ClientFolder(tmp_path / "own"))
        there = held.enter_context(connected(joining, folder.identity))
        job = checked(there, None)
        part = Participant.of_samples(job, own_samples(job, tmp_path / "0.npz"), folder, lambda text: None)
        looked: list[bool] = []
        answer = part.answer

        def answered(work: dict[str, Any]) -> tuple[int, str, Any]:
            told = answer(work)
            update, packing = part._update or told[2], part._packing
            if told[1] == "update":
                kept.append(told[2]["delta"][-10:].numpy().tobytes())
            elif told[1] == "vector":
                assert packing is not None
                kept.extend(packing.pack(update)[begin : begin + 16].tobytes() for begin in (6000, 6200, 6300))
                kept.append(update.delta[-10:].numpy().tobytes())
            return told

        kept: list[bytes] = []
        call = there.call

        def looking(function: str, *arguments: Any) -> Any:
            returned = call(function, *arguments)
            if function == "deliver" and arguments[1] in ("update", "vector"):
                looked.append(memory_has(server.pid, kept))
            return returned

        part.answer, there.call = answered, looking  # type: ignore[method-assign]
        assert take_part(there, joining, part, lambda text: None) == "steps: 1 done"
        assert kept
        assert looked == [not secure]
        end([(server, screen), *clients])


@pytest.mark.slow
def test_a_thousand_clients_join_at_once_and_each_counts_once(tmp_path: Path) -> None:
    clients = 1000
    file = write_federated_job(tmp_path, steps=1)
    file.write_text(file.read_text().replace(f"clients: {CLIENTS}", f"clients: {clients}"))
    job, key = Job.load(file), read_key(tmp_path / "key")
    numel = LocalTraining(job, first_model(job)).layout.numel
    update = {"delta": torch.full((numel,), 0.5, dtype=torch.float64), "returned": {}, "steps": 1, "loss": 1.0}

    def take_a_part(number: int) -> str:
        with Client(where, key, name=f"client-{number}") as client:
            about = {"samples": 7, "job": digest_of(job), "numel": numel}
            client.call("join", f"client-{number}", None, about, deadline_s=DEADLINE_S)
            while (work := client.call("work", deadline_s=DEADLINE_S))["do"] == "wait":
                time.sleep(work["pause_s"])
            receipt = client.call("deliver", 1, "update", {**update, "samples": 7}, deadline_s=DEADLINE_S)
            return str(receipt["receipt"])

    with federation(tmp_path) as processes, ThreadPoolExecutor(clients) as threads:
        server, address, screen = processes.serve()
        host, port = address.split(":")
        where = host, int(port)
        receipts = list(threads.map(take_a_part, range(clients)))
        assert receipts == ["counted"] * clients
        end([(server, screen)])
        begun = LocalTraining(job, model := first_model(job)).layout.flatten(model)
        assert distance(processes.weights(), begun + 0.5) < 1e-12
