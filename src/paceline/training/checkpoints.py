"""Checkpoints of a run: saving, resuming and rewinding."""

from __future__ import annotations

from typing import Any

from paceline.comm import Group
from paceline.engine.engine import Engine, StepResult
from paceline.engine.meter import CHECKPOINT
from paceline.errors import CheckpointError, NonFiniteError
from paceline.job.data import DataSets
from paceline.job.stop import StopRule
from paceline.training.checkpoint.reader import Loaded, load_latest
from paceline.training.checkpoint.writer import Checkpointer
from paceline.training.record.callback import Callback, StepInfo
from paceline.training.record.events import Events
from paceline.training.record.run import Run
from paceline.training.saving import CheckpointSchedule
from paceline.training.state import restore, snapshot

# in a row, without a new checkpoint between them
MAX_REWINDS = 3


class Checkpoints(Callback):
    """Saves a run when that is due, and restores it.

    Attributes:
        writer: writes this rank's part of each checkpoint.
        saving: when a checkpoint is due, and what happens where one fails.
        rejected: steps whose batch a rewind leaves out.
    """

    def __init__(self, run: Run, engine: Engine, data: DataSets, stop: StopRule, group: Group, events: Events) -> None:
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
        self.rejected: list[int] = []
        self._rewinds = 0

    def after_step(self, info: StepInfo) -> str | None:
        """See `Callback`; begins a due checkpoint unless the run ends with one anyway."""
        if self.saving.due(info.result.step, info.result.votes) and info.ending is None:
            self.save()
        return None

    def save(self) -> None:
        """Begin a checkpoint of this moment; it is written while the next steps run."""
        self.engine.on_phase("checkpoint", self.engine.step_count)
        values = {"stop": self.stop.state_dict(), "rejected": self.rejected, "synthetic": self.data.synthetic}
        self.saving.begin(self.engine.step_count, snapshot(self.engine, values), self.stop.elapsed_s)
        self._rewinds = 0
        self.engine.meter.mark(CHECKPOINT)

    def finish(self) -> None:
        """Save the final state, unless it is saved already, and wait for the writer."""
        if self.saving.at != self.engine.step_count:
            self.save()
        self.saving.finish()

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint; False where there is none."""
        loaded = self._newest()
        if loaded is None:
            return False
        try:
            values = restore(self.engine, loaded, self.events)
            self.stop.load_state_dict(values["stop"])
            self.rejected = values["rejected"]
            if self.engine.step_count != loaded.step:
                raise ValueError(f"step {self.engine.step_count!r}")
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            # It is whole, but not as any version of ours writes it.
            text = f"{loaded.path} holds values that no run writes ({error!r:.200})"
            raise CheckpointError(f"{text}. Remove that folder to go on from the checkpoint before.") from error
        self.saving.resumed(loaded.step, self.stop.elapsed_s)
        return True

    def rewind(self, result: StepResult) -> None:
        """Go back to the newest checkpoint, and skip this step's batch from then on.

        Raises:
            NonFiniteError: there were too many rewinds in a row, or there is no checkpoint.
        """
        self._rewinds += 1
        if self._rewinds > MAX_REWINDS:
            raise NonFiniteError(
                f"{result.problem}, after {MAX_REWINDS} rewinds in a row. Lower the learning rate or set clip_norm."
            )
        self.saving.settle()
        # Every rank's part of the checkpoint is written before any rank reads it.
        self.group.barrier()
        loaded = self._newest()
        if loaded is None:
            # That of before the first step could not be written.
            raise NonFiniteError(f"{result.problem}, and there is no checkpoint to go back to.")
        rejected = [*self.rejected, result.step]
        values: dict[str, Any] = restore(self.engine, loaded)
        self.stop.rewind(values["stop"])
        self.rejected = rejected
        self.saving.resumed(loaded.step, self.stop.elapsed_s)
        self.engine.meter.restart()
        self.events("rewind", {"from_step": result.step, "to_step": loaded.step})

    def _newest(self) -> Loaded | None:
        """The newest checkpoint that is whole; the ranks agree which that is."""
        group, folder = self.group, self.run.checkpoints
        return load_latest(folder, rank=group.rank, world=group.size, report=self.events, agree=group.gather_json)
