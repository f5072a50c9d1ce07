"""Trial of plans and settings, in turn, with the real model on real data.

The processes of a trial end afterwards, so nothing has to be restored. All ranks know the same times, so all make the
same decision. A failure ends all processes of the trial, because other ranks would wait for the failed rank. The
launcher then starts new processes, without the plan or setting that failed.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster.cluster import Cluster
from paceline.comm import Group
from paceline.comm.checks import greatest
from paceline.data.loader import Loader
from paceline.device import is_accelerator, synchronize
from paceline.engine.calls import use_onednn
from paceline.engine.engine import RankEngine
from paceline.engine.meter import OPTIMIZER, Timing
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.job.samples import DataSets
from paceline.planning.plan import Plan, cores_of
from paceline.planning.shortlist import (
    LEAST_ROUNDS,
    NOT_TRIED,
    Comparison,
    PlanChange,
    Trial,
    budget_s,
    idle_cores,
    longest_run_s,
    plan_changes,
    why_not_now,
)
from paceline.run.build import begin_engine, seed_all
from paceline.run.tuning.result import BEGINNING, TuningResult
from paceline.stats import median_interval
from paceline.wire.status import StatusBoard

# assumed minimum of seconds for dividing the model in another way
_DIVIDING_S = 1.0


class RankTrial:
    """One rank of a trial.

    `report` is called with the result so far, whenever it changes; only rank 0's result is used.
    """

    def __init__(
        self, job: Job, cluster: Cluster, found: TuningResult, group: Group, report: Callable[[TuningResult], None]
    ) -> None:
        self.job, self.cluster, self.findings, self.group, self.report = job, cluster, found, group, report
        self.default = Plan.parse(found.default)
        self.board = StatusBoard.of_this_rank()
        self.cores = os.sched_getaffinity(0)
        # start of the time that the budget limits
        self.since: float | None = None
        self.spent_before_s = found.spent_s
        seed_all(job.seed)
        self.data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)

    def run(self) -> TuningResult:
        """Compare each plan with the best so far, then settings of the best."""
        self._now_trying(BEGINNING)
        self.best = self._candidate(Plan.parse(self.findings.best))
        self._begin([self._turn(self.best) for _ in range(LEAST_ROUNDS)])
        others = [f for f in self.findings.forecasts if f.plan != self.findings.default]
        # plans that leave cores idle: predictions are not exact enough to decide about them
        alone = idle_cores(self.cluster, self.best.plan) if self.findings.settings else []
        self._try([*alone, *(PlanChange.of(Plan.parse(other.plan), other.step_s) for other in others)])
        if self.findings.settings:
            self._try(plan_changes(self.job, self.cluster, self.best.plan))
        self._now_trying(None)
        self.best.close()
        return self.findings

    def _try(self, changes: list[PlanChange]) -> None:
        done = {row.change for row in self.findings.tried}
        for change in changes:
            if str(change) not in done and change.on(self.best.plan) != self.best.plan:
                self._note(self._untried(change) or self._tried(change))

    def _begin(self, step_s: list[float]) -> None:
        """Set the time budget from the first plan's step time.

        The time of this measurement does not count towards the budget.
        """
        findings, own = self.findings, median_interval(step_s)
        self.best_s = own.middle
        if not findings.tried:
            findings.step_s, findings.steps_per_epoch = own.middle, int(self._greatest(self.best.steps_per_epoch))
        findings.run_s = longest_run_s(self.job, findings.step_s, findings.steps_per_epoch)
        alone = idle_cores(self.cluster, self.best.plan) if findings.settings else []
        others = len(alone) + sum(forecast.plan != findings.default for forecast in findings.forecasts)
        found = plan_changes(self.job, self.cluster, self.best.plan) if findings.settings else []
        compared = sum(change.untried is None and not change.cost_s for change in found) - len(alone)
        findings.budget_s = budget_s(
            findings.step_s, findings.run_s, plans=others, changes=compared, share=findings.share
        )
        self.since = time.monotonic()
        if not findings.tried:
            forecast = findings.forecast_of(findings.default)
            verdict = f"{BEGINNING}; the others get {findings.budget_s:.1f} s"
            self._note(Trial(findings.default, verdict, own, predicted_s=forecast.step_s if forecast else None))

    def _untried(self, change: PlanChange) -> Trial | None:
        turn = self.best.steps_a_turn + self.best.settles
        comparison_s = (2 * LEAST_ROUNDS * turn + WARM_UP_STEPS) * self.best_s + (_DIVIDING_S if change.whole else 0.0)
        why = why_not_now(
            change,
            run_s=self.findings.run_s,
            left_s=self.findings.budget_s - self._spent_s(),
            comparison_s=comparison_s,
        )
        if why is None:
            return None
        self.findings.complete &= change.untried is not None
        return Trial(str(change), f"{NOT_TRIED}{why}", predicted_s=change.predicted_s)

    def _tried(self, change: PlanChange) -> Trial:
        """Compare the best plan with a challenger, and keep the faster one.

        The challenger is another plan, or the best plan with a changed setting.
        """
        self._now_trying(str(change))
        asked_s = self._spent_s()
        challenger = self._candidate(change.on(self.best.plan))
        begun_s = self._spent_s()
        # the run is long enough for this cost, so add it to the budget
        if change.cost_s:
            self.findings.budget_s += begun_s - asked_s
        # remaining budget for this and later comparisons
        left_s = self.findings.budget_s - begun_s
        comparison = Comparison()
        comparison.add(challenger.warm_s, self.best_s)
        comparison.add(self._turn(challenger), self._turn(self.best))
        # if the challenger is hopelessly slow, these two rounds decide; otherwise measure it without the warm-up
        if not comparison.hopeless:
            comparison = Comparison()
        while not comparison.decided and (
            len(comparison.ratios) < LEAST_ROUNDS or self._spent_s() - begun_s < comparison.share * left_s
        ):
            comparison.add(*self._round(challenger, of_update=change.of_update))
        tried = comparison.tried(change)
        if comparison.wins and not change.hint and tried.ratio and tried.step_s:
            self.findings.gain *= tried.ratio.middle
            self.best_s = tried.step_s.middle
            self.best, challenger = challenger, self.best
            self.findings.best = str(self.best.plan)
        challenger.close()
        del challenger
        # a model and its optimizer form a reference cycle; free their memory for the next candidate
        gc.collect()
        return tried

    def _candidate(self, plan: Plan) -> TrialCandidate:
        group, host = part_of(self.group, plan), self.cluster.hosts[0]
        cores = set(cores_of(self.group.rank, plan.ranks, host)) if plan.pin and group is not None else self.cores
        candidate = TrialCandidate(
            self.job, plan, self.data, group, threads=plan.threads_for(host, plan.ranks), cores=cores
        )
        candidate.is_warm(self._greatest(candidate.warm_up()))
        return candidate

    def _round(self, challenger: TrialCandidate, *, of_update: bool) -> tuple[float, float]:
        """Return seconds per step of the challenger and the best plan.

        With `of_update`, only their optimizer updates are compared.
        """
        new_s, best_s = self._turn(challenger), self._turn(self.best)
        if not of_update:
            return new_s, best_s
        updates_s = self._greatest(challenger.update_s), self._greatest(self.best.update_s)
        return apart_from_updates((new_s, best_s), updates_s)

    def _turn(self, candidate: TrialCandidate) -> float:
        return self._greatest(candidate.turn())

    def _spent_s(self) -> float:
        """Return the spent seconds by rank 0's clock, so that all ranks decide equally."""
        own_s = self.spent_before_s + (time.monotonic() - self.since if self.since else 0.0)
        return self._greatest(own_s if self.group.rank == 0 else 0.0)

    def _greatest(self, value: float) -> float:
        self.board.mark("sync", 0)
        return greatest(self.group, value)

    def _now_trying(self, what: str | None) -> None:
        self.findings.under_way = what
        self.findings.spent_s = self._spent_s()
        self.report(self.findings)

    def _note(self, tried: Trial) -> None:
        self.findings.tried.append(tried)
        self._now_trying(None)


