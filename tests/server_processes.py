"""Processes of a parameter server in tests and benchmarks, which are killed, stopped and started again."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from forked import python
from paceline.wire.store import StoreClient, StoreServer
from paceline_server.parameters import (
    ParameterServer,
    ServerClient,
    ServerSettings,
    TensorSpec,
    View,
    Views,
)

DEADLINE_S = 30.0
TICKETS = 120


def counting(tickets: int = TICKETS, pieces: int = 4) -> ServerSettings:
    """Settings of a server whose weights count how often each ticket was applied: push t adds 1 to element t."""
    tensors, sgd = (TensorSpec("w", (tickets,), "float64"),), {"name": "sgd", "lr": 1.0}
    return ServerSettings(tensors, sgd, pieces=pieces, staleness_aware=False)


def push_all(client: ServerClient, after_each: Callable[[int], object] = lambda _: None) -> int:
    """Take tickets to the boundary, and push 1 for each; returns how many."""
    (spec,) = client.settings.tensors
    into, count = {"w": torch.zeros(spec.shape, dtype=torch.float64)}, 0
    client.pull(into)
    while (ticket := client.take()) is not None:
        gradient = torch.zeros(spec.shape, dtype=torch.float64)
        gradient[ticket.number] = -1.0
        if client.push({"w": gradient}, into, ticket=ticket).accepted:
            assert into["w"][ticket.number] == 1
            count += 1
        after_each(count)
    return count


def started(client: ServerClient) -> ServerClient:
    """The client, joined, with zeros as first values and a boundary behind all tickets."""
    (spec,) = client.settings.tensors
    client.join()
    client.initialize({"w": torch.zeros(spec.shape, dtype=torch.float64)})
    client.pull({"w": torch.zeros(spec.shape, dtype=torch.float64)})
    client.open(spec.shape[0] // (client.settings.pieces or 1))
    return client


class Servers:
    """Processes of one server within this host; the view is in a store of this process."""

    def __init__(self, folder: Path, settings: ServerSettings) -> None:
        folder.chmod(0o700)
        self.folder, self.settings = folder, settings
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._store = StoreServer(None, folder / "store")
        self._asks = StoreClient(folder / "store", None, DEADLINE_S)

    def start(self, number: int, before: str = "") -> Path:
        """Start a process, which runs some code first; returns its address."""
        where = self.address(number)
        where.unlink(missing_ok=True)
        self.processes[number] = python(
            f"{before}\nfrom server_processes import serve\nfrom paceline_server.parameters import *\n"
            f"serve({str(self.folder)!r}, {number}, {self.settings!r})".replace("=inf", "=float('inf')")
        )
        return where

    def address(self, number: int) -> Path:
        return self.folder / f"server-{number}"

    def client(self, name: str, *numbers: int, deadline_s: float = DEADLINE_S) -> ServerClient:
        """A client that knows the addresses of these processes; of all that were started without."""
        addresses = [self.address(number) for number in numbers or self.processes]
        return ServerClient(
            [addresses], None, name=name, settings=self.settings, deadline_s=deadline_s, views=[Views(self._asks, "w")]
        )

    def view(self, condition: Callable[[View], bool] = lambda _: True) -> View:
        """The view, once it is as asked for."""
        views, until = Views(self._asks, "w"), time.monotonic() + DEADLINE_S
        while (view := views.read()) is None or not condition(view):
            assert time.monotonic() < until, view
            time.sleep(0.005)
        return view

    def number(self, address: str | None) -> int:
        return int((address or "-1").rpartition("-")[2])

    def signal(self, number: int, what: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process; one that it ends is waited for."""
        self.processes[number].send_signal(what)
        if what == signal.SIGKILL:
            self.processes.pop(number).wait()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in list(self.processes):
            self.signal(number)
        self._asks.close()
        self._store.close()


def serve(folder: str, number: int, settings: ServerSettings) -> None:
    """Be a process of the server, to the end of this process."""
    torch.set_num_threads(1)
    store = StoreClient(Path(folder, "store"), None, DEADLINE_S)
    ParameterServer(Path(folder, f"server-{number}"), None, settings, views=Views(store, "w")).ended.wait()
