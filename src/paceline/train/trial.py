"""A trial of a plan's knobs: the real model on the real data, a few steps under each plan in turn, by as many ranks as the plan has.

The processes of a trial are thrown away, so nothing is put back. Every rank sees the same times and decides by itself, but alike. What
fails ends the trial's processes: no rank is left to wait for one that raised. The launcher then begins anew without that knob.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Generator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster.cluster import Cluster
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.job.data import DataSets
from paceline.job.job import Job
from paceline.plan.knobs import (
    LEAST_ROUNDS,
    Comparison,
    Knob,
    Tried,
    budget_s,
    knobs,
    longest_run_s,
    why_not_now,
)
from paceline.plan.plan import Plan, cores_of
from paceline.stats import median_interval
from paceline.train.engine import Engine
from paceline.train.findings import BEGINNING, Findings
from paceline.train.loader import Loader
from paceline.train.loop import build_engine, seed_all
from paceline.train.status import StatusBoard

_WARM_UP_STEPS = 2
_TURN_S = 0.04  # in which a plan computes before the other's turn
_MOST_STEPS_A_TURN = 8
_SETTLING_S = 0.05  # a step shorter than this is slower the first time in a turn, when the caches hold the other plan's weights


def run_rank(arguments: list[str]) -> None:
    """Try the knobs of the job in the folder `arguments[0]` as the rank that the environment names; rank 0 leaves `findings.json` there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be saved
    folder = Path(arguments[0])
    job, cluster = Job.load(folder / "job.yaml"), Cluster.load(folder / "cluster.yaml")
    findings = Findings.read(folder / "findings.json")
    with joined(deadline_s=job.deadline_s) as group:
        _Trial(job, cluster, findings, group, folder / "findings.json").run()


class _Trial:
    """One rank's part."""

    def __init__(self, job: Job, cluster: Cluster, findings: Findings, group: Group, file: Path) -> None:
        self.job, self.cluster, self.findings, self.group, self.file = job, cluster, findings, group, file
        self.default = Plan.parse(findings.default)
        self.board = StatusBoard.of_this_rank()
        self.cores = os.sched_getaffinity(0)
        self.since: float | None = None  # when what counts against the budget began
        self.spent_before_s = findings.spent_s
        seed_all(job.seed)
        self.data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)

    def run(self) -> None:
        """Try one knob after the other on the best plan so far."""
        self._now_trying(BEGINNING)
        self.best = self._contender(Plan.parse(self.findings.best))
        self._begin([self._turn(self.best) for _ in range(LEAST_ROUNDS)])
        done = {row.knob for row in self.findings.tried}
        for knob in knobs(self.job, self.cluster, self.default):
            if str(knob) not in done and knob.on(self.best.plan) != self.best.plan:
                self._note(self._untried(knob) or self._tried(knob))
        self._now_trying(None)
        self.best.close()

    def _begin(self, step_s: list[float]) -> None:
        """Set the limits by the step time of the first plan, whose measuring is not counted."""
        findings, own = self.findings, median_interval(step_s)
        self.best_s = own.middle
        if not findings.tried:
            findings.step_s, findings.steps_per_epoch = own.middle, int(self._greatest(self.best.steps_per_epoch))
        findings.run_s = longest_run_s(self.job, findings.step_s, findings.steps_per_epoch)
        findings.budget_s = budget_s(findings.step_s, findings.run_s)
        self.since = time.monotonic()
        if not findings.tried:
            self._note(Tried(findings.default, f"{BEGINNING}; the others get {findings.budget_s:.1f} s", own))

    def _untried(self, knob: Knob) -> Tried | None:
        turn = self.best.steps_a_turn + self.best.settles
        comparison_s = (2 * LEAST_ROUNDS * turn + _WARM_UP_STEPS) * self.best_s
        why = why_not_now(knob, run_s=self.findings.run_s, left_s=self.findings.budget_s - self._spent_s(), comparison_s=comparison_s)
        if why is None:
            return None
        self.findings.complete &= knob.untried is not None
        return Tried(str(knob), f"not tried: {why}")

    def _tried(self, knob: Knob) -> Tried:
        """Compare the best plan with the same and the knob; the better one stays."""
        self._now_trying(str(knob))
        asked_s = self._spent_s()
        challenger = self._contender(knob.on(self.best.plan))
        begun_s = self._spent_s()
        if knob.cost_s:  # the run is long enough for it, so it is no part of what the comparisons may take
            self.findings.budget_s += begun_s - asked_s
        share_s = (self.findings.budget_s - begun_s) / 3  # of what is left, for the comparisons to come
        comparison = Comparison()
        comparison.add(challenger.warm_s, self.best_s)
        comparison.add(self._turn(challenger), self._turn(self.best))
        if not comparison.hopeless:  # else more of them would only take long
            comparison = Comparison()
        while not comparison.decided and (len(comparison.ratios) < LEAST_ROUNDS or self._spent_s() - begun_s < share_s):
            comparison.add(self._turn(challenger), self._turn(self.best))
        tried = comparison.tried(knob)
        if comparison.wins and not knob.hint and tried.ratio and tried.step_s:
            self.findings.gain *= tried.ratio.middle
            self.best_s = tried.step_s.middle
            self.best, challenger = challenger, self.best
            self.findings.best = str(self.best.plan)
        challenger.close()
        del challenger
        gc.collect()  # a model and its optimizer refer to each other, and the next one needs the room
        return tried

    def _contender(self, plan: Plan) -> _Contender:
        """An engine under the plan, warm."""
        group = _part_of(self.group, plan.dp)
        host = self.cluster.hosts[0]
        cores = set(cores_of(self.group.rank, plan.dp, host)) if plan.pin and group is not None else self.cores
        contender = _Contender(self.job, plan, self.data, group, threads=plan.threads_for(host, plan.dp), cores=cores)
        contender.warm_s = self._greatest(contender.warm_up())
        contender.settles = contender.warm_s < _SETTLING_S
        contender.steps_a_turn = max(1, min(_MOST_STEPS_A_TURN, round(_TURN_S / contender.warm_s)))
        return contender

    def _turn(self, contender: _Contender) -> float:
        """Seconds per step of a few steps, on the slowest rank."""
        return self._greatest(contender.turn())

    def _spent_s(self) -> float:
        """By the clock of rank 0, so that all ranks decide alike."""
        own_s = self.spent_before_s + (time.monotonic() - self.since if self.since else 0.0)
        return self._greatest(own_s if self.group.rank == 0 else 0.0)

    def _greatest(self, value: float) -> float:
        """Over all ranks; those that a plan leaves idle wait here."""
        self.board.mark("sync", 0)
        tensor = torch.tensor([value], dtype=torch.float64, device=self.group.device)
        self.group.all_reduce(tensor, "max")
        return float(tensor.item())

    def _now_trying(self, what: str | None) -> None:
        self.findings.under_way = what
        self.findings.spent_s = self._spent_s()
        if self.group.rank == 0:
            self.findings.write(self.file)

    def _note(self, tried: Tried) -> None:
        self.findings.tried.append(tried)
        self._now_trying(None)


