"""Parameter server under 200 kills of workers, servers and links: updates lost or applied twice, and the gap.

Three workers take tickets and push; a push for ticket t adds 1 to element t mod 4093 of the weights, so at the end the
weights say how often each was applied. Meanwhile processes are killed (SIGKILL) and started again, and connections are
closed in the middle of whatever goes over them. The gap is the longest time between two answered pushes, of any worker,
around the kill of a server: the median of all kills, and the worst.

The second part counts the bytes on the wire of steps that pull and push rows of a sparse table.

    python benchmarks/server_faults.py [--kills 200] [--seed 0] [--json]
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import socket
import stat
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from measure import environment_line, parser_of, print_figures
from paceline.errors import PacelineError
from paceline.wire.key import RunKey
from paceline.wire.store import StoreClient, StoreServer
from paceline_server.parameters import (
    ParameterServer,
    ServerClient,
    ServerSettings,
    TensorSpec,
    View,
    Views,
)

SIZE, PIECES, AHEAD = 4093, 8, 200
DEADLINE_S = 60.0
WORKERS = ("rank 0", "rank 1", "rank 2")
AROUND_S = 3.0
ROWS, WIDTH, TOUCHED, STEPS = 100_000, 64, 2000, 20


def main() -> None:
    """Run both parts, print a table, and with --json a line of figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = Arena(Path(folder), random.Random(options.seed)).play(options.kills)
    figures["bytes_to_rows"] = bytes_to_rows()
    for name, value in figures.items():
        print(f"{name:24} {value:12.3f}")
    print(environment_line())
    if options.json:
        print_figures(figures)


