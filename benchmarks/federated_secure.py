"""Cost of secure aggregation: rounds of 100 real clients' state machines with and without, in turn.

    python benchmarks/federated_secure.py [--json] [--clients N] [--repeats N]

Figures:
- `secure_time`: seconds of a round with secure aggregation / of the same round without. All clients and the server
  compute one after the other in this process, without sockets, so it is the sum of everybody's work.
- `secure_bytes`: tensors, keys and shares that all clients and the server exchange, with / without.
- `plain_round_s`, `secure_round_s`: the medians of both.
- `secure_lost_s`: seconds of a secure round in which a tenth of the clients is lost after their keys are known, so that
  the server takes off their masks.

The job is McMahan's: a convolutional network (268,650 parameters) on digits, 5 local epochs in batches of 10. The sums
of both are compared before their times.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import environment_line
from paceline.job.job import Job
from paceline.job.zoo.data.samples import Selection
from paceline.stats import median_interval
from paceline_federated.client import ClientState, LocalTraining, first_model
from paceline_federated.real.gather import Gathering
from paceline_federated.real.join import Participant
from paceline_federated.real.kept import ClientFolder
from paceline_federated.rule import Task, Update
from paceline_federated.section import federate_spec
from paceline_federated.server import Server
from paceline_federated.simulation.deal import deal

CLIP, LOST, DEADLINE_S = 10.0, 0.1, 3600.0


def main() -> None:
    """Measure, print the table, and with --json a last line for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--clients", type=int, default=100, help="in a round (default 100)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each (default 3)")
    arguments = parser.parse_args()
    figures = measured(arguments.clients, arguments.repeats)
    print(environment_line())
    if arguments.json:
        print(json.dumps({"figures": figures, "environment": {"machine": environment_line()}}))


def measured(clients: int = 100, repeats: int = 3) -> dict[str, float]:
    """All figures of this page."""
    torch.set_num_threads(1)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        plain = held.enter_context(InProcess(job(clients), folder / "plain"))
        secure = held.enter_context(InProcess(job(clients, secure={"clip": CLIP}), folder / "secure"))
        plain.round(), secure.round()  # caches
        times: dict[str, list[float]] = {"plain": [], "secure": [], "lost": []}
        for _ in range(repeats):
            times["plain"].append(plain.round())
            times["secure"].append(secure.round())
            must_agree(plain.total, secure.total)
        sent = {"plain": plain.sent_bytes, "secure": secure.sent_bytes}
        times["lost"] = [secure.round(lost=round(LOST * clients)) for _ in range(repeats)]
    middle = {name: median_interval(values) for name, values in times.items()}
    ratios = median_interval([s / p for s, p in zip(times["secure"], times["plain"], strict=True)])
    print(f"{clients} clients          seconds a round             bytes a round")
    for name in ("plain", "secure"):
        print(f"{name:<22} {middle[name]!s:<27} {sent[name]:,}")
    print(f"a tenth of them lost   {middle['lost']}")
    print(f"secure / plain         {ratios!s:<27} {sent['secure'] / sent['plain']:.4f}", flush=True)
    return {
        "secure_time": ratios.middle,
        "secure_bytes": sent["secure"] / sent["plain"],
        "plain_round_s": middle["plain"].middle,
        "secure_round_s": middle["secure"].middle,
        "secure_lost_s": middle["lost"].middle,
    }


def job(clients: int, **federate: Any) -> Job:
    """The job of both."""
    return Job(
        model="cifar_cnn",
        data={"kind": "digits", "shape": [3, 32, 32], "held_out": 0},
        loss="cross_entropy",
        optimizer={"name": "sgd", "lr": 0.05},
        global_batch=10,
        stop={"steps": 1},
        federate={"clients": clients, "local_epochs": 5, "deadline_s": DEADLINE_S, **federate},
    )


class InProcess:
    """A server and all of its clients, one after the other.

    Attributes:
        total: the agreed update of the last round.
        sent_bytes: of the last round, both ways.
    """

    def __init__(self, what: Job, folder: Path) -> None:
        self._held = ExitStack()
        training = LocalTraining(what, first_model(what))
        self.layout, places = training.layout, federate_spec(what).clients
        self.server = Server(what, self.layout, self.layout.flatten(training.model), places)
        self.gathering = Gathering(
            what, self.layout, self.server.rule, name="benchmark", places=places, deadline_s=DEADLINE_S
        )
        train = what.data.build(input_shape=what.model.input_shape(), seed=0).train
        parts = deal(train, federate_spec(what).partition, places, what.seed)
        self.parts: list[Participant] = []
        for number in range(places):
            kept = self._held.enter_context(ClientFolder(folder / str(number)))
            self.parts.append(participant(what, training, Selection(train, parts[number]), kept))
            rounds = self.gathering.front.rounds
            rounds.members.join(kept.identity, f"client-{number}", len(parts[number]), number, 0.0)
            self.parts[-1].begin(number, 0)
        self.number, self.total, self.sent_bytes = 0, torch.zeros(0), 0

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def round(self, lost: int = 0) -> float:
        """Make a round on the first weights; returns its seconds."""
        self.number += 1
        rounds, before = self.gathering.front.rounds, self._bytes
        begun = self.server.task(1)
        task = Task(self.number, 0, begun.weights, begun.sent, begun.lr)
        aggregator = self.server.aggregator(self.number)
        began = time.perf_counter()
        secure = self.gathering.secure_round(task)
        rounds.begin(task, range(len(self.parts)), 0.0, gathers=None if secure else aggregator, secure=secure)
        gone: set[int] = set()
        while (outcome := rounds.advance(0.0)) is None:
            if not self._turn(gone, lost):
                rounds.advance(DEADLINE_S / 2)  # the time of an answer of those that are lost
        if outcome.secure is not None:
            self.gathering.add_sums(outcome.secure, aggregator)
        agreed = aggregator.agree()
        assert agreed is not None
        seconds = time.perf_counter() - began
        self.total, self.sent_bytes = agreed.delta, self._bytes - before
        return seconds

    def _turn(self, gone: set[int], lost: int) -> bool:
        """Let every client do what it is asked; False if there was nothing to do."""
        rounds, busy = self.gathering.front.rounds, False
        for part in self.parts:
            if part.number in gone or (work := rounds.work(part.number, 0.0))["do"] == "wait":
                continue
            if work["do"] == "vector" and len(gone) < lost:
                gone.add(part.number)
                continue
            round, kind, content = part.answer(work)
            rounds.take(part.number, round, kind, content, 0.0)
            busy = True
        return busy

    @property
    def _bytes(self) -> int:
        return sum(member.bytes_to + member.bytes_from for member in self.gathering.front.members.all())


def participant(what: Job, training: LocalTraining, samples: Selection, folder: ClientFolder) -> Participant:
    """A client; all train in the same model, one after the other."""

    def train(task: Task, number: int, state: ClientState) -> Update:
        return training.train(task, number, samples, state)

    return Participant(what, training.layout, training.rule, folder, lambda: len(samples), train, lambda text: None)


def must_agree(plain: Tensor, secure: Tensor) -> None:
    """Refuse times of sums that differ."""
    difference = float((plain - secure).abs().max())
    assert difference < 1e-4, f"the secure mean differs by {difference:g}"


if __name__ == "__main__":
    main()