class _Contender:
    """An engine under a plan, with the job's own data; on ranks that the plan leaves idle, nothing."""

    def __init__(self, job: Job, plan: Plan, data: DataSets, group: Group | None, *, threads: int, cores: set[int]) -> None:
        self.plan, self.threads, self.cores = plan, threads, cores
        self.steps_a_turn = self.steps_per_epoch = 1
        self.warm_s, self.settles = 0.0, False
        self.engine: Engine | None = None
        if group is None:
            return
        self._take_over()
        seed_all(job.seed)
        self.engine = build_engine(job, plan, job.model.build(), data, group)
        self.steps_per_epoch = self.engine.loader.partition.steps_per_epoch
        self._batches = _endless(self.engine.loader)
        # A step takes as long, and the weights stay: no trial diverges, however many steps it takes.
        for parameters in self.engine.optimizer.param_groups:
            parameters["lr"] = 0.0

    def warm_up(self) -> float:
        """Take the first steps, which compile and allocate; seconds of the last."""
        if self.engine is None:
            return 0.0
        self._take_over()
        self._steps(_WARM_UP_STEPS - 1)
        return self._steps(1)

    def turn(self) -> float:
        """Take a few steps; seconds per step, data and all."""
        if self.engine is None:
            return 0.0
        self._take_over()
        if self.settles:
            self._steps(1)
        return self._steps(self.steps_a_turn)

    def close(self) -> None:
        """Let go of the model and the data."""
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
        self._wait()
        started = time.perf_counter()
        for _ in range(count):
            self.engine.step(next(self._batches))
        self._wait()
        return (time.perf_counter() - started) / count

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _take_over(self) -> None:
        """Give this process the threads and the cores that the plan gives a rank."""
        torch.set_num_threads(self.threads)
        if os.sched_getaffinity(0) != self.cores:
            for thread in os.listdir("/proc/self/task"):
                with suppress(ProcessLookupError):  # it has just ended
                    os.sched_setaffinity(int(thread), self.cores)


def _endless(loader: Loader) -> Generator[Any, None, None]:
    while True:
        yield from loader


def _part_of(group: Group, size: int) -> Group | None:
    """A group of the first `size` ranks; None on the others. Every rank calls this.

    On CPUs it is one of its own even where it has all ranks: shared memory for gradients lives as long as the group that it is for.
    """
    if size == group.size and (size == 1 or group.device.type == "cuda"):
        return group
    timeout = timedelta(seconds=group.deadline_s)
    backend = dist.new_group(list(range(size)), timeout=timeout) if size > 1 else None
    if group.rank >= size:
        return None
    return Group(group.rank, size, backend, None, group.deadline_s, group.hosts[:size], device=group.device)
