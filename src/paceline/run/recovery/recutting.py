"""Re-cuts of a run's pipelines where their stages differ in time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.engine.engine import Engine
from paceline.engine.meter import CHECKPOINT
from paceline.partition import starts
from paceline.planning.plan import Plan
from paceline.run.checkpoints import Checkpoints
from paceline.run.record.callback import Callback, StepInfo
from paceline.run.record.events import Events
from paceline.run.record.slow_ranks import pipeline_ranks
from paceline.run.recovery.recut import Pipe, Recut, Stages, worth


class Recutting(Callback):
    """Moves the stages of a pipeline where that gains more than it costs (`balance=auto`).

    All ranks know the times of all, so they decide alike. When a cut is worth it, a checkpoint is asked for. Once that
    is whole the loop ends, and another one begins with the new cut, from that checkpoint.

    Attributes:
        on: whether stages follow the measured times; set by who can begin another loop.
        cut: what the run is to go on with, as `Plan.cut`; "" before that is decided.
        recuts: how many there were before.
        built_s: seconds that the engine took to build.
    """

    def __init__(self, engine: Engine, checkpoints: Checkpoints, events: Events, total_steps: int | None) -> None:
        self.engine, self.checkpoints, self.events, self.total_steps = engine, checkpoints, events, total_steps
        self.on, self.cut, self.recuts, self.built_s = False, "", 0, 0.0
        self._last = 0  # step
        self._wanted: Recut | None = None
        self._places = pipeline_ranks(engine.plan)
        self._segments: tuple[list[str], list[float]] | None = None
        if engine.split is not None and (pipeline := engine.split.pipeline) is not None:
            plan, self.pipeline = engine.plan, pipeline
            self.stages = Stages(Pipe(plan.pp, pipeline.stage_ranks, plan.schedule, plan.microbatches))

    def after_step(self, info: StepInfo) -> str | None:
        """See `Callback`; comes after the checkpoints."""
        if not self.on or len(info.busy_s) != len(self._places):
            return None
        step = info.result.step
        if step <= self._last:  # after a rewind
            self.stages.forget()
        self._last = step
        if self.stages.step(step, self._by_place(info.busy_s)):
            self._wanted = self._better(step)
        if self._wanted is not None and info.ending is None:
            self._end(self._wanted, step)
        return None

    def _by_place(self, busy_s: Sequence[float]) -> list[float]:
        """The slowest rank's at each place in the pipelines."""
        return [
            max(s for s, place in zip(busy_s, self._places, strict=True) if place == wanted)
            for wanted in range(self.engine.plan.pp)
        ]

    def _better(self, step: int) -> Recut | None:
        """A cut that is worth what it costs. All ranks call this in the same step."""
        if self._segments is None:
            self.engine.on_phase("checkpoint", step)  # which may take longer than the parts of a step
            self._segments = self.pipeline.segments()
            self.engine.meter.restart()
        names, costs = self._segments
        lengths = _lengths(names, self.pipeline.cut.split(","))
        if lengths is None or (found := self.stages.better(costs, lengths)) is None:
            return None
        own_s = self.built_s + self.checkpoints.writer.write_s
        cost_s = max(self.engine.group.gather_json(own_s))
        return found if worth(found.gain_s, step, self.total_steps, cost_s, self.recuts) else None

    def _end(self, recut: Recut, step: int) -> None:
        """End the loop where this step has a whole checkpoint; else ask for one."""
        saving, group = self.checkpoints.saving, self.engine.group
        if saving.at != step:
            if group.rank == 0:
                self.engine.signals.vote("checkpoint")
            return
        self.engine.on_phase("checkpoint", step)
        saving.settle()
        self.engine.meter.mark(CHECKPOINT)
        if not all(group.gather_json(self.checkpoints.writer.completed == step)):
            self._wanted = None  # until a later block: it could not be written
            return
        assert self._segments is not None
        names, _ = self._segments
        self.cut = ",".join(names[i - 1] for i in starts(recut.lengths))
        ranks = [rank for rank, place in enumerate(self._places) if place == recut.slow]
        self.events(
            "recut",
            {
                "step": step,
                "pp_rank": recut.slow,
                "ranks": ranks,
                "hosts": sorted({group.hosts[rank] for rank in ranks if rank < len(group.hosts)}),
                "since_step": recut.since_step,
                "share": round(recut.share, 4),
                "cut_before": self.pipeline.cut,
                "cut": self.cut,
                "gain": round(recut.gain, 4),
            },
        )


def follows_times(plan: Plan) -> bool:
    """True if a plan's stages follow their measured times.

    Not where the plan names them, where code is compiled for them, and where ranks have state of their own, which does
    not move.
    """
    follows = plan.balance == "auto" and not plan.cut and plan.compile == "off"
    return plan.pp > 1 and follows and not plan.inexact


def _lengths(names: Sequence[str], cut: Sequence[str]) -> tuple[int, ...] | None:
    """Segments of each stage; None where stages begin elsewhere."""
    if not set(cut) <= set(names):
        return None
    ends = [0, *(names.index(name) + 1 for name in cut), len(names) + 1]
    return tuple(last - first for first, last in pairwise(ends))
