"""New cuts of pipelines whose stages differ in compute time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paceline.engine.engine import RankEngine
from paceline.engine.meter import CHECKPOINT
from paceline.partition import contiguous, starts
from paceline.planning.plan import Plan
from paceline.run.checkpoints import Checkpoints
from paceline.run.record.recorder import Events, StepInfo
from paceline.run.record.slow_ranks import pipeline_ranks
from paceline.run.recovery.balance import BusyBlocks, Floats, error_of_slowest, medians


class Recutting:
    """Part of the loop that changes the pipeline cut if worthwhile (`balance=auto`).

    All ranks know all times, so all make the same decision. If a new cut is worthwhile, a checkpoint is requested. When
    the checkpoint is complete, the loop ends, and another loop continues from it with the new cut.

    Attributes:
        on: whether the cut may change; set by callers that can begin another loop.
        cut: cut with which the run continues, in the form of `Plan.cut`; "" before the decision.
        recuts: number of earlier changes of the cut.
        built_s: seconds that building the engine took.
    """

    def __init__(self, engine: RankEngine, checkpoints: Checkpoints, events: Events, total_steps: int | None) -> None:
        self.engine, self.checkpoints, self.events, self.total_steps = engine, checkpoints, events, total_steps
        self.on, self.cut, self.recuts, self.built_s = False, "", 0, 0.0
        self._last = 0  # newest step
        self._wanted: Recut | None = None
        self._places = pipeline_ranks(engine.plan)
        self._segments: tuple[list[str], list[float]] | None = None
        if engine.split is not None and (pipeline := engine.split.pipeline) is not None:
            plan, self.pipeline = engine.plan, pipeline
            self.stages = Stages(Pipe(plan.pp, pipeline.stage_ranks, plan.schedule, plan.microbatches))

    def after_step(self, info: StepInfo) -> None:
        """Decide about a new cut, after a step and its checkpoint."""
        if not self.on or len(info.busy_s) != len(self._places):
            return
        step = info.result.step
        if step <= self._last:  # the run has rewound
            self.stages.forget()
        self._last = step
        if self.stages.step(step, self._by_place(info.busy_s)):
            self._wanted = self._better(step)
        if self._wanted is not None and info.ending is None:
            self._end(self._wanted, step)

    def _by_place(self, busy_s: Sequence[float]) -> list[float]:
        """Return the busy time of the slowest rank at each pipeline position."""
        return [
            max(s for s, place in zip(busy_s, self._places, strict=True) if place == wanted)
            for wanted in range(self.engine.plan.pp)
        ]

    def _better(self, step: int) -> Recut | None:
        """Return a cut whose gain exceeds its cost, or None; all ranks call this."""
        if self._segments is None:
            self.engine.on_phase("checkpoint", step)  # the search may take longer than a step, so report another phase
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
        """End the loop if this step has a complete checkpoint; otherwise request one."""
        saving, group = self.checkpoints.saving, self.engine.group
        if saving.at != step:
            if group.rank == 0:
                self.engine.signals.vote("checkpoint")
            return
        self.engine.on_phase("checkpoint", step)
        saving.settle()
        self.engine.meter.mark(CHECKPOINT)
        if not all(group.gather_json(self.checkpoints.writer.completed == step)):
            self._wanted = None  # the checkpoint could not be written, so decide again after a later block
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
    """Return True if a plan's pipeline cut may change with measured times.

    The cut is fixed if the plan names it, if code is compiled for it, or if the sync rule keeps state on each rank.
    """
    follows = plan.balance == "auto" and not plan.cut and plan.compile == "off"
    return plan.pp > 1 and follows and not plan.inexact


def _lengths(names: Sequence[str], cut: Sequence[str]) -> tuple[int, ...] | None:
    if not set(cut) <= set(names):
        return None
    ends = [0, *(names.index(name) + 1 for name in cut), len(names) + 1]
    return tuple(last - first for first, last in pairwise(ends))


UNEVEN = 1.1  # a rank's time is uneven above this multiple of the mean
LEAST_GAIN = 0.05  # minimum gain as a fraction of a step's time
MOST = 2  # maximum size of a stage, as a multiple of an even part of the model, because memory is limited

Lengths = tuple[int, ...]  # number of segments of each stage


@dataclass(frozen=True)
class Pipe:
    """Pipeline of `ranks` ranks: its schedule, and the rank of each stage."""

    ranks: int
    stage_ranks: Sequence[int]
    schedule: str
    microbatches: int

    def per_rank(self, costs: Sequence[float], lengths: Lengths) -> Floats:
        """Return the total cost of each rank's segments."""
        found = np.zeros(self.ranks)
        for rank, cost in zip(self.stage_ranks, self.per_stage(costs, lengths), strict=True):
            found[rank] += cost
        return found

    def per_stage(self, costs: Sequence[float], lengths: Lengths) -> list[float]:
        """Return the total cost of each stage's segments."""
        ends = [0, *itertools.accumulate(lengths)]
        return [sum(costs[first:last]) for first, last in itertools.pairwise(ends)]

    def step_s(self, busy_s: Floats) -> float:
        """Return a step's time: the slowest rank's time, plus filling and draining the pipeline."""
        chunks = self.microbatches * len(self.stage_ranks) // self.ranks
        return float(busy_s.max() + (busy_s.sum() - busy_s.max()) / chunks)


