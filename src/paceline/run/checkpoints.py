"""Checkpoints of a run: schedule, saving, resuming and rewinding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from paceline.comm import Group
from paceline.data.loader import changed_data
from paceline.elastic.hosts.files import fetch
from paceline.engine.engine import RankEngine, StepResult
from paceline.engine.meter import CHECKPOINT
from paceline.engine.reduction import StepSignals
from paceline.errors import CheckpointError, DataError, NonFiniteError
from paceline.job.job import CheckpointSpec
from paceline.job.samples import DataSets, all_files_of
from paceline.job.stop import StopRule
from paceline.run.record.recorder import Events, StepInfo
from paceline.run.record.run import Run
from paceline.run.record.shards import changed_files, note_shards
from paceline.run.recovery.mirror import LastGood
from paceline.state.checkpoint import restore, snapshot
from paceline.state.manifest import checkpoints
from paceline.state.reader import Loaded, load_latest
from paceline.state.writer import Checkpointer, Snapshot

# If training waits longer than both limits for a checkpoint, the next checkpoint begins earlier. The limits are a
# fraction of the time between two checkpoints, and seconds.
_WORTH_IT, _WORTH_IT_S = 0.01, 2.0
_PACE = 10.0  # factor by which writing takes longer during training than alone


class CheckpointSchedule:
    """Schedule of a rank's checkpoints; also waits for them and counts failures.

    With `every_steps`, training is never more than that number of steps ahead of the last complete checkpoint.
    Training waits for the current checkpoint if necessary. After a long wait, the next checkpoint begins some steps
    earlier.

    Attributes:
        at: step at which the newest checkpoint began; -1 before the first checkpoint.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        rule: CheckpointSpec,
        signals: StepSignals,
        report: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.checkpointer, self.rule, self.signals, self.report = checkpointer, rule, signals, report
        self.at = -1
        self._whole = 0  # step of the newest complete checkpoint when training began, or 0
        self._failures = 0  # consecutive failures
        self._clock_s = 0.0  # clock of the stop rule when the newest checkpoint began
        self._begun = time.monotonic()
        self._lead_steps = 0  # on rank 0: number of steps by which the next checkpoint begins earlier
        self._early = False  # whether the newest checkpoint began early
        self._in_flight = False  # True until the newest checkpoint's tensors are released and its writer has ended
        self._released = True

    def resumed(self, step: int, clock_s: float) -> None:
        """Record that training begins, or continues from the checkpoint of `step`."""
        self.at = self._whole = step
        self._clock_s, self._begun = clock_s, time.monotonic()

    def ask(self, step: int, clock_s: float) -> None:
        """On rank 0, vote for a checkpoint after `step` if one is wanted.

        A checkpoint is wanted when the interval in seconds has passed, or earlier if the last checkpoint took long.
        """
        every = self.rule.every_steps
        if every is None:
            ahead_s = min(self.checkpointer.write_s, self.rule.every_seconds / 2)
            wanted = clock_s - self._clock_s >= self.rule.every_seconds - ahead_s
        else:
            wanted = self._lead_steps > 0 and step - max(self.at, 0) >= every - self._lead_steps
        if wanted:
            self.signals.vote("checkpoint")

    def falls_on(self, step: int) -> bool:
        """Return True if the step number alone may make a checkpoint due after `step`."""
        every = self.rule.every_steps
        return every is not None and (step % every == 0 or step - max(self.at, 0) >= every)

    def due(self, step: int, votes: dict[str, int]) -> bool:
        """Return True if a checkpoint begins after `step`; all ranks get the same result."""
        every = self.rule.every_steps
        if every is None:
            return "checkpoint" in votes
        asked = "checkpoint" in votes
        shortly_after = self._early and step - self.at <= every // 2
        self._early = asked or (self._early and shortly_after)
        return asked or (step % every == 0 and not shortly_after) or step - max(self.at, 0) >= every

    def begin(self, step: int, snapshot: Snapshot, clock_s: float, *, copies: bool = True) -> None:
        """Begin a checkpoint; it is written while the next steps run (`Checkpointer.save`)."""
        self.settle()
        self.at = step
        self._clock_s, self._begun = clock_s, time.monotonic()
        self._in_flight, self._released = True, False
        self.checkpointer.save(step, snapshot, copies=copies)

    def release(self) -> None:
        """Wait until the current checkpoint has copied the weights, so they may change."""
        if self._in_flight:
            self.checkpointer.release()
            self._released = True

    def before_update(self, step: int) -> None:
        """Wait until the weights may change and the checkpoint interval allows `step`."""
        if not self._in_flight:
            return
        self.release()
        every = self.rule.every_steps
        if (
            every is None
            or step - max(self._whole, self.checkpointer.completed) <= every
            or not self.checkpointer.under_way
        ):
            return
        waited_s = self.checkpointer.complete()
        step_s = max(time.monotonic() - self._begun - waited_s, 1e-6) / max(step - self.at, 1)
        if waited_s > max(_WORTH_IT_S, _WORTH_IT * every * step_s):
            self._lead_steps = min(every // 2, max(self._lead_steps, math.ceil(_PACE * waited_s / step_s)))

    def poll(self) -> None:
        """Count a checkpoint that failed in the background.

        Raises:
            CheckpointError: the number of consecutive failures has reached the job's limit.
        """
        if self._in_flight:
            # check `busy` before `poll`: a writer stores its error before it ends
            over = self._released and not self.checkpointer.busy
            self._note(self.checkpointer.poll)
            self._in_flight = not over

    def settle(self) -> None:
        """Wait for the current checkpoint; count a failure as `poll` does."""
        self._note(self.checkpointer.close)

    def finish(self) -> None:
        """Finish the run's last checkpoint, and raise its failure.

        Raises:
            CheckpointError: the checkpoint failed.
        """
        self.checkpointer.close()

    def _note(self, look: Callable[[], None]) -> None:
        try:
            look()
        except CheckpointError as error:
            if self.checkpointer.rank != 0:
                return  # rank 0 waits for this rank's part, and reports the failure
            self._failures = 1 if self.checkpointer.completed > self._whole else self._failures + 1
            self._whole = max(self._whole, self.checkpointer.completed)
            most = self.rule.max_failures
            if self._failures >= most:
                allowed = f"{most} in a row have failed" if most > 1 else "It failed"
                raise CheckpointError(
                    "checkpoint.failures_exhausted",
                    "{error} {failures} (checkpoint.max_failures), so the run ends. Continue with --resume when "
                    "there is room.",
                    error=error,
                    failures=allowed,
                ) from error
            details = {"reason": str(error), "failures": self._failures, "max_failures": most}
            self.report("checkpoint_failed", details)


# maximum number of rewinds in a row without a new checkpoint
MAX_REWINDS = 3


class Stateful(Protocol):
    """Part of the loop whose state checkpoints save as JSON values."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """Checkpoints of a run: saving, resuming, and rewinding after a bad step.

    Attributes:
        writer: writer of this rank's part of each checkpoint.
        saving: schedule of the checkpoints.
        memory: copy of the last good state; None if the job does not rewind.
        rejected: steps whose batches are skipped after a rewind.
        further: other parts of the loop that have state, by their names in a checkpoint.
    """

    def __init__(
        self,
        run: Run,
        engine: RankEngine,
        data: DataSets,
        stop: StopRule,
        group: Group,
        events: Events,
        further: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.further = further or {}
        self.run, self.engine, self.data, self.stop, self.group, self.events = run, engine, data, stop, group, events
        job = run.job
        self.writer = Checkpointer(
            run.checkpoints,
            rank=group.rank,
            world=group.size,
            keep=job.checkpoint.keep,
            deadline_s=job.deadline_s,
            report=events,
        )
        self.saving = CheckpointSchedule(self.writer, job.checkpoint, engine.signals, events)
        engine.before_update = self.saving.before_update
        rewinds = "rewind" in (job.nonfinite, job.spike.policy)
        self.memory = LastGood(engine, group, job.checkpoint.memory_every_steps) if rewinds else None
        self.rejected: list[int] = []
        self._fingerprint = engine.loader.fingerprint()
        # the files of the validation and test sets, which may have paths of their own; unknown if each host has others
        others = [] if job.partition.host_files else all_files_of(data.held_out, data.test)
        self._other_files = [number for files in others for number in files.digest]
        self._rewinds = 0
        if group.rank == 0:
            note_shards(run, data, events)

    def after_step(self, info: StepInfo) -> None:
        """Begin a checkpoint if it is due, except after the run's last step."""
        due = self.saving.due(info.result.step, info.result.votes) and info.ending is None
        if due and self.saving.at != info.result.step:  # the best checkpoint may already be of this step
            self.save()
        if self.memory is not None and info.ending is None and self.memory.after_step(info, self._values):
            self._rewinds = 0
            self.engine.meter.mark(CHECKPOINT)

    def begin(self) -> None:
        """Before the first step, save a state to rewind to, if the job rewinds."""
        if self.memory is None:
            return
        if self.saving.at < 0:
            self.save()
        self.memory.take(self._values())

    def save(self, *, copies: bool = True) -> None:
        """Begin a checkpoint of the current state; it is written while the next steps run.

        Args:
            copies: False if the state does not change until the checkpoint is written.
        """
        self.engine.on_phase("checkpoint", self.engine.step_count)
        self.engine.loader.gather_states()
        saved = snapshot(self.engine, self._values())
        saved.protected = None if self.stop.best is None else self.stop.best.step
        self.saving.begin(self.engine.step_count, saved, self.stop.elapsed_s, copies=copies)
        self._rewinds = 0
        self.engine.meter.mark(CHECKPOINT)

    def finish(self) -> None:
        """Save the final state, unless it is already saved, and wait for the writer."""
        if self.saving.at != self.engine.step_count:
            self.save(copies=False)
        self.saving.finish()

    def resume(self) -> bool:
        """Resume from the newest complete checkpoint; return False if there is none."""
        loaded = self._newest()
        if loaded is None:
            return False
        try:
            self._refuse_other_data(loaded.values["loop"])
            values = restore(self.engine, loaded, self.events)
            self.stop.load_state_dict(values["stop"])
            self._load_further(values)
            self.rejected = values["rejected"]
            if self.engine.step_count != loaded.step:
                raise ValueError(f"step {self.engine.step_count!r}")
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            # The checkpoint's files are intact, but no version of paceline writes such values.
            text = f"{loaded.path} holds values that no run writes ({error!r:.200})"
            raise CheckpointError(
                "checkpoint.unusable",
                "{reason}. Remove this folder to continue from the previous checkpoint.",
                reason=text,
            ) from error
        self.saving.resumed(loaded.step, self.stop.elapsed_s)
        return True

    def _refuse_other_data(self, saved: Mapping[str, Any]) -> None:
        """Refuse to resume with a changed data set.

        Its split into training and validation samples differs, so the run would train on earlier validation samples.
        With other files for validation or test, metrics before and after the checkpoint could not be compared.
        """
        what = changed_data(saved.get("data"), self._fingerprint)
        if what is None and saved.get("other_files", self._other_files) != self._other_files:
            what = "the files of the validation or test set are not the same"
        if what is None:
            return
        raise DataError(
            "data.changed",
            "the data set of {run} has changed: {change}. A resumed run would train on or measure different "
            "samples. Restore the data set, or start a new run without --resume.",
            run=self.run.path,
            change=changed_files(self.run, self.data) or what,
        )

    def rewind(self, result: StepResult) -> None:
        """Return to the last good state, and skip this step's batch from then on.

        The last good state is usually the copy in memory. The newest checkpoint is used if it is newer, or if
        training failed again right after the copy in memory.

        Raises:
            NonFiniteError: there were too many rewinds in a row, or there is no checkpoint.
        """
        self._rewinds += 1
        if self._rewinds > MAX_REWINDS:
            raise NonFiniteError(
                "nonfinite.rewinds_exhausted",
                "{problem}, and the run has already rewound {rewinds} times in a row. Lower the learning rate or set "
                "clip_norm.",
                problem=result.problem,
                rewinds=MAX_REWINDS,
            )
        state = self.memory.newest(since=self.saving.at) if self.memory is not None else None
        if self.memory is not None and state is not None:
            self.saving.release()
            values = self.memory.restore(state)
        else:
            values = self._from_disk(result)
        self.stop.rewind(values["stop"])
        self._load_further(values)
        self.rejected = [*self.rejected, result.step]
        self.engine.meter.restart()
        kept = "memory" if state is not None else "disk"
        self.events("rewind", {"from_step": result.step, "to_step": self.engine.step_count, "kept": kept})

    def _from_disk(self, result: StepResult) -> dict[str, Any]:
        self.saving.settle()
        # All ranks must have written their parts of the checkpoint before any rank reads it.
        self.group.barrier()
        loaded = self._newest()
        if loaded is None:
            # Writing the checkpoint before the first step has failed.
            raise NonFiniteError(
                "nonfinite.no_checkpoint",
                "{problem}, and there is no checkpoint to return to.",
                problem=result.problem,
            )
        values = restore(self.engine, loaded)
        self.saving.resumed(loaded.step, self.stop.elapsed_s)
        return values

    def _values(self) -> dict[str, Any]:
        values = {"stop": self.stop.state_dict(), "rejected": self.rejected, "synthetic": self.data.synthetic}
        values |= {"data": self._fingerprint, "other_files": self._other_files}
        return values | {name: own.state_dict() for name, own in self.further.items()}

    def _load_further(self, values: Mapping[str, Any]) -> None:
        for name, own in self.further.items():
            own.load_state_dict(values.get(name) or {})

    def continued(self) -> None:
        """After a continuation from memory, count steps from the newest complete checkpoint."""
        found = [step for step, _ in checkpoints(self.run.checkpoints)]
        self.saving.resumed(max(self.group.gather_json(max(found, default=0))), self.stop.elapsed_s)

    def _newest(self) -> Loaded | None:
        group, folder = self.group, self.run.checkpoints
        return load_latest(
            folder,
            rank=group.rank,
            world=group.size,
            report=self.events,
            gather=group.gather_json,
            fetch=partial(fetch, copy=self.run.path, deadline_s=self.run.job.deadline_s),
        )
