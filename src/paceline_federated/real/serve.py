"""`paceline federate serve`: rounds of a federated job with real clients, with their record and checkpoints."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from paceline.elastic.run_lock import RunLock
from paceline.errors import DataError, DeadlineError, FederateError, JobError
from paceline.files import read_text, write_whole
from paceline.job.job import Job
from paceline.job.stop import StopRule
from paceline.run.build import load_published
from paceline.run.record.run import Run
from paceline.run.stop_signals import stop_signals
from paceline.units import count
from paceline.wire.ends import name_of
from paceline.wire.key import RunKey
from paceline.wire.listener import Where
from paceline_federated.aggregate import Agreed
from paceline_federated.client import LocalTraining, federated, first_model
from paceline_federated.measure import Measure
from paceline_federated.real.gather import Gathering
from paceline_federated.real.rounds import Outcome
from paceline_federated.record import FederatedRecord, Round, ServerCheckpoints, run_at
from paceline_federated.server import Server

CLIENTS = "clients.json"  # in the directory of a run: who has joined
_LEAST_SECURE = 3
Say = Callable[[str], object]


def serve(
    job: Job,
    path: Path,
    where: Where,
    key: RunKey,
    *,
    resume: bool = False,
    patience_s: float = 600.0,
    say: Say = lambda line: None,
) -> Run:
    """Serve a federated job to real clients until it ends, and return the record.

    Args:
        path: directory of the run.
        where: address and port to listen at, or a socket that listens.
        resume: go on from the newest checkpoint in it.
        patience_s: for which clients are waited for, at the start and when too few are left.
        say: takes lines for the user.

    Raises:
        PacelineError: the job cannot work, or too few clients came or answered; the text says what to do.
    """
    federation = Federation(job, patience_s, say)
    run = run_at(job, path, resume=resume)
    try:
        with RunLock(path, say):
            federation.run(run, where, key)
    except BaseException:
        run.withdraw_unless_begun()
        raise
    return Run(path)


class Federation:
    """A federated job with real clients, before its first round.

    Raises:
        PacelineError: the job cannot work.
    """

    def __init__(self, job: Job, patience_s: float, say: Say) -> None:
        self.job, self.spec, self.say, self._patience_s = job, federated(job), say, patience_s
        job.fetch()
        model = first_model(job)
        load_published(job, model)
        self.training = LocalTraining(job, model)
        layout = self.training.layout
        secret = secrets.randbits(62)
        self.server = Server(job, layout, layout.flatten(model), self.spec.clients, secret=secret)
        self.gathering = Gathering(
            job,
            layout,
            self.server.rule,
            name=secrets.token_hex(8),
            places=self.spec.clients,
            deadline_s=self.spec.deadline_s,
        )
        if self.gathering.packing is not None and self.server.rule.buffer is not None:
            raise JobError(
                f"federate.secure does not go with rule {self.spec.rule}: a sum is over clients that answer together. "
                "Take fedavg, fedprox, fedadam, fedyogi or scaffold"
            )
        self.measure = Measure(self.training)
        self.stop = StopRule(job.stop, steps_per_epoch=1)
        self.held_out = self._held_out()
        self.round = self._failures = 0
        self._saved_at = self._measured_at = -1
        self._saved_s = 0.0
        self._signals: list[str] = []
        self._sent: tuple[int, int] = (0, 0)

    def run(self, run: Run, where: Where, key: RunKey) -> None:
        """All rounds, with their record in the directory of a run."""
        with ExitStack() as held:
            self.record = held.enter_context(closing(FederatedRecord(run)))
            self._saved = ServerCheckpoints(run, self.server, self.training.model, self.record)
            self._restore(run)
            held.enter_context(stop_signals(self._signals.append))
            service = held.enter_context(self.gathering.front.serve(where, key))
            self.say(f"listening at {name_of(service.address)} for {count(self.spec.clients, 'client')}")
            reason = "the server failed"
            try:
                reason = self._rounds(run)
            finally:
                interrupted = reason in ("SIGINT", "SIGTERM")
                if not interrupted:
                    self.gathering.front.say_farewell(reason)
            stop = {"reason": reason, "step": self.round, "elapsed_s": round(self.stop.elapsed_s, 3)}
            self.record.events.event(
                "end", {**stop, "interrupted": interrupted, "unauthenticated": service.unauthenticated}
            )

    def _rounds(self, run: Run) -> str:
        if not self.round:
            self._wait_for(self.spec.clients)
        else:
            with suppress(DeadlineError):  # who does not return is not waited for again
                self._wait_for(len(self.gathering.front.members), self.spec.deadline_s)
        self._note_clients(run)
        reason = self._signal or self.stop.ended(self.round)
        while reason is None:
            reason = self._one()
            self._note_clients(run)
        if reason not in ("SIGINT", "SIGTERM") and self._measured_at != self.round:
            self._measure()
        self._save()
        return reason

    def _one(self) -> str | None:
        """One round; returns the reason if the run ends."""
        least = max(self.spec.least, _LEAST_SECURE if self.spec.secure else 1)
        there = self.gathering.trusted(self._wait_for(least))
        if self._signal is not None:
            return self._signal
        began = time.perf_counter()
        self.round += 1
        server, buffer = self.server, self.server.rule.buffer
        chosen = server.choose(self.round, np.array(there)) if buffer is None else there
        enough = None if buffer is None else min(buffer, len(there))
        task, aggregator = server.task(self.round), server.aggregator(self.round)
        outcome, agreed = self.gathering.round(
            task, chosen, aggregator, weights=server.weights, enough=enough, stopped=lambda: bool(self._signals)
        )
        if self._signal is not None and len(outcome.counted) < len(chosen):
            self.round -= 1  # it is made again by who goes on
            return self._signal
        if agreed is not None and agreed.clients < self.spec.least:
            agreed = None
        self._apply(agreed, outcome, len(chosen))
        self._tell(outcome, agreed, len(chosen), task.lr, time.perf_counter() - began)
        every, reason = self.job.evaluate.every_steps, None
        reason = self.stop.after_step(self.round, math.nan if agreed is None else agreed.loss)
        if every and self.round % every == 0:
            reason = self._measure() or reason
        if self._due():
            self._save()
        return self._signal or reason or self.stop.out_of_time()

    def _wait_for(self, clients: int, patience_s: float | None = None) -> list[int]:
        front = self.gathering.front
        if len(front.there()) < clients:
            self.say(f"waiting for {count(clients, 'client')}; {len(front.there())} are there")
        return front.wait_for(clients, patience_s or self._patience_s, stopped=lambda: bool(self._signals))

    def _apply(self, agreed: Agreed | None, outcome: Outcome, chosen: int) -> None:
        """Step the server, or count a round that changes nothing.

        Raises:
            FederateError: too many such rounds in a row.
        """
        members, events = self.gathering.front.members, self.record.events
        if outcome.refused:
            reasons = {members[number].name: why for number, why in list(outcome.refused.items())[:10]}
            events.event("refused", {"step": self.round, "clients": len(outcome.refused), "reasons": reasons})
        if outcome.missing:
            names = [members[number].name for number in outcome.missing[:20]]
            events.event("missing", {"step": self.round, "clients": len(outcome.missing), "names": names})
            self.say(f"round {self.round}: no answer in time from {', '.join(names)}")
        for number in outcome.secure.found if outcome.secure else ():
            events.event("poisoner", {"step": self.round, "client": members[number].name})
            self.say(f"{members[number].name} poisons the sums that it is in, and is asked no more")
        if agreed is not None:
            self._failures = 0
            self.server.apply(agreed)
            return
        self._failures += 1
        told = {"step": self.round, "chosen": chosen, "refused": len(outcome.refused), "failures": self._failures}
        events.event("round_failed", told)
        why = next(iter(outcome.refused.values()), "none answered in time")
        self.say(f"round {self.round} changed nothing: {why}")
        if self._failures >= self.spec.max_failures:
            raise FederateError(
                f"{count(self._failures, 'round')} in a row changed nothing (federate.max_failures); of the last: {why}"
            )

    def _tell(self, outcome: Outcome, agreed: Agreed | None, chosen: int, lr: float, took_s: float) -> None:
        members = self.gathering.front.members.all()
        sent = sum(member.bytes_to for member in members), sum(member.bytes_from for member in members)
        down, up = sent[0] - self._sent[0], sent[1] - self._sent[1]
        self._sent = sent
        more: dict[str, float] = {"joined": len(members)}
        if self.server.privacy is not None:
            more["epsilon"] = self.server.privacy.epsilon
        late = outcome.late
        line = Round(
            self.round, agreed, chosen, len(outcome.missing), late, down, up, lr, 0.0, took_s,
            more | {"refused": len(outcome.refused)},
        )  # fmt: skip
        self.record.rounds.write(line.line())

    # Measuring and saving

    def _held_out(self) -> Any:
        """The validation set of the server; None where it has none."""
        try:
            return self.job.data.build(input_shape=self.job.model.input_shape(), seed=self.job.seed).held_out
        except DataError as error:
            if self.job.stop.metric_above:
                raise
            self.say(f"nothing is measured at the server, which has no data: {error}")
            return None

    def _measure(self) -> str | None:
        """Measure the server's weights; returns a stop reason if a target was reached."""
        self._measured_at = self.round
        if self.held_out is None:
            return None
        metrics = self.measure.validation(self.server.weights, self.held_out)
        self.record.events.event("evaluation", {"step": self.round, "epoch": self.round, "metrics": metrics})
        self.say(
            f"round {self.round}: validation {', '.join(f'{name} {value:.4f}' for name, value in metrics.items())}"
        )
        return self.stop.after_evaluation(metrics)

    def _due(self) -> bool:
        spec = self.job.checkpoint
        if self.server.rule.client_keeps or self.training.layout.personal:
            return True  # clients keep the state of one round before the last, and no older one
        if spec.every_steps is not None:
            return self.round % spec.every_steps == 0
        return self.stop.elapsed_s - self._saved_s >= spec.every_seconds

    def _save(self) -> None:
        if self._saved_at == self.round:
            return
        suspects = self.gathering.suspects.state()
        clients = self.gathering.front.members.state()
        values = {
            "stop": self.stop.state_dict(),
            "failures": self._failures,
            "suspects": suspects,
            "clients": clients,
        }
        self._saved.save(self.round, values, {})
        self._saved_at, self._saved_s = self.round, self.stop.elapsed_s

    def _note_clients(self, run: Run) -> None:
        """Write who has joined, so that clients find their places again after a restart."""
        state = self.gathering.front.members.state()
        write_whole(run.path / CLIENTS, json.dumps(state, indent=1))

    def _restore(self, run: Run) -> None:
        found = self._saved.load()
        saved: list[dict[str, Any]] = []
        if found is not None:
            loaded, _ = found
            self.round = self._saved_at = loaded.step
            self._failures = int(loaded.values["failures"])
            self.stop.load_state_dict(loaded.values["stop"])
            self.gathering.suspects.restore(loaded.values["suspects"])
            saved = loaded.values["clients"]
        self.gathering.front.members.restore(_clients_of(run.path / CLIENTS, saved))
        details = {
            "step": self.round,
            "plan": str(run.plan),
            "federated": self.spec.rule,
            "clients": self.spec.clients,
            "secure": self.spec.secure is not None,
            "total_steps": self.job.stop.steps,
            "parameters": self.training.layout.parameters,
            "synthetic": False,
        }
        self.record.events.event("start" if found is None else "resume", details)

    @property
    def _signal(self) -> str | None:
        return self._signals[0] if self._signals else None


def _clients_of(file: Path, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Clients of a run's checkpoint, and those that joined since, whose rounds do not count."""
    try:
        noted: list[dict[str, Any]] = json.loads(read_text(file)) if file.exists() else []
        places = {client["number"] for client in saved}
        return saved + [{**client, "counted_round": 0} for client in noted if client["number"] not in places]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FederateError(f"{file} cannot be read: {error}. Move it away; its clients get new places then") from error
