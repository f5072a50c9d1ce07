"""A server and its real clients in one process, without sockets, for tests of rounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.job.job import Job
from paceline.job.zoo.data.samples import Selection
from paceline_federated.aggregate import Agreed
from paceline_federated.client import LocalTraining, first_model
from paceline_federated.real.gather import Gathering
from paceline_federated.real.join import Participant
from paceline_federated.real.kept import ClientFolder
from paceline_federated.real.rounds import Outcome
from paceline_federated.section import federate_spec
from paceline_federated.server import Server
from paceline_federated.simulation.deal import deal

DEADLINE_S = 30.0


@dataclass(frozen=True)
class Caller:
    """A client as the functions of a service see it."""

    name: str
    identity: str
    peer: str


def small_job(**federate: Any) -> Job:
    """Eight features, three classes, in a fraction of a second; fp64, so that sums in another order still agree."""
    return Job(
        model="federate.federation:model",
        data={"kind": "synthetic", "samples": 120, "shape": [8], "classes": 3},
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch=8,
        precision="fp64",
        stop={"steps": 4},
        federate={"clients": 6, "deadline_s": DEADLINE_S, **federate},
    )


def model() -> nn.Module:
    """The model of the small job: 195 parameters."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


@dataclass
class Behaviour:
    """What a client does with an answer before it is sent; None: it is not sent."""

    change: Callable[[str, Any], Any] = lambda kind, content: content
    gone_after: str = ""  # kind of the last answer that it sends


@dataclass
class RealClient:
    """A client in this process."""

    part: Participant
    caller: Caller
    behaviour: Behaviour = field(default_factory=Behaviour)
    gone: bool = False
    receipts: list[tuple[str, Any]] = field(default_factory=list)


class Federation:
    """A server with clients that hold the parts of a simulation.

    Args:
        behaviours: of the clients that are not as they should be, by number.
    """

    def __init__(self, job: Job, folder: Path, behaviours: Mapping[int, Behaviour] = {}) -> None:
        self.job, self.folder = job, folder
        training = LocalTraining(job, first_model(job))
        self.layout = training.layout
        first = self.layout.flatten(training.show(self.layout.flatten(training.model)))
        self.server = Server(job, self.layout, first, federate_spec(job).clients)
        self.gathering = Gathering(
            job, self.layout, self.server.rule, name="test", places=federate_spec(job).clients, deadline_s=DEADLINE_S
        )
        self.calls = self.gathering.front.functions()
        self.gathering.front.between_s = 0.0  # the thread that would wait is the one that begins the next round
        self.clients: list[RealClient] = []
        self.number = 0  # of the round
        self._held = ExitStack()
        train = job.data.model_copy(update={"held_out": 0.0}).build(input_shape=None, seed=job.seed).train
        parts = deal(train, federate_spec(job).partition, federate_spec(job).clients, job.seed)
        for number in range(federate_spec(job).clients):
            self.add(number, Selection(train, parts[number]), behaviours.get(number, Behaviour()))

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def add(self, number: int, samples: Any, behaviour: Behaviour) -> None:
        """Let a client join."""
        kept = self._held.enter_context(ClientFolder(self.folder / f"client-{number}"))
        part = Participant.of_samples(self.job, samples, kept, lambda text: None)
        caller = Caller(f"client-{number}", kept.identity, "here")
        welcome = self.calls["join"](caller, f"client-{number}", number, part.about())
        part.begin(welcome["number"], welcome["counted"])
        self.clients.append(RealClient(part, caller, behaviour))

    def rounds(self, count: int, chosen: Sequence[int] | None = None) -> list[tuple[Outcome, Agreed | None]]:
        """Make some rounds; clients that are gone are waited for until they are given up."""
        return [self.round(chosen) for _ in range(count)]

    def round(self, chosen: Sequence[int] | None = None, enough: int | None = None) -> tuple[Outcome, Agreed | None]:
        """Make one round."""
        self.number += 1
        task = self.server.task(self.number)
        all_of_them = range(len(self.clients)) if chosen is None else chosen
        found: list[tuple[Outcome, Agreed | None]] = []

        def serve() -> None:
            aggregator = self.server.aggregator(task.round)
            found.append(
                self.gathering.round(
                    task, self.gathering.trusted(all_of_them), aggregator, weights=self.server.weights, enough=enough
                )
            )

        thread = threading.Thread(target=serve)
        thread.start()
        until, begun = time.monotonic() + DEADLINE_S, False
        while thread.is_alive():
            assert time.monotonic() < until, "the round does not end"
            worked = [self.turn(client) for client in self.clients]
            begun = begun or any(worked)
            if not any(worked):
                thread.join(0.005)
                if begun and any(client.gone for client in self.clients):
                    self.gathering.front.rounds.hasten()
        thread.join()
        outcome, agreed = found[0]
        if agreed is not None:
            self.server.apply(agreed)
        return outcome, agreed

    def turn(self, client: RealClient) -> bool:
        """Let a client ask once and answer; False if there was nothing to do."""
        if client.gone:
            return False
        work = self.calls["work"](client.caller)
        if work["do"] == "wait":
            return False
        round, kind, content = client.part.answer(work)
        content = client.behaviour.change(kind, content)
        receipt = self.calls["deliver"](client.caller, round, kind, content)
        client.receipts.append((kind, receipt))
        client.part.told(round, kind, receipt)
        client.gone = kind == client.behaviour.gone_after
        return True


def simulated(job: Job, rounds: int) -> Tensor:
    """Weights after some rounds of the same job, with every client trained in turn by plain calls."""
    training = LocalTraining(job, first_model(job))
    first = training.layout.flatten(training.model)
    server = Server(job, training.layout, first, federate_spec(job).clients)
    train = job.data.model_copy(update={"held_out": 0.0}).build(input_shape=None, seed=job.seed).train
    parts, _ = deal(train, federate_spec(job).partition, federate_spec(job).clients, job.seed).split(
        federate_spec(job).held_out, job.seed
    )
    from paceline_federated.client import ClientState

    states = [ClientState() for _ in range(federate_spec(job).clients)]
    for round in range(1, rounds + 1):
        task, aggregator = server.task(round), server.aggregator(round)
        for number, state in enumerate(states):
            update = training.train(task, number, Selection(train, parts[number]), state)
            aggregator.add(update)
        agreed = aggregator.agree()
        assert agreed is not None
        server.apply(agreed)
    return server.weights


def distance(one: Tensor, other: Tensor) -> float:
    """Largest difference between two sets of weights, over the largest weight."""
    return float((one - other).abs().max() / other.abs().max())
