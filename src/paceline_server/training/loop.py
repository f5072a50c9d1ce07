"""The first worker: computes pieces like all workers, and evaluates, saves and records.

At a boundary, all earlier batches and no later batches are applied, so the state equals the state of an ordinary run.
Boundaries are the steps at which the job evaluates or saves, the times at which it saves by the clock or is stopped,
and the end of the run.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from typing import Any, cast

import msgspec

from paceline.comm import Group
from paceline.engine.engine import StepResult
from paceline.engine.meter import COMPUTE, Timing
from paceline.job.samples import DataSets
from paceline.planning.sync_info import ServerProcesses, SyncSpec
from paceline.run.loop import Loop
from paceline.run.record.recorder import StepInfo
from paceline.run.record.run import Run
from paceline.units import count
from paceline.wire.store import StoreClient
from paceline_server.parameters.client import ServerClient
from paceline_server.training.pieces import next_boundary
from paceline_server.training.worker import PartRecord, Worker

BEGIN = "served/begin"  # key of the run's store: number of batches before the first round
_PROGRESS = "served/progress"  # key of the run's store: state for a restarted first worker
_AHEAD_S = 2.0  # seconds of training that are dealt in advance, which is also the longest delay after a signal
_FIRST_AHEAD = 16  # batches dealt in advance before the time of a batch is known


class FirstWorker(Loop):
    """Training loop of the first worker, from boundary to boundary."""

    def __init__(self, run: Run, worker: Worker, data: DataSets, group: Group, store: StoreClient) -> None:
        super().__init__(run, worker.engine, data, group)
        self.worker, self.client, self.store, self.workers = worker, worker.client, store, run.plan.dp
        self._share, self._why = worker.whole.share, ""
        self._opened = 0  # number of batches that may be dealt
        self._noted = 0  # the last boundary, from which this worker continues after a restart
        self._votes: dict[str, int] = {}
        self._last_written = time.monotonic()
        self._batch_s: float | None = None

    def begin(self) -> str | None:
        """Begin or resume the run, or continue the run if this worker was restarted."""
        found = json.loads(self.store.get(_PROGRESS)) if self.store.check([_PROGRESS]) else None
        if (progress := self._share(found)) is not None:
            return self._return(progress)
        reason = super().begin()
        if self.client is not None:
            self.store.set(BEGIN, str(self.engine.step_count).encode())
        self.worker.hand_over(self.engine.step_count, ServerProcesses.of(self.run_directory.plan.sync).parts)
        self._opened = self.engine.step_count
        self._applied = AppliedBatches(self.workers, self._opened)
        self.events("sync", {"said": [self._sentence()]})
        self._note_progress()
        return reason

    @property
    def _epoch_steps(self) -> int:
        assert self.epochs.steps is not None, "plans with servers refuse streams"
        return self.epochs.steps

    def _sentence(self) -> str:
        plan = self.run_directory.plan
        spec, servers = SyncSpec.parse(plan.sync), ServerProcesses.of(plan.sync)
        staleness, period = spec.arguments["staleness"], spec.period
        own = "a server owns" if servers.parts == 1 else f"{servers.parts} servers own"
        backup = ", with a backup each" if servers.each > 1 else ""
        nouns = ("global batch", "global batches") if period == 1 else (f"round of {period} batches", "such rounds")
        batches = "" if math.isinf(staleness) else count(int(staleness), *nouns)
        ahead = f"at most {batches} ahead" if batches else "nobody waits"
        learned = f"how far they came in {period} steps with pieces of the batches"
        pushed = "the gradients of pieces of the batches" if period == 1 else learned
        coded = "" if plan.compress == "none" else f", coded by {plan.compress}"
        return f"sync=server: {own} the parameters{backup}; {plan.dp} workers push {pushed}{coded}, {ahead}"

    def _return(self, progress: dict[str, Any]) -> str | None:
        self.engine.step_count = self._opened = progress["step"]
        self.stop.load_state_dict(progress["stop"])
        self.evaluations.at = progress["evaluated_at"]
        self.checkpoints.continued()
        self.worker.pull()
        self._noted = progress["step"]
        self._applied = AppliedBatches(self.workers, max(progress["step"], self.recorder.last_step))
        self.engine.meter.restart()
        return self.stop.ended(progress["step"])

    def steps(self) -> str | None:
        """Train to the next boundary, and evaluate or save if due."""
        boundary = self._next_boundary()
        self._last_written = time.monotonic()
        while not self._reached(boundary):
            self._compute(boundary)
        step = self._opened
        self._take_over(step)
        info = self._last_of(step)
        info.result.votes, self._votes = self._votes, {}
        reason = self.after_step(info)
        if reason is None and step % self._epoch_steps == 0:
            reason = self.evaluations.after_epoch()
        # parameters change from here on
        self.checkpoints.saving.release()
        self._tell_servers(step)
        self._note_progress()
        return reason

    def _compute(self, boundary: int) -> None:
        self._open(boundary)
        # the worker's ranks share the rest of the loop's state
        self._opened, self._votes = self._share([self._opened, self._votes])
        self.vote()
        results = self.worker.advance()
        if results is None:
            self._boundary_reached = True
            return
        for result in results:
            self._votes |= result.votes
            if result.problem is not None:
                self.rewound(result)
        if self.client is not None:
            self._write()

    def _open(self, boundary: int) -> None:
        """Allow further batches, unless other work is due first."""
        self._boundary_reached = False
        if self.client is None or self._votes or self._opened >= boundary:
            return
        ahead = _FIRST_AHEAD if self._batch_s is None else max(_FIRST_AHEAD, math.ceil(_AHEAD_S / self._batch_s))
        rounds = self.worker.rounds
        wanted = min(boundary, rounds.whole(max(self._applied.next, self.engine.step_count) + ahead))
        if wanted > self._opened:
            self._opened = wanted
            self.client.open(rounds.until(wanted), rounds.until(self._noted))

    def _reached(self, boundary: int) -> bool:
        """Return True if all dealt batches are applied, and no further batches may be dealt."""
        return self._boundary_reached and (bool(self._votes) or self._opened >= boundary)

    def _next_boundary(self) -> int:
        self._boundary_reached = False
        return next_boundary(self.job, self._epoch_steps, self.total_steps, self.engine.step_count)

    def _take_over(self, step: int) -> None:
        """Load the state of the servers into this engine."""
        self.worker.take_over()
        self.engine.step_count = step
        self.engine.loader.load_state_dict(self.position_after(step))

    def ending(self, result: StepResult) -> str | None:
        """Return why the run ends at a boundary, on all ranks of this worker.

        The first rank knows the losses of all batches before the boundary. If several batches end the run, the reason
        of the earliest batch is returned.
        """
        reason = super().ending(result)
        return cast("str | None", self._share(self._why or reason))

    # Record

    def _last_of(self, step: int) -> StepInfo:
        """Write the record of all batches before a boundary, and return the last batch."""
        info = (self._write(step) or self._told(step, [], 0.0)) if self.client is not None else None
        told = self._share(None if info is None else info.as_json())
        return info or StepInfo.from_json(told)

    def _write(self, until: int | None = None) -> StepInfo | None:
        """Write the record of fully applied batches, and return the last one; None without any.

        Args:
            until: the current boundary; None between boundaries.
        """
        assert self.client is not None
        if until is None and time.monotonic() - self._last_written < _WRITE_S:
            return None
        if not (found := self._applied.whole(self.client)):
            return None
        # read after the records, so that no batch ends before a batch that is already written
        now, ended_at = time.monotonic(), time.time()
        passed_s, self._last_written = now - self._last_written, now
        self._batch_s, info = passed_s / len(found), None
        until_now = range(len(found) - 1, -1, -1)
        for (batch, pieces), later in zip(found, until_now, strict=True):
            info = self._told(batch + 1, pieces, self._batch_s)
            info.ended_at = ended_at - later * self._batch_s
            self.tell_step(info)
            if info.result.step != until and (reason := self.stop.after_step(info.result.step, info.result.loss)):
                self._votes["stop"] = 1
                self._why = self._why or reason
        return info

    def _told(self, step: int, pieces: list[PartRecord], step_s: float) -> StepInfo:
        """Return the results of a batch for callbacks, with the mean loss of its pieces."""
        computed = [piece for piece in pieces if piece.loss is not None]
        samples = sum(piece.samples for piece in computed)
        loss = sum((piece.loss or 0.0) * piece.samples for piece in computed) / samples if samples else math.nan
        norm = max((piece.norm or 0.0 for piece in computed), default=0.0)
        timing = Timing(step)
        timing.parts_s[COMPUTE] = step_s
        result = StepResult(step, loss, samples, norm, None, {}, timing)
        factor = self.job.schedule.factor_at(step - 1, self.total_steps)
        return StepInfo(result, (step - 1) // self._epoch_steps, samples, self.job.optimizer.lr * factor)

    def _tell_servers(self, step: int) -> None:
        if self.client is None:
            return
        servers = self.client.statistics()
        workers = servers[0]["clients"]
        for name, counts in workers.items():
            for key in ("bytes", "sent_bytes"):
                counts[key] = sum(server["clients"].get(name, {}).get(key, 0) for server in servers)
        told = {key: servers[0][key] for key in ("version", "backup")}
        self.events("served", {"step": step, **told, "workers": workers})

    def _note_progress(self) -> None:
        if self.client is None:
            return
        self._noted = self._opened
        progress = {"step": self._opened, "stop": self.stop.state_dict(), "evaluated_at": self.evaluations.at}
        self.store.set(_PROGRESS, json.dumps(progress).encode())


_WRITE_S = 0.2  # interval at which the records of pieces are read


class AppliedBatches:
    """Batches that are assembled from the records of applied pieces.

    Args:
        pieces: number of pieces per batch.
        first: the first batch.

    Attributes:
        next: the next batch that `whole` returns.
    """

    def __init__(self, pieces: int, first: int) -> None:
        self.next, self._pieces, self._number = first, pieces, 0
        self._known: defaultdict[int, dict[int, PartRecord]] = defaultdict(dict)

    def whole(self, client: ServerClient) -> list[tuple[int, list[PartRecord]]]:
        """Return the batches whose pieces are all applied, in order, and each batch only once."""
        self._number, found = client.records(self._number)
        for ticket, record in found:
            for part in msgspec.convert(record, list[PartRecord]):
                if part.batch >= self.next:
                    self._known[part.batch][ticket % self._pieces] = part
        batches = []
        while len(self._known[self.next]) == self._pieces:
            batches.append((self.next, list(self._known.pop(self.next).values())))
            self.next += 1
        return batches
