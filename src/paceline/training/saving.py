"""Checkpoint cadence of a run and its policy for failed checkpoints.

No more steps are ever lost than the job allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from paceline.engine.signals import StepSignals
from paceline.errors import CheckpointError
from paceline.job.job import CheckpointSpec
from paceline.training.checkpoint.writer import Checkpointer, Snapshot

# of the time between two checkpoints: after a longer wait for one, the next is begun earlier
_WORTH_IT, _WORTH_IT_S = 0.01, 2.0
_PACE = 10.0  # writing beside the training takes so many times as long as alone


class CheckpointSchedule:
    """Begins a rank's checkpoints when due, waits for them, and retries failed ones.

    With `every_steps`, training never completes a step that lies more than so many steps behind the last
    whole checkpoint: it waits for the one that is being written. Where that wait is long, the next one is
    begun some steps earlier.

    Attributes:
        at: the step of the newest checkpoint begun; -1 before the first.
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
        self._whole = 0  # the step of the newest checkpoint that was there when training began, or 0
        self._failures = 0  # in a row
        self._clock_s = 0.0  # of the stop rule, when the newest one was begun
        self._begun = time.monotonic()
        self._lead_steps = 0  # rank 0's: so much earlier a checkpoint is begun
        self._early = False  # whether the newest one was

    def resumed(self, step: int, clock_s: float) -> None:
        """Training goes on from the checkpoint of `step`, or begins."""
        self.at = self._whole = step
        self._clock_s, self._begun = clock_s, time.monotonic()

    def ask(self, step: int, clock_s: float) -> None:
        """On rank 0, vote for a checkpoint after `step`.

        It is due by the clock, or begun early because the last one took long.
        """
        every = self.rule.every_steps
        if every is None:
            ahead_s = min(self.checkpointer.write_s, self.rule.every_seconds / 2)
            wanted = clock_s - self._clock_s >= self.rule.every_seconds - ahead_s
        else:
            wanted = self._lead_steps > 0 and step - max(self.at, 0) >= every - self._lead_steps
        if wanted:
            self.signals.vote("checkpoint")

    def due(self, step: int, votes: dict[str, int]) -> bool:
        """True if a checkpoint begins after `step`; equal on all ranks with equal votes."""
        every = self.rule.every_steps
        if every is None:
            return "checkpoint" in votes
        asked = "checkpoint" in votes
        shortly_after = self._early and step - self.at <= every // 2
        self._early = asked or (self._early and shortly_after)
        return asked or (step % every == 0 and not shortly_after) or step - max(self.at, 0) >= every

    def begin(self, step: int, snapshot: Snapshot, clock_s: float) -> None:
        """Begin a checkpoint, which is written while the next steps run."""
        self.settle()
        self.at = step
        self._clock_s, self._begun = clock_s, time.monotonic()
        self.checkpointer.save(step, snapshot)

    def before_update(self, step: int) -> None:
        """Wait until the weights may change, and `step` may be completed."""
        self.checkpointer.release()
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
            CheckpointError: as many in a row as the job allows.
        """
        self._note(self.checkpointer.poll)

    def settle(self) -> None:
        """Finish the checkpoint under way; one that fails is noted as in `poll`."""
        self._note(self.checkpointer.close)

    def finish(self) -> None:
        """Finish the last one of the run, which must not fail.

        Raises:
            CheckpointError: it did.
        """
        self.checkpointer.close()

    def _note(self, look: Callable[[], None]) -> None:
        try:
            look()
        except CheckpointError as error:
            if self.checkpointer.rank != 0:
                return  # rank 0 reads the reason where it waits for this rank's part, and tells it
            self._failures = 1 if self.checkpointer.completed > self._whole else self._failures + 1
            self._whole = max(self._whole, self.checkpointer.completed)
            most = self.rule.max_failures
            if self._failures >= most:
                allowed = f"{most} in a row have failed" if most > 1 else "It failed"
                raise CheckpointError(
                    f"{error} {allowed} (checkpoint.max_failures), so the run ends; continue with --resume "
                    "when there is room."
                ) from error
            details = {"reason": str(error), "failures": self._failures, "max_failures": most}
            self.report("checkpoint_failed", details)