@dataclass(frozen=True)
class Recut:
    """A better cut of a pipeline.

    Attributes:
        lengths: number of segments of each stage.
        gain_s: expected gain per step in seconds.
        gain: expected gain as a fraction of the step time.
        slow: slowest rank of the pipeline.
        since_step: first step in which this rank was slow.
        share: this rank's share of the total compute time.
    """

    lengths: Lengths
    gain_s: float
    gain: float
    slow: int
    since_step: int
    share: float


class Stages:
    """Measured compute times of a pipeline's ranks, and better cuts."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self._since: tuple[int, int] | None = None  # the slowest rank, and its first slow step
        self.forget()

    def forget(self) -> None:
        """Restart the measurement, for example after a rewind."""
        self._blocks = BusyBlocks()

    def step(self, step: int, busy_s: Sequence[float]) -> bool:
        """Add a step; return True if it completes a block and all blocks are uneven.

        Args:
            busy_s: busy seconds of each pipeline position's slowest rank.
        """
        if not self._blocks.add(step, busy_s):
            return False
        times = medians(self._blocks.newest())
        slow = int(times.argmax())
        if any(block[slow] <= UNEVEN * block.mean() for block in self._blocks.medians()):
            self._since = None
            return False
        if self._since is None or self._since[0] != slow:
            self._since = slow, self._blocks.first_step()
        return True

    def better(self, costs: Sequence[float], lengths: Lengths) -> Recut | None:
        """Return a cut that is better by more than noise, or None.

        The prediction assumes that a rank's time is proportional to the cost of its segments.

        Args:
            costs: cost of each segment, in order; the model can be cut between segments.
            lengths: current number of segments of each stage.
        """
        assert self._since is not None, "the stages were uneven"
        rows, work = self._blocks.newest(), self.pipe.per_rank(costs, lengths)
        times = medians(rows)
        found = proposed(self.pipe, costs, lengths, times)
        if found == lengths:
            return None
        ratio = self.pipe.per_rank(costs, found) / work
        needed = max(LEAST_GAIN, 2 * error_of_slowest(rows, times))
        if any(self._gain_s(block, ratio) < needed * self.pipe.step_s(block) for block in self._blocks.medians()):
            return None
        gain_s, (slow, since) = self._gain_s(times, ratio), self._since
        share = float(times[slow] / times.sum())
        return Recut(found, gain_s, gain_s / self.pipe.step_s(times), slow, since, share)

    def _gain_s(self, times: Floats, ratio: Floats) -> float:
        return self.pipe.step_s(times) - self.pipe.step_s(times * ratio)


def proposed(pipe: Pipe, costs: Sequence[float], lengths: Lengths, times: Floats) -> Lengths:
    """Return the cut whose slowest stage is fastest, by the ranks' measured speeds.

    The cut stays the same if a stage would grow beyond `MOST` times an even part of the model.
    """
    speeds = pipe.per_rank(costs, lengths) / times
    found = contiguous(costs, len(lengths), [float(speeds[rank]) for rank in pipe.stage_ranks])
    most = MOST * sum(costs) / len(lengths)
    old, new = pipe.per_stage(costs, lengths), pipe.per_stage(costs, found)
    too_much = any(after > max(most, before) for before, after in zip(old, new, strict=True))
    return lengths if too_much else found


def worth(gain_s: float, step: int, total_steps: int | None, cost_s: float, recuts: int) -> bool:
    """Return True if a new cut gains more than it costs in the remaining steps.

    If the number of remaining steps is unknown, the number of past steps is used. Each further change must gain twice
    as much as the previous change, so repeated changes without the expected gain cost little.
    """
    left = step if total_steps is None else total_steps - step
    return gain_s * left > cost_s * 2.0**recuts
