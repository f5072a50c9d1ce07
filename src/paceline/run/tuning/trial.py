"""Trial of plans and settings, in turn, with the real model on real data.

The processes of a trial end afterwards, so nothing has to be restored. All ranks know the same times, and follow the
decisions of rank 0. A failure ends all processes of the trial, because other ranks would wait for the failed rank. The
launcher then starts new processes, without the plan or setting that failed.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from paceline.cluster.cluster import Cluster
from paceline.comm import Group
from paceline.comm.checks import greatest
from paceline.data.loader import Loader
from paceline.device import is_accelerator, synchronize
from paceline.engine.calls import use_onednn
from paceline.engine.engine import RankEngine
from paceline.engine.meter import Timing
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.job.samples import DataSets
from paceline.planning.halving import HALVES, ROUNDS, WIDTH, Halving, combined, plain, settings_on
from paceline.planning.model.model_info import model_info
from paceline.planning.plan import Plan, cores_of
from paceline.planning.shortlist import (
    LEAST_ROUNDS,
    NOT_TRIED,
    Comparison,
    PlanChange,
    Trial,
    bases_of,
    budget_s,
    longest_run_s,
    plan_changes,
    why_not_now,
)
from paceline.run.build import begin_engine, seed_all
from paceline.run.tuning.result import BEGINNING, TuningResult
from paceline.stats import median_interval
from paceline.wire.status import StatusBoard

T = TypeVar("T")

# estimated seconds to create a plan's engine
_STARTING_S = 0.05
# limits of the models in memory at the same time: their number, and their share of the free memory
_MOST_ALIVE, _SHARE_OF_MEMORY = 10, 0.25


class RankTrial:
    """One rank of a trial.

    `report` is called with the result so far, whenever it changes; only rank 0's result is used. Rank 0 also decides
    what to measure next, by its own clock.
    """

    def __init__(
        self, job: Job, cluster: Cluster, found: TuningResult, group: Group, report: Callable[[TuningResult], None]
    ) -> None:
        self.job, self.cluster, self.findings, self.group, self.report = job, cluster, found, group, report
        self.first = Plan.parse(found.default)
        # plan with which others are compared; its model stays in memory
        self.reference = self.first
        self.board = StatusBoard.of_this_rank()
        self.cores = os.sched_getaffinity(0)
        # start of the time that the budget limits
        self.since: float | None = None
        self.spent_before_s = found.spent_s
        self.alive: dict[Plan, TrialCandidate] = {}
        # number of plans whose models are in memory at the same time
        self.room = 2
        seed_all(job.seed)
        self.data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)

    def run(self) -> TuningResult:
        """Search the combinations, then compare the best with changes that are tried last."""
        self._now_trying(BEGINNING)
        self._begin()
        found, settings = self.findings, self.findings.settings
        if not found.searched:
            bases = bases_of(self.job, self.cluster, self.first, found.forecasts, settings=settings)
            norm = settings and bool(model_info(self.job.model).batch_norms)
            every = combined(self.job, self.cluster, bases, batch_norm=norm) if settings else plain(bases)
            failed = frozenset(row.change for row in found.tried if row.failed)
            self.halving = Halving(self.first, every, found.forecasts, found.compared, failed)
            self._search()
            found.best = self._agreed(str(self.halving.chosen()))
            if found.best in found.compared:
                found.gain = found.compared[found.best].ratio.middle
            found.tried += self.halving.rows()
            if settings:
                found.tried += self._left_out(batch_norm=norm)
            found.searched = True
        if settings:
            self._try_last()
        self._now_trying(None)
        for candidate in self.alive.values():
            candidate.close()
        return found

    def _begin(self) -> None:
        """Measure the first plan, and set the time budget from its step time.

        The time of this measurement does not count towards the budget.
        """
        findings, before = self.findings, _available_bytes(self.group.device)
        first = self._candidate(self.first)
        own = median_interval([self._turn(first) for _ in range(LEAST_ROUNDS)])
        used = max(1.0, before - _available_bytes(self.group.device))
        self.room = int(-self._greatest(-max(2.0, min(_MOST_ALIVE, _SHARE_OF_MEMORY * before / used))))
        self.turn_s = own.middle * (first.steps_a_turn + first.settles)
        if findings.step_s == 0:
            findings.step_s, findings.steps_per_epoch = own.middle, int(self._greatest(first.steps_per_epoch))
        findings.run_s = longest_run_s(self.job, findings.step_s, findings.steps_per_epoch)
        findings.budget_s = budget_s(findings.step_s, findings.run_s, share=findings.share)
        self.since = time.monotonic()
        if not findings.tried:
            forecast = findings.forecast_of(findings.default)
            verdict = f"{BEGINNING}; the others get {findings.budget_s:.1f} s"
            self._note(Trial(findings.default, verdict, own, predicted_s=forecast.step_s if forecast else None))

    def _search(self) -> None:
        """Measure plans, single settings, promising combinations, and the best for longer.

        The first measurements leave enough time for the last group.
        """
        last_s = (HALVES[-1][0] + 1) * LEAST_ROUNDS * self.turn_s
        budget_s, halving = self.findings.budget_s, self.halving
        # long steps leave time for only one round
        rounds = ROUNDS if 40 * ROUNDS * self.turn_s < budget_s else 1
        self._in_groups(halving.alone, rounds, budget_s - last_s)
        self._in_groups(halving.singles, rounds, budget_s - last_s)
        while self._spent_s() < budget_s / 2:
            new = self._agreed([str(plan) for plan in halving.promising(min(WIDTH, self.room - 1))])
            if not new or not self._rounds(new, rounds, budget_s * 2 / 3):
                break
        for count, more in HALVES:
            best = self._agreed([str(plan) for plan in halving.best(min(count, self.room - 1))])
            self._rounds(best, more, budget_s - (last_s if count > HALVES[-1][0] else 0.0))
        # compare the last plans until further rounds would not change the verdicts
        while not self._agreed(all(halving.compared[plan].decided for plan in best)):
            if not self._rounds(best, 1, budget_s):
                break

    def _in_groups(self, plans: Iterable[Plan], rounds: int, until_s: float) -> None:
        """Measure the plans that are not measured yet, in groups that fit in memory."""
        new = self._agreed([str(plan) for plan in plans if str(plan) not in self.findings.compared])
        for i in range(0, len(new), self.room - 1):
            self._rounds(new[i : i + self.room - 1], rounds, until_s)

    def _rounds(self, plans: Sequence[str], count: int, until_s: float) -> bool:
        """Measure these plans and the first plan in turn; return False if time ran out."""
        in_time = True
        for number in range(count):
            first_s = 0.0
            for text in plans if number % 2 == 0 else reversed(plans):
                new = text not in self.findings.compared
                takes_s = 2 * self.turn_s + new * (WARM_UP_STEPS * self.findings.step_s + _STARTING_S)
                if self._spent_s() + takes_s > until_s:
                    self.findings.complete &= not new
                    in_time = False
                    continue
                first_s = first_s or self._turn(self._alive(self.first))
                self._now_trying(text)
                own_s = self._turn(self._alive(Plan.parse(text)))
                self.findings.compared.setdefault(text, Comparison()).add(own_s, first_s)
        return in_time

    def _alive(self, plan: Plan) -> TrialCandidate:
        """Return a plan's candidate; to make room, close the least recently used candidates."""
        if plan in self.alive:
            self.alive[plan] = self.alive.pop(plan)
            return self.alive[plan]
        while len(self.alive) >= self.room:
            oldest = next(one for one in self.alive if one != self.reference)
            self.alive.pop(oldest).close()
            # a model and its optimizer form a reference cycle; free their memory for the next candidate
            gc.collect()
        return self._candidate(plan)

    def _candidate(self, plan: Plan) -> TrialCandidate:
        group, host = part_of(self.group, plan), self.cluster.hosts[0]
        cores = set(cores_of(self.group.rank, plan.ranks, host)) if plan.pin and group is not None else self.cores
        candidate = TrialCandidate(
            self.job, plan, self.data, group, threads=plan.threads_for(host, plan.ranks), cores=cores
        )
        candidate.is_warm(self._greatest(candidate.warm_up()))
        self.alive[plan] = candidate
        return candidate

    def _left_out(self, *, batch_norm: bool) -> list[Trial]:
        """Return rows for the settings that cannot help, or for which no time was left."""
        found = []
        unmeasured = {name for one in self.halving.all for name in one.names}
        for one in self.halving.all:
            if str(one.plan) in self.findings.compared:
                unmeasured -= one.names
        for change in settings_on(self.job, self.cluster, self.first, batch_norm=batch_norm):
            if change.untried:
                found.append(Trial(str(change), f"{NOT_TRIED}{change.untried}"))
            elif change.name in unmeasured:
                self.findings.complete = False
                found.append(Trial(str(change), f"{NOT_TRIED}no time was left to measure it"))
        return found

    def _try_last(self) -> None:
        """Compare the best plan with changes that start slowly or are only reported."""
        for change in plan_changes(self.job, self.cluster, Plan.parse(self.findings.best)):
            if not (change.cost_s or change.hint) or str(change) in {row.change for row in self.findings.tried}:
                continue
            left_s = self.findings.budget_s - self._spent_s()
            comparison_s = 2 * LEAST_ROUNDS * self.turn_s
            why = why_not_now(change, run_s=self.findings.run_s, left_s=left_s, comparison_s=comparison_s)
            if why is not None:
                self.findings.complete &= change.untried is not None
                self._note(Trial(str(change), f"{NOT_TRIED}{why}"))
                continue
            self._note(self._compared(change))

    def _compared(self, change: PlanChange) -> Trial:
        """Compare the best plan with and without a change; keep the change if it wins."""
        best, comparison, begun_s = Plan.parse(self.findings.best), Comparison(), self._spent_s()
        self._now_trying(str(change))
        self.reference, changed = best, change.on(best)
        self._alive(best)
        self._alive(changed)
        # the run is long enough for this cost, so add it to the budget
        self.findings.budget_s += self._spent_s() - begun_s
        while not comparison.decided and (
            len(comparison.ratios) < LEAST_ROUNDS or self._spent_s() < self.findings.budget_s
        ):
            comparison.add(self._turn(self._alive(changed)), self._turn(self._alive(best)))
        tried = comparison.tried(str(change), hint=change.hint or "")
        if comparison.wins and not change.hint:
            self.findings.gain *= comparison.ratio.middle
            self.findings.best = str(changed)
        return tried

    def _turn(self, candidate: TrialCandidate) -> float:
        return self._greatest(candidate.turn())

    def _spent_s(self) -> float:
        """Return the spent seconds by rank 0's clock, so that all ranks decide equally."""
        own_s = self.spent_before_s + (time.monotonic() - self.since if self.since else 0.0)
        return self._greatest(own_s if self.group.rank == 0 else 0.0)

    def _greatest(self, value: float) -> float:
        self.board.mark("sync", 0)
        return greatest(self.group, value)

    def _agreed(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        self.board.mark("sync", 0)
        agreed: T = self.group.gather_json(value)[0]
        return agreed

    def _now_trying(self, what: str | None) -> None:
        self.findings.under_way = what
        self.findings.spent_s = self._spent_s()
        self.report(self.findings)

    def _note(self, tried: Trial) -> None:
        self.findings.tried.append(tried)
        self._now_trying(None)


def _available_bytes(device: torch.device) -> float:
    """Return the memory that this rank could still allocate."""
    if is_accelerator(device):
        free: int = torch.accelerator.get_memory_info(device)[0]
        return float(free)
    return float(psutil.virtual_memory().available)


WARM_UP_STEPS = 2
# seconds of one plan's turn, before the next plan's turn
_TURN_S = 0.15
_MOST_STEPS_A_TURN = 50
# factor for turns with loader processes, which have read ahead during other plans' turns
_LONGER = 4
# If steps are shorter than this many seconds, a turn's first step is slow, because caches and threads still serve the
# previous plan.
_SETTLING_S = 0.5


class TrialCandidate:
    """Engine under a plan, with the job's data; other ranks have no engine.

    Args:
        group: group of the plan's ranks, from `part_of`; None on other ranks.
        threads: number of threads of a rank.
        cores: cores on which a rank may run.
    """

    def __init__(
        self, job: Job, plan: Plan, data: DataSets, group: Group | None, *, threads: int, cores: set[int]
    ) -> None:
        self.plan, self.threads, self.cores = plan, threads, cores
        self.steps_a_turn = self.steps_per_epoch = 1
        self.settles = False
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
        for _ in range(count):
            self.step()
        synchronize(self.engine.device)
        return (time.perf_counter() - started) / count

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
