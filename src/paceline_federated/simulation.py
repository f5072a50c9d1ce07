"""`paceline federate simulate`: run a federated job with simulated clients in one process."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from paceline.elastic.leadership import RunLock
from paceline.errors import DataError
from paceline.job.job import Job
from paceline.job.samples import Selection
from paceline.job.stop import Epochs, StopRule
from paceline.run.build import load_published
from paceline.run.process import stop_signals
from paceline.run.record.run import Run
from paceline.units import count
from paceline_federated.batched import Batched, CannotBatch, Samples
from paceline_federated.client import LocalTraining, federated, first_model, keys
from paceline_federated.record import Fairness, FederatedRecord, Measure, ServerCheckpoints, Turnout, run_at
from paceline_federated.rules import Task
from paceline_federated.server import Aggregator, Cohort, Server
from paceline_federated.simulated_clients import POISON, Behaviour, Deal, Kept, deal

_MEASURED = 1000  # maximum number of clients that are evaluated on their own samples
# number of multiplications in one step of a round's clients, below which a second thread does not help
_SMALL = 2**25
Say = Callable[[str], object]


def simulate(job: Job, path: Path, *, resume: bool = False, say: Say = lambda line: None, batched: bool = True) -> Run:
    """Train a federated job with simulated clients, and return the record.

    Args:
        path: directory of the run.
        resume: True to continue from the newest checkpoint in the directory.
        say: function that prints a line for the user.
        batched: True to train clients side by side if the model allows this, otherwise one by one.

    Raises:
        PacelineError: the job or its data is invalid, or too few clients answer. The message contains a remedy.
    """
    federated(job)
    job.fetch()
    simulation = Simulation(job, batched=batched, say=say)
    run = run_at(job, path, resume=resume)
    try:
        with RunLock(path, say):
            simulation.run(run)
    except BaseException:
        run.withdraw_unless_begun()
        raise
    return Run(path)


class Simulation:
    """A federated job with simulated clients, before its first round.

    Attributes:
        deal: training samples of each client.
        training: local training of one client.

    Raises:
        PacelineError: the job or its data is invalid.
    """

    def __init__(self, job: Job, *, batched: bool = True, say: Say = lambda line: None) -> None:
        spec = federated(job)
        self.job, self.spec, self.say, self._wants_batches = job, spec, say, batched
        model = first_model(job)
        load_published(job, model)
        self.training = LocalTraining(job, model)
        self.data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
        self.own: Deal | None = None  # held-out samples of the clients
        self.deal = deal(self.data.train, spec.partition, spec.clients, job.seed)
        if spec.held_out:
            self.deal, self.own = self.deal.split(spec.held_out, job.seed)
        self.available = np.flatnonzero(self.deal.samples)
        if not len(self.available):
            raise DataError("federate.no_samples", "no client has a sample to train on")
        clients = len(self.deal)
        self.server = Server(job, self.training.layout, self.training.layout.flatten(model), clients)
        counts = self.training.work.step_counts(self.deal.samples)
        self.behaviour = Behaviour(spec.simulate, job.seed, counts)
        self.measure = Measure(self.training)
        self.stop = StopRule(job.stop, Epochs(1), metrics=self.measure.metrics)
        self._signals: list[str] = []

    def run(self, run: Run) -> None:
        """Run all rounds, and record them in the directory of a run."""
        with ExitStack() as held:
            record = held.enter_context(closing(FederatedRecord(run)))
            kept = held.enter_context(closing(Kept(self.training, len(self.deal), run.path)))
            of = self.training, self.data.train, self.deal, kept, self.server, self.behaviour
            trainer = Trainer(*of, batched=self._wants_batches)
            held.enter_context(stop_signals(self._signals.append))
            if self.training.layout.numel * self.training.work.batch * self.server.per_round < _SMALL:
                held.enter_context(one_thread())
            Rounds(self, record, kept, trainer, ServerCheckpoints(run, self.server, self.training.model, record)).run()

    @property
    def signal(self) -> str | None:
        """Return the first signal that requests the end of the run, or None."""
        return self._signals[0] if self._signals else None


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread within this context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Rounds:
    """Loop over rounds: train, aggregate, record, evaluate, save."""

    def __init__(
        self, simulation: Simulation, record: FederatedRecord, kept: Kept, trainer: Trainer, saved: ServerCheckpoints
    ) -> None:
        self.simulation, self.record, self.kept, self.trainer, self.saved = simulation, record, kept, trainer, saved
        self.job, self.spec, self.server = simulation.job, simulation.spec, simulation.server
        self.round, self._measured_at, self._saved_at = 0, -1, -1
        self._told_in_turn = False
        self._flights: Flights | None = None
        if self.server.rule.buffer is not None:
            self._flights = Flights(trainer, simulation.available, simulation.behaviour, self.server)

    def run(self) -> None:
        """Continue from the newest checkpoint, if any, until the run ends."""
        self._begin()
        self._saved_s = self.simulation.stop.elapsed_s
        reason = self.simulation.stop.ended(self.round)
        while reason is None:
            reason = self._one()
        interrupted = reason in ("SIGINT", "SIGTERM")
        if not interrupted and self._measured_at != self.round:
            self._measure(counts=False)  # this evaluation is not due, and a longer run would not make it
        self._save()
        stop = self.simulation.stop
        details = {"reason": reason, "step": self.round, "elapsed_s": round(stop.elapsed_s, 3)}
        self.record.events.event("end", {**details, "interrupted": interrupted})

    def _one(self) -> str | None:
        stop, began_s = self.simulation.stop, time.perf_counter()
        self.round += 1
        aggregator = self.server.aggregator(self.round)
        turnout = (self._flights.fill if self._flights is not None else self._filled)(self.round, aggregator)
        compute_s = time.perf_counter() - began_s
        aggregate = self.record.round(
            self.server, self.round, aggregator, turnout, began_s=began_s, compute_s=compute_s
        )
        if self.trainer.why_in_turn and not self._told_in_turn:
            self._told_in_turn = True
            said = f"clients train one by one: {self.trainer.why_in_turn}"
            self.record.events.event("sync", {"said": [said]})
            self.simulation.say(said)
        every = self.job.evaluate.every_steps
        reason = stop.after_step(self.round, float("nan") if aggregate is None else aggregate.loss)
        if every and self.round % every == 0:
            reason = self._measure() or reason
        if self._due():
            self._save()
        return self.simulation.signal or reason or stop.out_of_time()

    def _filled(self, round: int, aggregator: Aggregator) -> Turnout:
        """Train the chosen clients on the same weights, for a rule with synchronous rounds."""
        chosen = self.server.choose(round, self.simulation.available)
        present, dropped, late = self.simulation.behaviour.answers(round, chosen)
        for cohort in self.trainer.train(self.server.task(round), present):
            aggregator.add_cohort(cohort)
        return Turnout(len(chosen), len(present), len(dropped), len(late))

    # Evaluation and checkpoints

    def _measure(self, *, counts: bool = True) -> str | None:
        """Evaluate the weights and the clients; return a stop reason if a target is reached."""
        simulation, self._measured_at = self.simulation, self.round
        self._fairness()
        if simulation.data.held_out is None:
            return None
        metrics = simulation.measure.validation(self.server.weights, simulation.data.held_out)
        self.record.events.event("evaluation", {"step": self.round, "epoch": self.round, "metrics": metrics})
        told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        simulation.say(f"round {self.round}: validation {told}")
        return simulation.stop.after_evaluation(metrics, self.round, counts=counts)

    def _fairness(self) -> None:
        simulation, own, measure = self.simulation, self.simulation.own, self.simulation.measure
        if own is None:
            return
        values = []
        for client in np.flatnonzero(own.samples)[:_MEASURED].tolist():
            state = self.kept.state(client) if simulation.training.layout.personal else None
            samples = Selection(simulation.data.train, own[client])
            values.append(measure.validation(self.server.weights, samples, state)[measure.of_clients])
        fairness = Fairness.of(measure.of_clients, values)
        if fairness is not None:
            self.record.events.event("clients", {"step": self.round, **fairness._asdict()})
            simulation.say(f"round {self.round}: {fairness.sentence()}")

    def _due(self) -> bool:
        spec, stop = self.job.checkpoint, self.simulation.stop
        if spec.every_steps is not None:
            return self.round % spec.every_steps == 0
        return stop.elapsed_s - self._saved_s >= spec.every_seconds

    def _save(self) -> None:
        if self._saved_at == self.round:
            return
        flights = self._flights.state_dict() if self._flights is not None else ({}, {})
        extra: dict[str, Tensor] = {**self.kept.tensors(), **flights[0]}
        values = {"stop": self.simulation.stop.state_dict(), "failures": self.record.failures, "flights": flights[1]}
        self.saved.save(self.round, values, extra)
        self._saved_at, self._saved_s = self.round, self.simulation.stop.elapsed_s

    def _begin(self) -> None:
        simulation, found = self.simulation, self.saved.load()
        if found is not None:
            loaded, extra = found
            self.round, self._saved_at = loaded.step, loaded.step
            self.record.failures = int(loaded.values["failures"])
            simulation.stop.load_state_dict(loaded.values["stop"])
            self.kept.load(extra)
            if self._flights is not None:
                self._flights.load_state_dict(extra, loaded.values["flights"])
        samples = simulation.deal.samples
        without = len(simulation.deal) - len(simulation.available)
        details = {
            "step": self.round,
            "plan": str(self.saved.run.plan),
            "federated": self.spec.rule,
            "clients": len(simulation.deal),
            "clients_without_samples": without,
            "samples_per_epoch": int(samples.sum()),
            "total_steps": self.job.stop.steps,
            "parameters": simulation.training.layout.parameters,
            "synthetic": simulation.data.synthetic,
        }
        self.record.events.event("start" if found is None else "resume", details)
        least, most = int(samples[simulation.available].min()), int(samples.max())
        each = f"{least} to {most} samples" if least < most else count(least, "sample")
        nobody = f"; {count(without, 'client')} without any are never chosen" if without else ""
        simulation.say(f"{count(len(simulation.available), 'client')} with {each} each{nobody}; rule {self.spec.rule}")


_NEXT = 41
_DELTAS = "flights/deltas"


@dataclass(order=True)
class _Flight:
    """Client in training, with its update once it is computed."""

    arrives: float
    number: int
    client: int
    version: int
    answers: bool
    cohort: Cohort | None = None


class Flights:
    """Clients that train concurrently. When a client finishes or drops out, another client begins.

    `federate.per_round` is the number of concurrent clients.
    """

    def __init__(self, trainer: Trainer, available: NDArray[np.int64], behaviour: Behaviour, server: Server) -> None:
        self.trainer, self.available, self.behaviour, self.server = trainer, available, behaviour, server
        self._heap: list[_Flight] = []
        self._number, self._clock, self._begun = 0, 0.0, 0

    def fill(self, round: int, aggregator: Aggregator) -> Turnout:
        """Pass arriving updates to the server, up to the number that its rule requires.

        Returns:
            The numbers of clients that began since the previous step. `more` has the mean staleness of the updates, and
                the simulated time in units of a typical client's work.
        """
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
        self._train(round)  # train these clients before the weights change
        begun, self._begun = self._begun, 0
        mean = float(np.mean(staleness)) if staleness else 0.0
        return Turnout(begun, came, dropped, more={"staleness": mean, "clock": self._clock})

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the clients in training, for a checkpoint: updates and plain values."""
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
        """Restore the clients in training."""
        rows, self._heap = iter(tensors[_DELTAS]), []
        for arrives, number, client, version, answers, *trained in values["flights"]:
            cohort = None
            if trained:
                samples, steps, loss = trained
                cohort = Cohort([client], next(rows).unsqueeze(0), {}, [samples], [steps], [loss])
            heapq.heappush(self._heap, _Flight(arrives, number, client, version, answers, cohort))
        self._number, self._clock = values["number"], values["clock"]

    def _launch(self) -> None:
        """Start a client that is not in training."""
        busy = [flight.client for flight in self._heap]
        free = self.available[~np.isin(self.available, busy)]
        self._number += 1
        client = int(free[np.argmin(keys(self.behaviour.seed, _NEXT, self._number, free))])
        arrives = self._clock + float(self.behaviour.times[client])
        answers = not self.behaviour.drops(self._number, client)
        heapq.heappush(self._heap, _Flight(arrives, self._number, client, self.server.version, answers))
        self._begun += 1

    def _train(self, round: int) -> None:
        """Train the clients that have begun but not trained yet, on the newest weights."""
        waiting = {flight.client: flight for flight in self._heap if flight.cohort is None and flight.answers}
        for cohort in self.trainer.train(self.server.task(round), list(waiting)):
            for place, client in enumerate(cohort.clients):
                waiting[client].cohort = cohort.rows([place])


