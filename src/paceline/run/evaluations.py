"""Evaluations of a run on its validation and test sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import Dataset

from paceline.data.samples import Retry, is_in_memory
from paceline.engine.engine import RankEngine
from paceline.engine.evaluation import UnreadableBatch, batches_of, until_unreadable
from paceline.job.job import Job
from paceline.job.loss import Metric
from paceline.job.samples import DataSets, apart
from paceline.job.stop import Epochs, StopRule
from paceline.run.record.recorder import Events, StepInfo

if TYPE_CHECKING:
    from paceline.run.samples import Samples

UNREADABLE = "unreadable"  # reason to end a run: a rank cannot read data from a store


class Evaluations:
    """Evaluations on the validation set during a run, and finally on the test set.

    Attributes:
        at: step of the last evaluation; -1 before the first.
        counted: step of the last evaluation that counted for the schedule and the stop rule; -1 before the first.
        told: function that gets each evaluation's step and metrics, and whether the schedule counts the evaluation.
        on_best: function to call after the best evaluation so far.
        unreadable: why the last evaluation could not read its data from a store; None if it could. Equal on all ranks.
        retries: for each batch of this rank that was read only in a later attempt: step of the run, and the attempts.
            The loop clears the list.
    """

    def __init__(
        self,
        job: Job,
        engine: RankEngine,
        data: DataSets,
        metrics: list[Metric],
        stop: StopRule,
        events: Events,
        epochs: Epochs,
    ) -> None:
        self.job, self.engine, self.metrics, self.stop, self.events = job, engine, metrics, stop, events
        self.epochs, self.at, self.counted = epochs, -1, -1
        # A copy, so that loader processes that start later do not inherit files opened by an evaluation.
        self._held_out = apart(data.held_out) if engine.loader.num_workers else data.held_out
        self._test = data.test
        self._samples: Samples | None = None
        if job.evaluate.prompts and data.held_out is not None:
            from paceline.run.samples import Samples  # imports tokenizers, which few jobs need

            self._samples = Samples(job, engine, data.held_out)
        self.unreadable: UnreadableBatch | None = None
        self.retries: list[tuple[int, Retry]] = []
        self.told: _Told = lambda step, metrics, counts: None
        self.on_best: Callable[[], None] = lambda: None

    def after_step(self, info: StepInfo) -> str | None:
        """Evaluate if due; return a reason to end the run, if there is one."""
        counts_steps = self.job.evaluate.every_steps is not None
        return self.measure() if info.ending is None and counts_steps and self.due_at(info.result.step) else None

    def after_epoch(self) -> str | None:
        """If the job evaluates by epochs, evaluate if due; return a reason to end."""
        counts_epochs = self.job.evaluate.every_steps is None
        return self.measure() if counts_epochs and self.due_at(self.engine.step_count) else None

    def due_at(self, step: int) -> bool:
        """Return True if the job's `evaluate` asks for an evaluation after this step."""
        if every := self.job.evaluate.every_steps:
            return step % every == 0
        return self.epochs.ends_with(step) and self.epochs.completed(step) % self.job.evaluate.every_epochs == 0

    def after_resume(self) -> str | None:
        """Evaluate if a due evaluation is missing from the restored state; return a stop reason."""
        step = self.engine.step_count
        return self.measure() if self.due_at(step) and self.counted != step > 0 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, so that a resumed run neither repeats nor skips an evaluation."""
        return {"counted": self.counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        self.counted = state.get("counted", -1)

    def measure(self, *, counts: bool = True) -> str | None:
        """Evaluate on the validation set, if any; return a reason to end, or None.

        If a store cannot be reached, the evaluation stays due, so a resumed run repeats the evaluation.

        Args:
            counts: whether the evaluation counts for the schedule and the stop rule; it always counts for the best
                checkpoint.
        """
        engine, step = self.engine, self.engine.step_count
        if self._held_out is None:
            self.at = step
            return None
        metrics = self._metrics(self._held_out)
        if metrics is None:
            return UNREADABLE
        details: dict[str, Any] = {} if engine.average is None else {"weights": "ema"}
        if self._samples is not None:
            details["samples"] = self._samples.write()
        self.events("evaluation", {"step": step, "epoch": self.epochs.fraction(step), "metrics": metrics, **details})
        self.told(step, metrics, counts=counts)
        self.at, self.counted = step, step if counts else self.counted
        reason = self.stop.after_evaluation(metrics, step, counts=counts)
        if self.stop.best is not None and self.stop.best.step == step:
            self.on_best()
        return reason

    def at_end(self) -> str | None:
        """Evaluate after training; return a reason if data cannot be read."""
        step = self.engine.step_count
        if self.at != step:
            # Count the evaluation only if it is due: a longer stop rule in a resumed run must not change the results.
            self.measure(counts=self.due_at(step))
            if self.unreadable is not None:
                return UNREADABLE
        if self._test is None:
            return None
        metrics = self._metrics(self._test)
        if metrics is None:
            return UNREADABLE
        self.events("test", {"step": step, "metrics": metrics})
        return None

    def _metrics(self, dataset: Dataset[Any]) -> dict[str, float] | None:
        """Measure a data set; return None on all ranks if a rank cannot read it."""
        engine, step = self.engine, self.engine.step_count
        engine.on_phase("evaluate", step)
        batches = batches_of(
            engine.compute,
            dataset,
            self.job.global_batch,
            retry_s=engine.loader.retry_s,
            on_retry=lambda retry: self.retries.append((step, retry)),
        )
        if not is_in_memory(dataset):
            batches = until_unreadable(engine.compute, batches)
        self.unreadable = None
        try:
            return engine.evaluate(batches, self.metrics)
        except UnreadableBatch as error:
            self.unreadable = error
            return None


class _Told(Protocol):
    def __call__(self, step: int, metrics: dict[str, float], /, *, counts: bool) -> None: ...
