"""The training loop of a run: epochs, steps, evaluations, the stop rule and signals."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from paceline.comm import Group
from paceline.data.loader import Position
from paceline.data.parts import PartsFlow
from paceline.device import is_accelerator
from paceline.elastic.membership import StepBoundary
from paceline.engine.engine import RankEngine, StepResult
from paceline.engine.reduction import UnreadStep
from paceline.errors import DataError, NonFiniteError, StorageError, SyncError, report_failure
from paceline.job.batch import Batch
from paceline.job.experts import add_counts
from paceline.job.loss import build_metrics
from paceline.job.partition import Partition
from paceline.job.samples import DataSets, in_users_data
from paceline.job.stop import Epochs, StopRule
from paceline.job.zoo.mixture import MixedSamples
from paceline.rank_environment import is_our_rank
from paceline.run.build import predicted_state_bytes
from paceline.run.checkpoints import Checkpoints, Stateful
from paceline.run.evaluations import UNREADABLE, Evaluations
from paceline.run.learning_rate import LearningRate
from paceline.run.process import stop_signals
from paceline.run.record.memory import PREDICTED, predicted_parts
from paceline.run.record.progress import PlainProgress
from paceline.run.record.recorder import WITNESS, Board, Events, Remarks, StepInfo, StepRecorder, Witness
from paceline.run.record.run import Run
from paceline.run.record.utilization import FLOPS, PEAK, flops_of, peak_of
from paceline.run.recovery.balance import Balancing
from paceline.run.recovery.recutting import Recutting
from paceline.sync.local import LocalRule
from paceline.wire.status import ends_generation

_POSITIONS = 8  # number of positions of a stream that are kept; ranks of a run differ by one step at most
_MOST_AHEAD_BYTES = 2**28  # batches that a local rule reads ahead of their steps


class Loop:
    """One rank's training loop, from the newest checkpoint to the stop rule.

    Subclasses override `begin`, `steps` and `ending`, and use the other public methods in them.

    Attributes:
        another_is_wanted: function that returns True if more ranks wait to join a new generation.
        at_boundary: function to call before each batch is read.
        recutting: decides when to move pipeline stages to other cuts.
        leaving: whether all ranks have decided to leave the loop, for a new generation or new pipeline cuts.
    """

    def __init__(
        self, run: Run, engine: RankEngine, data: DataSets, group: Group, *, board: Board | None = None
    ) -> None:
        """Create a loop; all loops of this process share `board`."""
        self.run_directory, self.job, self.engine, self.data, self.group = run, run.job, engine, data, group
        partition = engine.loader.partition
        # for a stream, the end of an epoch is known only when it is reached
        self.epochs = Epochs(partition.steps_per_epoch if isinstance(partition, Partition) else None)
        length = partition.length if isinstance(partition, PartsFlow) else self.epochs.steps
        metrics = build_metrics(self.job.metrics, engine.loss)
        self.stop = StopRule(self.job.stop, self.epochs, keep=self.job.checkpoint.best, metrics=metrics)
        self.total_steps = self.job.stop.total_steps(length)
        first = group.rank == 0
        progress = PlainProgress(self.total_steps) if first and not is_our_rank() else None
        self.events = Events(run, progress, writes=first)
        self.recorder = StepRecorder(run.path, engine, epochs=self.epochs, board=board)
        self.balancing = Balancing(engine, run.job, self.events, self.epochs)
        self.remarks = Remarks(engine, self.events, self.balancing.at_even_shares)
        self.rates = LearningRate(self.job.schedule, engine.optimizer, self.total_steps, self.epochs)
        self.evaluations = Evaluations(self.job, engine, data, metrics, self.stop, self.events, self.epochs)
        further: dict[str, Stateful] = {"schedule": self.rates, "evaluations": self.evaluations}
        if self.epochs.steps is None:
            further["epochs"] = self.epochs
        self.checkpoints = Checkpoints(run, engine, data, self.stop, group, self.events, further)
        self.evaluations.told = self._on_evaluation
        self.evaluations.on_best = self.checkpoints.save
        self.recutting = Recutting(engine, self.checkpoints, self.events, self.total_steps)
        self.witness = Witness(engine, writes_starts=first) if WITNESS in os.environ else None
        self.signal: str | None = None
        self.another_is_wanted: Callable[[], bool] = lambda: False
        self.at_boundary: Callable[[], None] = lambda: None
        self.leaving = False
        self._last: StepInfo | None = None
        # Steps before `_last`, back to the last synchronization of replicas, and at least one step. A rank writes the
        # line of a step once the step's times are known, so a lost rank may not have written the line.
        self._before: list[StepInfo] = []
        self._acted = -1
        self._begun: _Begun | None = None  # the step whose numbers are not read yet
        # for a stream: the loader's positions after the newest steps
        self._positions: dict[int, dict[str, Any]] = {}
        self._told_reading = -1
        self._unreadable: StorageError | None = None  # why this rank cannot read a batch that is due soon
        self._seen_until = -1  # with local rules: step of the next communication, up to which batches were read

    def run(self, boundary: StepBoundary | None = None, *, recut: bool = False, has_position: bool = False) -> bool:
        """Train until the stop rule or a signal ends the run, then save.

        Args:
            boundary: step boundary at which the ranks continue; the engine already has its state. None begins the run,
                or resumes it from a checkpoint.
            recut: whether the same ranks continue with another cut of the model, at the loader's position.
            has_position: whether the loader already has its position in a new generation.

        Returns:
            True if the run has ended. False if the ranks leave the loop earlier, to form another generation or to use
                another pipeline cut (`Recutting.cut`).

        Raises:
            PacelineError: the run cannot continue. Earlier checkpoints stay valid.
            GenerationOver: a rank was lost.
        """
        try:
            with stop_signals(self._note_signal):
                reason = (
                    self.begin() if boundary is None else self._go_on(boundary, recut=recut, has_position=has_position)
                )
                while reason is None and not self.leaving:
                    reason = self._epoch()
                if reason is None:
                    # settle before `close`, because the current checkpoint still writes an event
                    self.checkpoints.saving.settle()
                    return False
                self._finish(reason)
            return True
        except BaseException as error:
            if not ends_generation(error):
                report_failure(error)
            raise
        finally:
            self.engine.loader.close()
            self.close()

    def close(self) -> None:
        """Close the files of the record."""
        for files in (self.recorder, self.events, self.witness):
            if files is not None:
                files.close()

    def _epoch(self) -> str | None:
        try:
            return self.steps()
        except (NonFiniteError, SyncError):
            raise
        except Exception as error:
            begun, self._begun = self._begun, None
            try:
                if begun is not None:
                    self._recorded(begun)
            except NonFiniteError:
                # NaN or Inf in the weights caused the exception
                raise
            except Exception:  # noqa: BLE001 - the device may be lost, or the other ranks
                raise error from None
            raise

    def steps(self) -> str | None:
        """Train to the end of the epoch; return a reason if the run ends.

        Returns early, without a reason, if the ranks leave the loop.
        """
        self.at_boundary()
        self._note_position()
        if self._cannot_begin():
            return UNREADABLE
        for batch in self.engine.loader:
            self._note_position(ahead=1)
            reason = None
            for info in self.advance(batch):
                if info.result.problem is not None and self.rewound(info.result):
                    return None
                reason = self.after_step(info) or reason
            if self.engine.step_count in self.checkpoints.rejected:
                reason = self.stop.ended(self.engine.step_count)
            if reason is not None:
                return reason
            if not self.epochs.ends_with(self.engine.step_count):
                self._acted = self.engine.step_count
                if self.leaving:
                    return None
            self.at_boundary()
        if self.epochs.steps is None:
            return self._end_stream()
        self._tell_sources()
        reason = self.evaluations.after_epoch()
        self._acted = self.engine.step_count
        return reason

    def _end_stream(self) -> str | None:
        """End an epoch of a stream; return the reason if the run ends.

        Raises:
            DataError: the epoch has no samples.
        """
        step, flow = self.engine.step_count, self.engine.loader.partition
        assert isinstance(flow, PartsFlow)
        if self.epochs.ends_with(step):
            raise DataError(
                "data.stream_over",
                "epoch {epoch} of {name} has no samples. iter() must return a new iterator for each epoch.",
                epoch=self.epochs.completed(step),
                name=flow.name,
            )
        self.epochs.end(step)
        self._note_position()
        self._tell_reading()
        reason = self.evaluations.after_epoch()
        self._acted = step
        return reason or self.stop.ended(step)

    def _tell_reading(self) -> None:
        """Record what reading a stream has cost so far."""
        flow, step = self.engine.loader.partition, self.engine.step_count
        if isinstance(flow, PartsFlow) and self._told_reading != step:
            self._told_reading = step
            self.events("stream_read", {"step": step, "epoch": self.epochs.completed(step), **flow.costs()})

    def _tell_retries(self) -> None:
        """Record the batches that were read only in a later attempt.

        Every rank must call this method.
        """
        for rank, retries in enumerate(self.group.gather_json(self._retries())):
            for details in retries:
                self.events("data_retry", {"rank": rank, **details})

    def _retries(self) -> list[dict[str, Any]]:
        """Return the retries of this rank that are not recorded yet."""
        loader, evaluations = self.engine.loader, self.evaluations
        steps = self.epochs.steps or 0
        found = [(epoch * steps + step + 1, "training", retry) for epoch, step, retry in loader.retries]
        found += [(step, "evaluation", retry) for step, retry in evaluations.retries]
        loader.retries.clear()
        evaluations.retries.clear()
        return [
            {"step": step, "data": data, "seconds": round(retry.seconds, 3), "error": retry.error}
            for step, data, retry in found
        ]

    def _note_position(self, *, ahead: int = 0) -> None:
        """Keep a stream's position after the newest step, or `ahead` steps later."""
        loader = self.engine.loader
        if isinstance(loader.partition, PartsFlow):
            state = loader.state_dict()
            # states of data sets stay in the memory of each process
            state["flow"]["states"] = {}
            step = self.engine.step_count + ahead
            self._positions = {s: p for s, p in self._positions.items() if step - _POSITIONS < s < step} | {step: state}

    def advance(self, batch: Batch | None) -> Iterator[StepInfo]:
        """Take one step on this rank's share of a global batch.

        A step is recorded when its numbers are known. If the host runs ahead of an accelerator, this is after the next
        step is queued. Before anything else uses the model, the newest step is recorded as well. If a rewind skips the
        batch, no step is taken.

        Yields:
            Each recorded step, in order; the caller must then call `after_step`.
        """
        engine = self.engine
        step = engine.step_count + 1
        if step in self.checkpoints.rejected:
            engine.step_count = step
            return
        lr = self.rates.before(step - 1)
        if self._looks_ahead:
            self._look_ahead(step)
        self.vote()
        before, self._begun = self._begun, _Begun(engine.begin(batch), engine.loader.position, lr)
        votes: dict[str, int] = {}
        acts = not engine.runs_ahead or self._acts_after(step)
        if before is not None:
            info = self._recorded(before)
            # run requested actions only when model, data and record are at the same step
            votes, info.result.votes = info.result.votes, {}
            yield info
            acts = acts or bool(votes) or info.ending is not None
        if acts:
            begun, self._begun = self._begun, None
            info = self._recorded(begun)
            info.result.votes = votes | info.result.votes
            yield info

    def _cannot_begin(self) -> bool:
        """Return True if a rank cannot read the first batches of an iteration.

        Every rank must call this method.
        """
        if self.evaluations.unreadable is not None:  # while the run rewound
            return True
        if not self._looks_ahead:
            return False
        self._seen_until = -1
        self._look_ahead(self.engine.step_count)
        if self.engine.updates:
            # so that only ranks that still read are in the phase "data"
            self.engine.on_phase("sync", self.engine.step_count + 1)
        return any(self.group.gather_json(self._unreadable is not None))

    def _look_ahead(self, step: int) -> None:
        """Read the batch after `step` before the votes of `step`.

        If the batch cannot be read, all ranks can then end after this step. If the host runs ahead of the device, the
        ranks learn of a vote one step later, so a second batch is read. With local rules, votes arrive only when
        replicas communicate, so the batches up to the next communication are read.
        """
        rule, most_bytes = self.engine.rule, math.inf
        count = 2 if self.engine.runs_ahead else 1
        if self.engine.local_steps and isinstance(rule, LocalRule):
            if step < self._seen_until:
                return
            count, most_bytes = next(n for n in itertools.count(1) if rule.communicates_in(step + n)), _MOST_AHEAD_BYTES
            self._seen_until = step + count
        count = count if self.total_steps is None else min(count, self.total_steps - step)
        self._unreadable = self.engine.loader.look_ahead(count, most_bytes)

    @cached_property
    def _looks_ahead(self) -> bool:
        # with loader processes, reading all batches of a local rule's period at once would make the device wait
        local, loader = self.engine.local_steps, self.engine.loader
        return loader.can_look_ahead and not (
            local and (loader.num_workers or not isinstance(self.engine.rule, LocalRule))
        )

    def _recorded(self, begun: _Begun) -> StepInfo:
        assert begun.position is not None
        result = self.engine.settle(begun.step)
        position = begun.position
        counts = dict(position.counts) if position.counts else {}
        info = StepInfo(
            result, position.epoch, position.local, begun.lr, None, self.engine.signals.take_busy(), counts=counts
        )
        if self._last is not None:
            if self._last.result.reduced:
                self._before.clear()
            self._before.append(self._last)
        self._last = info
        self.tell_step(info)
        self.engine.on_phase("data", self.engine.step_count + 1)
        return info

    def tell_step(self, info: StepInfo) -> None:
        """Write a step's numbers to the record, and show them."""
        self.recorder.on_step(info)
        self.events.on_step(info)
        if self.witness is not None:
            self.witness.on_step(info)

    def _acts_after(self, step: int) -> bool:
        """Return True if `step` must be complete before the next step begins.

        Then something else uses the model, such as an evaluation or a checkpoint.
        """
        every = self.job.evaluate.every_steps
        return (
            step == self.total_steps
            or self.epochs.steps is None
            or self.epochs.ends_with(step)
            or (every is not None and step % every == 0)
            or self.checkpoints.saving.falls_on(step)
            or self.engine.examines(step + 1)
            or step + 1 in self.checkpoints.rejected
        )

    def after_step(self, info: StepInfo) -> str | None:
        """Evaluate, save, and adapt shares and cuts when due; return a reason to end."""
        self.checkpoints.saving.poll()
        self.events.missing(self.recorder.lines)
        info.ending = self.ending(info.result)
        if info.result.votes:
            self.leaving = self.leaving or "generation" in info.result.votes
            if "retried" in info.result.votes:
                self._tell_retries()
        return self._act(info)

    def _act(self, info: StepInfo) -> str | None:
        if info.busy_s:  # the step reduced the ranks' busy times
            self.remarks.after_step(info)
            self.balancing.after_step(info)
        self.remarks.tell()
        info.ending = info.ending or self.evaluations.after_step(info)
        self.checkpoints.after_step(info)
        if info.busy_s:
            self.recutting.after_step(info)
        self.leaving = self.leaving or bool(self.recutting.cut)
        return info.ending

    def ending(self, result: StepResult) -> str | None:
        """Return the reason to end: a signal, the stop rule or the clock."""
        if "interrupted" in result.votes:
            return self.signal or "interrupted"
        # Without a reduction, only this replica knows the loss, and a single replica must not end its run.
        reason = self.stop.after_step(result.step, result.loss) if result.reduced else self.stop.ended(result.step)
        if reason is None and "out_of_time" in result.votes:
            reason = f"seconds: {self.job.stop.seconds:g} s are over"
        return reason or (UNREADABLE if "unreadable" in result.votes else None)

    def resumed(self, boundary: StepBoundary) -> bool:
        """Load the newest checkpoint; return False if it belongs to another step."""
        return self.checkpoints.resume() and self.engine.step_count == boundary.step

    @property
    def begun(self) -> bool:
        """True once the ranks have a state from which they can continue."""
        return self._acted >= 0

    def boundary(self) -> StepBoundary:
        """Return the step boundary at which another generation continues."""
        pipeline = self.engine.split.pipeline if self.engine.split is not None else None
        return StepBoundary(
            step=self.engine.step_count,
            acted=self._acted,
            stop=self.stop.state_dict(),
            schedule=self.rates.state_dict(),
            evaluated_at=self.evaluations.at,
            rejected=list(self.checkpoints.rejected),
            items_per_sample=self.engine.compute.normalization.items_per_sample,
            corrupted=list(self.engine.replica_state.corruption.times),
            last=None if self._last is None else self._last.as_json(),
            before=[info.as_json() for info in self._before],
            recuts=self.recutting.recuts + bool(self.recutting.cut),
            outcome=None if self.engine.outcome is None else asdict(self.engine.outcome),
            cut="" if pipeline is None else pipeline.cut,
            epoch_ends=list(self.epochs.ends),
            position=self._positions.get(self.engine.step_count),
        )

    def _go_on(self, boundary: StepBoundary, *, recut: bool, has_position: bool) -> str | None:
        """Continue in another generation; return a reason if the run ends."""
        engine = self.engine
        engine.step_count, self._acted = boundary.step, boundary.acted
        if not (recut or has_position):
            position = boundary.position
            engine.loader.load_state_dict(self.position_after(boundary.step) if position is None else position)
        self.epochs.ends = list(boundary.epoch_ends)
        engine.compute.normalization.items_per_sample = boundary.items_per_sample
        engine.compute.normalization.prepare()
        # ranks were interrupted at different points, so set the count to the same value
        engine.updates = 0
        if engine.guard.spikes is not None:
            engine.guard.spikes.load_state_dict((boundary.outcome or {}).get("last_losses", []))
        scale = (boundary.outcome or {}).get("loss_scale")
        if engine.compute.loss_scale is not None and scale is not None:
            engine.compute.loss_scale.load_state_dict(scale)
        self.stop.load_state_dict(boundary.stop)
        self.rates.load_state_dict(boundary.schedule)
        self.evaluations.at = self.evaluations.counted = boundary.evaluated_at
        self.checkpoints.rejected = boundary.rejected
        engine.replica_state.corruption.times, self.recutting.recuts = list(boundary.corrupted), boundary.recuts
        self.checkpoints.continued()
        self.checkpoints.begin()
        self._last = None if boundary.last is None else StepInfo.from_json(boundary.last)
        self._before = [StepInfo.from_json(info) for info in boundary.before]
        for info in (*self._before, self._last):
            if info is not None:
                self.recorder.complete(info)
        if not recut:
            ranks = {"step": boundary.step, "replicas": engine.plan.dp, "ranks": self.group.size}
            self.events("generation", {**ranks, "transport": self.group.transport.name})
            if self.witness is not None:
                self.witness.on_start(boundary.step)
        engine.meter.restart()
        reason = None
        if self._last is not None and boundary.acted < boundary.step:
            # the ranks were interrupted before the actions that follow this step
            reason = self._act(self._last)
            if reason is None and self.epochs.ends_with(boundary.step):
                reason = self.evaluations.after_epoch()
            self._acted = boundary.step
        elif self.epochs.ends_with(boundary.step) and self.epochs.steps is None:
            # the ranks may have been interrupted while they ended the epoch
            reason = self.evaluations.after_resume()
        return reason or self.stop.ended(boundary.step)

    def position_after(self, step: int) -> dict[str, Any]:
        """Return the loader's state for the batch that follows `step`."""
        assert self.epochs.steps is not None
        epoch, within = divmod(step, self.epochs.steps)
        return self.engine.loader.state_dict() | {"epoch": epoch, "step": within, "reader": None}

    def begin(self) -> str | None:
        """Resume from the newest checkpoint, if any, and record the start event.

        Returns the reason if the run has already ended.
        """
        self.rates.start()
        resumed = self.checkpoints.resume()
        engine = self.engine
        self.events(
            "resume" if resumed else "start",
            {
                "step": engine.step_count,
                "plan": str(self.run_directory.plan),
                "replicas": engine.plan.dp,
                "ranks": self.group.size,
                "transport": self.group.transport.name,
                "samples_per_epoch": getattr(engine.loader.partition, "samples", None),
                "steps_per_epoch": self.epochs.steps,
                "total_steps": self.total_steps,
                "parameters": engine.parameter_count,
                "synthetic": self.data.synthetic,
                "classes": self.data.classes,
                "balance_off": self.balancing.off,
                "predicted_state_bytes": predicted_state_bytes(self.job, engine),
                **self._of_devices(resumed=resumed),
            },
        )
        if self.witness is not None:
            self.witness.on_start(engine.step_count)
        engine.compute.normalization.prepare()
        engine.compute.packed.prepare()
        if resumed:  # the checkpoint has replaced the initial weights
            engine.about_weights = []
        self.remarks.tell()
        if self.group.transport_note is not None:
            self.events("transport", {"transport": self.group.transport.name, "reason": self.group.transport_note})
        reason = self.stop.ended(engine.step_count)
        if resumed and reason is None:
            reason = self.evaluations.after_resume()
        self.checkpoints.begin()
        engine.meter.restart()
        self._acted = engine.step_count
        if isinstance(engine.loader.partition, PartsFlow):
            flow = engine.loader.partition
            self.events("stream", {"parts": len(flow.deal.counts), "said": flow.warnings()})
        return reason

    def _of_devices(self, *, resumed: bool) -> dict[str, Any]:
        """Return the peak of accelerators and, in the first attempt, FLOPs and predicted memory."""
        run, known = self.run_directory, None
        if self.group.rank == 0 and is_accelerator(self.engine.compute.device):
            known = peak_of(self.job, run.plan, run.cluster)
        if resumed:
            return {PEAK: known}
        predicted = predicted_parts(self.job, run.cluster, run.plan) if known else None
        return {PEAK: known, FLOPS: flops_of(self.job) if known else None, PREDICTED: predicted}

    def _finish(self, reason: str) -> None:
        interrupted = reason in ("interrupted", "SIGINT", "SIGTERM")
        if not interrupted and reason != UNREADABLE:
            reason = self.evaluations.at_end() or reason
        self._tell_retries()
        if reason == UNREADABLE:
            self.checkpoints.finish()
            raise self._store_error()
        self._tell_reading()
        elapsed_s = self.stop.elapsed_s
        if not self.epochs.ends_with(self.engine.step_count):
            self._tell_sources()
        self.checkpoints.finish()
        if any(found := self.group.gather_json(self.engine.compute.experts.counts())):
            self.events("experts", {"step": self.engine.step_count, **add_counts(found)})
        reasons = self.group.gather_json(reason)
        if unauthenticated := sum(self.group.gather_json(self.group.transport.unauthenticated)):
            self.events("unauthenticated", {"connections": unauthenticated})
        named = next((r for r in reasons if r != "interrupted"), reason)
        self.events(
            "end",
            {
                "reason": named,
                "step": self.engine.step_count,
                "elapsed_s": round(elapsed_s, 3),
                "interrupted": interrupted,
            },
        )
        self.engine.on_phase("done", self.engine.step_count)

    def _tell_sources(self) -> None:
        """Record the samples and epochs of each source of a mixture."""
        partition, dataset = self.engine.loader.partition, in_users_data(self.data.train, [])[0]
        if isinstance(partition, Partition) and isinstance(dataset, MixedSamples):
            counts = partition.drawn(*divmod(self.engine.step_count, partition.steps_per_epoch))
            self.events("sources", {"step": self.engine.step_count, "sources": dataset.drawn(counts)})

    def _store_error(self) -> StorageError:
        """Return the error of the first rank that cannot read its batch.

        Every rank must call this method.
        """
        own = self._unreadable or self.evaluations.unreadable
        found = self.group.gather_json(None if own is None else str(own))
        return StorageError(
            "storage.batch_unreadable",
            "{reason}. Training stopped after step {step}, and its state is saved. Continue with --resume.",
            reason=next(text for text in found if text is not None).rstrip("."),
            step=self.engine.step_count,
            may_pass=True,
        )

    def rewound(self, result: StepResult) -> bool:
        """Apply the job's policy after a skipped update; return True if the run has rewound."""
        event, policy = "nonfinite", "scale"
        # an overflow only means that the loss scale was too large, so the job's policy does not apply
        if not self.engine.guard.overflowed:
            event, policy = ("spike", self.job.spike.policy) if result.is_spike else ("nonfinite", self.job.nonfinite)
        self.events(event, {"step": result.step, "problem": result.problem, "policy": policy})
        if policy != "rewind":
            return False
        self.checkpoints.rewind(result)
        self._positions.clear()
        self.evaluations.at = -1
        # the result is not needed: the loop finds a reason to end again after the skipped step
        self.evaluations.after_resume()
        return True

    # Votes and evaluations

    def _on_evaluation(self, step: int, metrics: dict[str, float], *, counts: bool) -> None:
        if counts:
            self.rates.after_evaluation(step, metrics)
        self.recorder.on_evaluation(step, metrics)

    def vote(self) -> None:
        """Send this rank's votes, such as a signal, with the next gradients."""
        if self.signal is not None:
            self.engine.signals.vote("interrupted")
        if self._unreadable is not None:
            self.engine.signals.vote("unreadable")
        if self.engine.loader.retries or self.evaluations.retries:
            self.engine.signals.vote("retried")
        if self.another_is_wanted():
            self.engine.signals.vote("generation")
        if self.group.rank == 0:
            if self.stop.out_of_time():
                self.engine.signals.vote("out_of_time")
            self.checkpoints.saving.ask(self.engine.step_count + 1, self.stop.elapsed_s)

    def _note_signal(self, name: str) -> None:
        self.signal = name


@dataclass(slots=True)
class _Begun:
    step: StepResult | UnreadStep
    position: Position | None
    lr: float
