"""Federated training of 8 real clients on emulated hosts, against the simulation of the same job. Needs root.

    python benchmarks/federated_hosts.py [--json] [--target ACCURACY]

Figures:
- `rounds_to_simulation`: rounds of the real clients, with secure aggregation, until the target / the simulation's.
- `rounds_hostile`: rounds until the target where two of the clients are killed on the way, and one poisons the sums.
- `poisoner_found_round`: the round after which that one is asked no more.
- `lost_rounds`: rounds whose sums were refused until then.

Each client is a process in a network namespace of its own, with its own part of the data; the server is in another. All
connections are TLS.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from measure import environment_line
from paceline.cluster.cluster import Emulate
from paceline.cluster.emulate.hosts import EmulatedHost, Emulation, enter_host
from paceline.job.job import Job
from paceline.job.zoo.data.samples import Selection
from paceline.run.record.run import Run
from paceline.units import size
from paceline.wire.key import RunKey
from paceline_federated.real.join import Joining, Participant, checked, connected, take_part
from paceline_federated.real.kept import ClientFolder
from paceline_federated.real.serve import serve
from paceline_federated.section import federate_spec
from paceline_federated.simulation.deal import deal
from paceline_federated.simulation.run import simulate

CLIENTS, PORT, DEADLINE_S = 8, 29530, 300.0
KILLED = {2: 4, 5: 8}  # client -> round after which it is killed
POISONER, POISON = 6, 2**28
MOST_ROUNDS = 200
NETWORK = Path(__file__).with_name("federated.py").resolve()
Answer = Callable[[dict[str, Any]], tuple[int, str, Any]]
_fork = multiprocessing.get_context("fork")  # torch is imported once


def main() -> None:
    """Run all three, print the table, and with --json a last line for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--target", type=float, default=0.9, help="validation accuracy to reach (default 0.9)")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("emulated hosts need root")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        figures = measured(Path(name), arguments.target)
    print(environment_line())
    if arguments.json:
        print(json.dumps({"figures": figures, "environment": {"machine": environment_line()}}))


def measured(folder: Path, target: float) -> dict[str, float]:
    """All figures of this page."""
    what = job(target)
    clean = federated(what, folder / "clean", hostile=False)
    hostile = federated(what, folder / "hostile", hostile=True)
    simulated = simulate(what, folder / "simulated")
    rows = {"simulation": simulated, "8 clients": clean, "2 killed, 1 poisons": hostile}
    print(f"{'':22} rounds   accuracy   clients a round   dropped   refused   sent by clients")
    for name, run in rows.items():
        lines = run.steps()
        counts = [line["clients"] for line in lines]
        dropped, refused = (sum(line[key] for line in lines) for key in ("dropped", "refused"))
        shown = f"{len(lines):6}   {run.metrics['accuracy']:8.4f}   {min(counts)} to {max(counts):<10}"
        up_bytes = sum(line["up_bytes"] for line in lines)
        print(f"{name:22} {shown}   {dropped:7}   {refused:7}   {size(up_bytes)}", flush=True)
    found = [event for event in hostile.events() if event["event"] == "poisoner"]
    assert [event["client"] for event in found] == [f"client-{POISONER}"], f"found as poisoners: {found}"
    return {
        "rounds_to_simulation": len(clean.steps()) / len(simulated.steps()),
        "rounds_hostile": float(len(hostile.steps())),
        "poisoner_found_round": float(found[0]["step"]),
        "lost_rounds": float(sum(line["clients"] == 0 for line in hostile.steps())),
    }


def job(target: float) -> Job:
    """The job of all three."""
    return Job(
        name="hosts",
        model={"factory": f"{NETWORK}:network"},
        data={"kind": "digits", "shape": [1, 8, 8]},
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch=32,
        stop={"steps": MOST_ROUNDS, "metric_above": {"accuracy": target}},
        evaluate={"every_steps": 1},
        federate={
            "clients": CLIENTS,
            "deadline_s": 10.0,
            "max_failures": 20,
            "secure": {"clip": 2.0, "phase_s": 3.0, "most_samples": 200},
        },
    )


def federated(what: Job, folder: Path, *, hostile: bool) -> Run:
    """One run with real clients."""
    folder.mkdir()
    key, parts = RunKey.make(), samples_of(what)
    with Emulation(Emulate(hosts=CLIENTS + 1)) as emulation, ExitStack() as held:
        *places, top = emulation.hosts
        where = top.address, PORT
        server = started(held, top, lambda: serve(what, folder / "run", where, key, patience_s=60.0, say=told))
        clients = [
            started(held, place, client_of(what, where, key, number, parts[number], folder, hostile))
            for number, place in enumerate(places)
        ]
        until = time.monotonic() + DEADLINE_S
        while server.is_alive() and time.monotonic() < until:
            server.join(0.05)
            if hostile:
                kill_due(folder / "run" / "steps" / "rank-0.jsonl", clients)
        if server.exitcode != 0:
            raise SystemExit(f"the server ended with {server.exitcode}")
    return Run(folder / "run")


def told(line: str) -> None:
    """Show what the server says, without its evaluations."""
    if "validation" not in line:
        print(f"  server: {line}", file=sys.stderr, flush=True)


def samples_of(what: Job) -> list[Selection]:
    """Each client's own samples, as the simulation divides them."""
    train = what.data.build(input_shape=what.model.input_shape(), seed=what.seed).train
    parts = deal(train, federate_spec(what).partition, CLIENTS, what.seed)
    return [Selection(train, parts[number]) for number in range(CLIENTS)]


def started(held: ExitStack, place: EmulatedHost, work: Callable[[], object]) -> BaseProcess:
    """A process on an emulated host, killed at the end."""

    def run() -> None:
        enter_host(place.entry)
        work()

    process = _fork.Process(target=run)
    process.start()

    def end() -> None:
        process.join(5)
        process.kill()
        process.join()

    held.callback(end)
    return process


def client_of(
    what: Job, where: tuple[str, int], key: RunKey, number: int, samples: Selection, folder: Path, hostile: bool
) -> Callable[[], object]:
    """The work of a client."""

    def work() -> None:
        joining = Joining(where, key, f"client-{number}", number)
        with ClientFolder(folder / f"client-{number}") as kept, connected(joining, kept.identity) as server:
            part = Participant.of_samples(checked(server, what), samples, kept, lambda text: None)
            if hostile and number == POISONER:
                vars(part)["answer"] = poisoned(part.answer)
            take_part(server, joining, part, lambda text: None)

    return work


def poisoned(answer: Answer) -> Answer:
    """The answers of a client that adds to every number of its masked vector."""

    def changed(work: dict[str, Any]) -> tuple[int, str, Any]:
        round, kind, content = answer(work)
        return round, kind, content + POISON if kind == "vector" else content

    return changed


def kill_due(rounds: Path, clients: Sequence[BaseProcess]) -> None:
    """Kill the clients whose round has come."""
    done = rounds.read_bytes().count(b"\n") if rounds.exists() else 0
    for number, after in KILLED.items():
        pid = clients[number].pid
        if done >= after and clients[number].is_alive() and pid is not None:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