class Trainer:
    """Trainer of a task's clients, which returns updates as the server receives them.

    Attributes:
        why_in_turn: reason why clients train one by one; None if they train side by side.
    """

    def __init__(
        self,
        training: LocalTraining,
        dataset: Dataset[Any],
        deal: Deal,
        kept: Kept,
        server: Server,
        behaviour: Behaviour,
        *,
        batched: bool = True,
    ) -> None:
        self.training, self.dataset, self.deal, self.kept = training, dataset, deal, kept
        self.server, self.behaviour = server, behaviour
        self.why_in_turn: str | None = None if batched else "that was asked for"
        self._batched: Batched | None = None
        if batched:
            dtype = None if training.layout.dtype is torch.float32 else training.layout.dtype
            try:
                samples = Samples(dataset, training.job.seed, dtype)
                self._batched = Batched(training, samples, deal)
            except CannotBatch as error:
                self.why_in_turn = str(error)

    def train(self, task: Task, clients: Sequence[int]) -> Iterator[Cohort]:
        """Train clients, and return their updates as the server receives them."""
        if not clients:
            return
        for cohort in self._trained(task, clients):
            yield self._sent(task, cohort)

    def _trained(self, task: Task, clients: Sequence[int]) -> Iterator[Cohort]:
        if self._batched is not None:
            try:
                yield from self._batched.train(task, clients, self.kept)
                return
            except CannotBatch as error:  # at the first step, before any state is stored
                self.why_in_turn, self._batched = str(error), None
        for client in clients:
            state = self.kept.state(client)
            own = Selection(self.dataset, self.deal[client])
            update = self.training.train(task, client, own, state)
            self.kept.put(client, state)
            yield Cohort.of(update)

    def _sent(self, task: Task, cohort: Cohort) -> Cohort:
        """Return a cohort as the server receives it, after poisoning and encoding."""
        poisoners = self.behaviour.poisons[np.asarray(cohort.clients, np.int64)]
        if poisoners.any():
            cohort.deltas[torch.from_numpy(poisoners)] *= POISON
        up = self.server.up
        if up.exact:
            return cohort
        rows = zip(cohort.deltas, cohort.clients, strict=True)
        return replace(cohort, deltas=torch.stack([up.round_trip(row, task.round, client) for row, client in rows]))
