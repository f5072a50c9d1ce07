"""Evaluations of a run: when the validation set is measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.data.whole import held_out_batches, most_batches, padded
from paceline.engine.engine import Engine
from paceline.errors import PlanError
from paceline.job.batch import Batch
from paceline.job.job import Job
from paceline.job.loss import build_metrics
from paceline.job.samples import DataSets, apart
from paceline.job.stop import StopRule
from paceline.run.record.callback import Callback, StepInfo
from paceline.run.record.events import Events


class Evaluations(Callback):
    """Measures the validation set when the job says so.

    Attributes:
        at: the step after which it was measured last; -1 before the first time.
        told: called with the metrics of every evaluation.
    """

    def __init__(
        self, job: Job, engine: Engine, data: DataSets, stop: StopRule, events: Events, epoch_steps: int
    ) -> None:
        self.job, self.engine, self.stop, self.events = job, engine, stop, events
        self.metrics = build_metrics(job.metrics, engine.loss)
        gathering = [metric.name for metric in self.metrics if getattr(metric, "gathers", False)]
        if gathering and engine.plan.cp > 1:
            raise PlanError(
                f"plan {engine.plan} divides each sample's tokens over {engine.plan.cp} ranks, but the metric "
                f"{gathering[0]} gathers whole samples. Use cp=1, or a metric that is a ratio of two sums"
            )
        self.epoch_steps, self.at = epoch_steps, -1
        # Loader processes that are started later must not inherit the files that an evaluation opens.
        self._held_out = apart(data.held_out) if engine.loader.num_workers else data.held_out
        self.told: Callable[[int, dict[str, float]], None] = lambda step, metrics: None

    def after_step(self, info: StepInfo) -> str | None:
        """See `Callback`; a metric that reached its target ends the run."""
        every = self.job.evaluate.every_steps
        return self.measure() if info.ending is None and every and info.result.step % every == 0 else None

    def after_epoch(self) -> str | None:
        """Measure if the job counts epochs; returns a stop reason if a target was reached."""
        epoch, every = self.engine.step_count // self.epoch_steps, self.job.evaluate.every_epochs
        return self.measure() if self.job.evaluate.every_steps is None and epoch % every == 0 else None

    def measure(self) -> str | None:
        """Measure the validation set, if any; returns a stop reason if a target was reached."""
        engine, step = self.engine, self.engine.step_count
        if self._held_out is None:
            self.at = step
            return None
        engine.on_phase("evaluate", step)
        # A measure of a whole batch depends on which samples are in it.
        whole = getattr(engine.loss, "whole_batch", False)
        rank, size = engine.data_group.rank, engine.data_group.size
        batch = self.job.global_batch if whole else max(1, self.job.global_batch // size)
        batches: Iterable[Batch | None]
        batches = held_out_batches(self._held_out, batch=batch, replica=rank, replicas=size, in_turn=whole)
        if engine.split is not None and engine.split.all_must_compute:
            batches = padded(batches, most_batches(len(self._held_out), batch=batch, replicas=size, in_turn=whole))  # type: ignore[arg-type]
        metrics = engine.evaluate(batches, self.metrics)
        self.events("evaluation", {"step": step, "epoch": step / self.epoch_steps, "metrics": metrics})
        self.told(step, metrics)
        self.at = step
        return self.stop.after_evaluation(metrics)
