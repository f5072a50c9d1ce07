"""Simulated clients of an asynchronous server, which begin and arrive one by one."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_federated.client import keys
from paceline_federated.server import Aggregator, Cohort, Server
from paceline_federated.simulation.clients import Behaviour
from paceline_federated.simulation.trainer import Trainer

_NEXT = 41
_DELTAS = "flights/deltas"


@dataclass(order=True)
class _Flight:
    """A client under way, with its update once that is computed."""

    arrives: float
    number: int
    client: int
    version: int
    answers: bool
    cohort: Cohort | None = None


@dataclass(frozen=True)
class Arrived:
    """Counts of one step of the server.

    Attributes:
        begun: clients that began since the step before.
        came, dropped: clients whose update arrived, or never will.
        staleness: mean staleness of the updates.
        clock: simulated time, in units of the usual client's work.
    """

    begun: int
    came: int
    dropped: int
    staleness: float
    clock: float


class Flights:
    """Clients that train at the same time; when one arrives, or is lost, another begins.

    The number of clients under way is `federate.per_round`.
    """

    def __init__(self, trainer: Trainer, available: NDArray[np.int64], behaviour: Behaviour, server: Server) -> None:
        self.trainer, self.available, self.behaviour, self.server = trainer, available, behaviour, server
        self._heap: list[_Flight] = []
        self._number, self._clock, self._begun = 0, 0.0, 0

    def fill(self, round: int, aggregator: Aggregator) -> Arrived:
        """Give the server the next updates that arrive, as many as its rule asks for."""
        staleness: list[int] = []
        came = dropped = 0
        while len(self._heap) < min(self.server.per_round, len(self.available)):
            self._launch()
        wanted, most_lost = self.server.rule.buffer or 1, 10 * (self.server.rule.buffer or 1)
        while aggregator.clients < wanted and dropped + len(aggregator.refused) < most_lost:
            if self._heap[0].cohort is None and self._heap[0].answers:
                self._train(round)
            flight = heapq.heappop(self._heap)
            self._clock = flight.arrives
            if flight.cohort is not None:
                came += 1
                staleness.append(self.server.version - flight.version)
                aggregator.add_cohort(flight.cohort, staleness[-1])
            else:
                dropped += 1
            self._launch()
        self._train(round)  # before the weights change
        begun, self._begun = self._begun, 0
        return Arrived(begun, came, dropped, float(np.mean(staleness)) if staleness else 0.0, self._clock)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Clients under way, for a checkpoint: their updates, and plain values."""
        flights = sorted(self._heap)
        held = [flight.cohort for flight in flights if flight.cohort is not None]
        deltas = torch.cat([cohort.deltas for cohort in held]) if held else torch.zeros(0, self.server.layout.numel)
        listed = [
            [f.arrives, f.number, f.client, f.version, f.answers]
            + ([] if f.cohort is None else [f.cohort.samples[0], f.cohort.steps[0], f.cohort.losses[0]])
            for f in flights
        ]
        return {_DELTAS: deltas}, {"flights": listed, "number": self._number, "clock": self._clock}

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the clients under way."""
        rows, self._heap = iter(tensors[_DELTAS]), []
        for arrives, number, client, version, answers, *trained in values["flights"]:
            cohort = None
            if trained:
                samples, steps, loss = trained
                cohort = Cohort([client], next(rows).unsqueeze(0), {}, [samples], [steps], [loss])
            heapq.heappush(self._heap, _Flight(arrives, number, client, version, answers, cohort))
        self._number, self._clock = values["number"], values["clock"]

    def _launch(self) -> None:
        """Have a client begin that is not under way."""
        busy = [flight.client for flight in self._heap]
        free = self.available[~np.isin(self.available, busy)]
        self._number += 1
        client = int(free[np.argmin(keys(self.behaviour.seed, _NEXT, self._number, free))])
        arrives = self._clock + float(self.behaviour.times[client])
        answers = not self.behaviour.drops(self._number, client)
        heapq.heappush(self._heap, _Flight(arrives, self._number, client, self.server.version, answers))
        self._begun += 1

    def _train(self, round: int) -> None:
        """Train clients that have begun and not been trained, with the newest weights."""
        waiting = {flight.client: flight for flight in self._heap if flight.cohort is None and flight.answers}
        for cohort in self.trainer.train(self.server.task(round), list(waiting)):
            for place, client in enumerate(cohort.clients):
                waiting[client].cohort = cohort.rows([place])