def apart_from_updates(steps_s: tuple[float, float], updates_s: tuple[float, float]) -> tuple[float, float]:
    """Return step times of two plans that differ only in their optimizer updates.

    The time outside of the updates is replaced with its mean over both plans. If an update's time is unknown (0), the
    step times are returned unchanged.
    """
    if not all(updates_s):
        return steps_s
    rest_s = (sum(steps_s) - sum(updates_s)) / 2
    return rest_s + updates_s[0], rest_s + updates_s[1]


WARM_UP_STEPS = 2
# seconds of one plan's turn, before the other plan's turn
_TURN_S = 0.15
_MOST_STEPS_A_TURN = 8
# factor for turns with loader processes, which have read ahead during the other plan's turn
_LONGER = 4
# If steps are shorter than this many seconds, a turn's first step is slow, because caches and threads still serve the
# other plan.
_SETTLING_S = 0.5


class TrialCandidate:
    """Engine under a plan, with the job's data; other ranks have no engine.

    Args:
        group: group of the plan's ranks, from `part_of`; None on other ranks.
        threads: number of threads of a rank.
        cores: cores on which a rank may run.

    Attributes:
        update_s: seconds per step of the optimizer updates in the newest turn; 0 if unknown.
    """

    def __init__(
        self, job: Job, plan: Plan, data: DataSets, group: Group | None, *, threads: int, cores: set[int]
    ) -> None:
        self.plan, self.threads, self.cores = plan, threads, cores
        self.steps_a_turn = self.steps_per_epoch = 1
        self.warm_s, self.settles, self.update_s = 0.0, False, 0.0
        self._longer = _LONGER if plan.num_workers or job.data.num_workers else 1
        self.engine: RankEngine | None = None
        if group is None:
            return
        self._take_over()
        self.engine = begin_engine(job, plan, data, group)
        partition = self.engine.loader.partition
        # 0 stands for an unknown number: a stream ends when it ends
        self.steps_per_epoch = partition.steps_per_epoch if isinstance(partition, Partition) else 0
        self._batches = _endless(self.engine.loader)
        # With a learning rate of 0, the weights stay the same, so a trial cannot diverge. A step takes the same time.
        for parameters in self.engine.optimizer.param_groups:
            parameters["lr"] = 0.0

    def warm_up(self) -> float:
        """Take the first steps, which compile and allocate; return the last step's seconds."""
        if self.engine is None:
            return 0.0
        self._take_over()
        self._steps(WARM_UP_STEPS - 1)
        return self._steps(1)

    def is_warm(self, step_s: float) -> None:
        """Set the number of steps per turn from the slowest rank's step time."""
        self.warm_s = step_s
        self.settles = step_s < _SETTLING_S
        most = _MOST_STEPS_A_TURN * self._longer
        self.steps_a_turn = max(1, min(most, round(_TURN_S / step_s)))

    def turn(self) -> float:
        """Take the steps of a turn; return seconds per step, including data loading."""
        if self.engine is None:
            return 0.0
        self._take_over()
        if self.settles:
            self._steps(min(self._longer, self.steps_a_turn))
        return self._steps(self.steps_a_turn)

    def step(self) -> Timing | None:
        """Load a batch and take one step; only on ranks of the plan."""
        assert self.engine is not None
        self.engine.on_phase("data", self.engine.step_count + 1)
        batch = next(self._batches)
        return self.engine.step(batch).timing

    def close(self) -> None:
        """Release the model and the data."""
        if self.engine is not None:
            self._batches.close()
            self.engine.loader.close()
            self.engine.close()
            own = self.engine.group.backend
            self.engine = None
            if own is not None and own is not dist.group.WORLD:
                dist.destroy_process_group(own)

    def _steps(self, count: int) -> float:
        assert self.engine is not None
        synchronize(self.engine.device)
        started = time.perf_counter()
        timings = [self.step() for _ in range(count)]
        synchronize(self.engine.device)
        taken_s = time.perf_counter() - started
        self.update_s = sum(timing.parts_s[OPTIMIZER] for timing in timings if timing is not None) / count
        return taken_s / count

    def _take_over(self) -> None:
        torch.set_num_threads(self.threads)
        use_onednn(self.plan.onednn)
        if os.sched_getaffinity(0) != self.cores:
            for thread in os.listdir("/proc/self/task"):
                # the thread may just have ended
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), self.cores)


def ignore_views() -> None:
    """Ignore FSDP2's warning about models that return views.

    The warning does not apply, because outputs are not changed in place here.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)


def part_of(world: Group, plan: Plan) -> Group | None:
    """Return the group of the plan's ranks, which are the first ranks; None on others.

    Every rank calls this. On CPUs, the group is always new, because shared memory for gradients lives as long as its
    group.
    """
    size = plan.ranks
    assert not plan.splits or size in (1, world.size), (
        "a model can be divided over all ranks of torch's default group only"
    )
    if size == world.size and (size == 1 or is_accelerator(world.device)):
        return world
    timeout = timedelta(seconds=world.deadline_s)
    backend = dist.new_group(list(range(size)), timeout=timeout) if size > 1 else None
    if world.rank >= size:
        return None
    return Group(world.rank, size, backend, None, world.deadline_s, world.hosts[:size], device=world.device)


def _endless(loader: Loader) -> Generator[Any, None, None]:
    while True:
        yield from loader