class Arena:
    """A store, two processes of a server, three workers, and what is done to them."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["torch", "paceline_server.parameters"])
        self.servers: dict[str, BaseProcess] = {}
        self.workers: dict[str, BaseProcess] = {}
        self.count = 0
        self.server_kills: list[float] = []

    def play(self, kills: int) -> dict[str, float]:
        """Kill so often, let the workers finish, and count."""
        with_store = StoreServer(None, self.folder / "store")
        asks = StoreClient(self.folder / "store", None, DEADLINE_S)
        self.views = Views(asks, "faults")
        try:
            for _ in range(2):
                self.start_server()
            self.view(lambda view: view.backup is not None)
            with client_of(self.folder, self.views, "controller") as controller:
                return self.played(controller, kills)
        finally:
            for process in [*self.servers.values(), *self.workers.values()]:
                process.kill()
                process.join()
            asks.close()
            with_store.close()

    def played(self, controller: ServerClient, kills: int) -> dict[str, float]:
        """Keep tickets coming while something is killed every moment; then compare the weights with the tickets."""
        controller.initialize({"w": torch.zeros(SIZE, dtype=torch.float64)})
        until = batches = 0
        for name in WORKERS:
            self.start_worker(name)
        faults = dict.fromkeys(("worker", "primary", "backup", "link of a worker", "link of a server"), 0)
        begin = time.monotonic()
        while (done := sum(faults.values())) < kills or batches < until:
            batches = controller.statistics()[0]["batches"]
            if done < kills:
                until = max(until, batches + AHEAD)
                controller.open(until)
                time.sleep(self.chance.uniform(0.02, 0.2))
                faults[self.strike(partial(controller.open, until))] += 1
            else:
                time.sleep(0.05)
            assert time.monotonic() < begin + 60 + 5 * kills, f"{batches} of {until} global batches are applied"
        weights = torch.zeros(SIZE, dtype=torch.float64)
        controller.pull({"w": weights})
        tickets = torch.bincount(torch.arange(until * PIECES) % SIZE, minlength=SIZE).double()
        (counts,) = controller.statistics()
        gaps_s = gaps(self.folder, self.server_kills) or [0.0]
        print(f"{kills} faults in {time.monotonic() - begin:.0f} s: {faults}; generation {counts['generation']}")
        return {
            "lost_updates": float((tickets - weights).clamp(min=0).sum()),
            "double_updates": float((weights - tickets).clamp(min=0).sum()),
            "server_gap_s": statistics.median(gaps_s),
            "server_gap_worst_s": max(gaps_s),
            "updates": float(until * PIECES),
            "late_pushes_dropped": float(sum(client["late"] for client in counts["clients"].values())),
        }

    def strike(self, confirm: Callable[[], object]) -> str:
        """Do one thing to something; what it was.

        Args:
            confirm: writes to the log, and returns when that is in the backup.
        """
        kind = self.chance.choice(["worker", "primary", "backup", "link of a worker", "link of a server"])
        if kind == "worker":
            name = self.chance.choice(WORKERS)
            self.workers[name].kill()
            self.workers[name].join()
            self.start_worker(name)
        elif kind == "link of a worker":
            self.signal(self.workers[self.chance.choice(WORKERS)])
        else:  # only one of both at a time: the loss of both is the loss of the state
            view = self.view(lambda view: view.backup in self.servers)
            confirm()
            view = self.view(lambda view: view.backup in self.servers)
            struck = view.primary if kind != "backup" else str(view.backup)
            if kind == "link of a server":
                self.signal(self.servers[struck])
                return kind
            self.server_kills.append(time.monotonic())
            process = self.servers.pop(struck)
            process.kill()
            process.join()
            self.start_server()
        return kind

    def signal(self, process: BaseProcess) -> None:
        """Have a process lose its connections; one that has just begun has none yet."""
        with suppress(ProcessLookupError):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGUSR1)

    def start_server(self) -> None:
        """Start a process of the server."""
        address = self.folder / f"server-{self.count}"
        self.count += 1
        self.servers[str(address)] = self.started(serve, self.folder, address)

    def start_worker(self, name: str) -> None:
        """Start a worker; one of the same name is dead."""
        self.workers[name] = self.started(work, self.folder, name)

    def started(self, target: object, *args: object) -> BaseProcess:
        """A process that runs a function."""
        process = self.processes.Process(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        process.start()
        return process

    def view(self, condition: Callable[[View], bool]) -> View:
        """The view, once it is as asked for."""
        until = time.monotonic() + DEADLINE_S
        while (view := self.views.read()) is None or not condition(view):
            assert time.monotonic() < until, view
            time.sleep(0.005)
        return view


def settings() -> ServerSettings:
    """Settings whose weights count pushes."""
    tensors, sgd = (TensorSpec("w", (SIZE,), "float64"),), {"name": "sgd", "lr": 1.0}
    return ServerSettings(tensors, sgd, pieces=PIECES, staleness_aware=False)


def client_of(folder: Path, views: Views, name: str) -> ServerClient:
    """A client of the server, wherever it is."""
    until = time.monotonic() + DEADLINE_S
    while (view := views.read()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    addresses = [[Path(address) for address in view.addresses()]]
    return ServerClient(addresses, None, name=name, settings=settings(), views=[views], deadline_s=DEADLINE_S)


def serve(folder: Path, address: Path) -> None:
    """Be a process of the server."""
    lose_connections_on_signal()
    store = StoreClient(folder / "store", None, DEADLINE_S)
    ParameterServer(address, None, settings(), views=Views(store, "faults"), grace_s=1.0).ended.wait()


def work(folder: Path, name: str) -> None:
    """Be a worker: take tickets, push, and note when each push was answered."""
    lose_connections_on_signal()
    answered = (folder / f"answered {name}").open("a", buffering=1)
    views = Views(StoreClient(folder / "store", None, DEADLINE_S), "faults")
    into = {"w": torch.zeros(SIZE, dtype=torch.float64)}
    with client_of(folder, views, name) as client:
        client.join()
        client.pull(into)
        while True:
            try:
                if (ticket := client.take()) is None:
                    time.sleep(0.005)
                    continue
                gradient = torch.zeros(SIZE, dtype=torch.float64)
                gradient[ticket.number % SIZE] = -1.0
                client.push({"w": gradient}, into, ticket=ticket)
            except PacelineError as error:
                if "no member" not in str(error):
                    raise
                client.join()  # it was given up while it had no connection
            else:
                answered.write(f"{time.monotonic()}\n")


def lose_connections_on_signal() -> None:
    """Have SIGUSR1 close every connection of this process, whatever goes over it."""

    def close(*_: object) -> None:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    link = socket.socket(fileno=os.dup(int(name)))
                    with link:
                        if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            link.shutdown(socket.SHUT_RDWR)

    signal.signal(signal.SIGUSR1, close)


def gaps(folder: Path, kills: list[float]) -> list[float]:
    """For each kill, the longest time without an answered push that ends after it, within some seconds."""
    lines = [line for path in folder.glob("answered *") for line in path.read_text().splitlines()]
    times = sorted(float(line) for line in lines if line.count(".") == 1)
    return [
        max(
            (late - early for early, late in itertools.pairwise(times) if kill < late and early < kill + AROUND_S),
            default=0.0,
        )
        for kill in kills
        if times[0] < kill < times[-1] - AROUND_S
    ]


def bytes_to_rows() -> float:
    """Bytes on the wire of steps over TLS that pull and push rows, by those of the rows' values."""
    key, chance = RunKey.make(), torch.Generator().manual_seed(0)
    given = ServerSettings((TensorSpec("e", (ROWS, WIDTH), sparse=True),), {"name": "sgd", "lr": 0.1})
    with ParameterServer(("127.0.0.1", 0), key, given) as server:
        relay = Relay(server.address)
        with ServerClient([[("127.0.0.1", relay.port)]], key, name="rank 0", settings=given) as client:
            client.join()
            client.initialize({"e": torch.zeros(ROWS, WIDTH)})
            before = relay.count
            for _ in range(STEPS):
                rows = torch.randperm(ROWS, generator=chance)[:TOUCHED]
                values = client.pull_rows("e", rows)
                client.push(
                    {"e": torch.sparse_coo_tensor(rows[None], values + 1, (ROWS, WIDTH), check_invariants=True)}
                )
            count = relay.count - before
        relay.close()
    return count / (STEPS * 2 * TOUCHED * WIDTH * 4)


class Relay:
    """Passes bytes on to an address, both ways, and counts them."""

    def __init__(self, address: object) -> None:
        self.count = 0
        self._address = address
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for link in [self._listening, *self._links]:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(self._address)  # type: ignore[arg-type]
                self._links += [here, there]
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                self.count += len(data)
                target.sendall(data)


if __name__ == "__main__":
    main()
