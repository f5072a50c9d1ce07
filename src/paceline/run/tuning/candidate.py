"""An engine under one of several plans that are timed in the same processes.

The model and the data are real; nothing is learned.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm import Group
from paceline.data.loader import Loader
from paceline.device import is_accelerator, synchronize
from paceline.engine.calls import use_onednn
from paceline.engine.engine import Engine
from paceline.engine.meter import OPTIMIZER, Timing
from paceline.job.job import Job
from paceline.job.samples import DataSets
from paceline.planning.plan import Plan
from paceline.run.build import begin_engine

WARM_UP_STEPS = 2
# seconds of one plan's steps before the other's turn
_TURN_S = 0.15
_MOST_STEPS_A_TURN = 8
# times as many where loader processes read, which the other plan's turn has kept waiting
_LONGER = 4
# A shorter step is slower the first time in a turn, when caches and threads are still the other plan's.
_SETTLING_S = 0.5


class TrialCandidate:
    """An engine under a plan, with the job's own data; idle ranks have none.

    Args:
        group: group of the plan's ranks, from `part_of`; None on the others.
        threads: threads of a rank.
        cores: cores that a rank may run on.

    Attributes:
        update_s: seconds per step of the newest turn that were the update's; 0 where nothing tells.
    """

    def __init__(
        self, job: Job, plan: Plan, data: DataSets, group: Group | None, *, threads: int, cores: set[int]
    ) -> None:
        self.plan, self.threads, self.cores = plan, threads, cores
        self.steps_a_turn = self.steps_per_epoch = 1
        self.warm_s, self.settles, self.update_s = 0.0, False, 0.0
        self._longer = _LONGER if plan.num_workers or job.data.num_workers else 1
        self.engine: Engine | None = None
        if group is None:
            return
        self._take_over()
        self.engine = begin_engine(job, plan, data, group)
        self.steps_per_epoch = self.engine.loader.partition.steps_per_epoch
        self._batches = _endless(self.engine.loader)
        # A step takes as long, and the weights stay: no trial diverges, however many steps it takes.
        for parameters in self.engine.optimizer.param_groups:
            parameters["lr"] = 0.0

    def warm_up(self) -> float:
        """Take the first steps, which compile and allocate; returns the seconds of the last."""
        if self.engine is None:
            return 0.0
        self._take_over()
        self._steps(WARM_UP_STEPS - 1)
        return self._steps(1)

    def is_warm(self, step_s: float) -> None:
        """Set the length of a turn from the step time of the slowest rank."""
        self.warm_s = step_s
        self.settles = step_s < _SETTLING_S
        most = _MOST_STEPS_A_TURN * self._longer
        self.steps_a_turn = max(1, min(most, round(_TURN_S / step_s)))

    def turn(self) -> float:
        """Take a few steps; returns seconds per step, with data loading."""
        if self.engine is None:
            return 0.0
        self._take_over()
        if self.settles:
            self._steps(min(self._longer, self.steps_a_turn))
        return self._steps(self.steps_a_turn)

    def step(self) -> Timing | None:
        """Take one step, with its data; for ranks that the plan has."""
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
        """Give this process the plan's threads, cores and matrix products."""
        torch.set_num_threads(self.threads)
        use_onednn(self.plan.onednn)
        if os.sched_getaffinity(0) != self.cores:
            for thread in os.listdir("/proc/self/task"):
                # the thread has just ended
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), self.cores)


def ignore_views() -> None:
    """Leave out torch's warning of models that return views, which nothing changes in place here."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)


def part_of(world: Group, plan: Plan) -> Group | None:
    """Group of the first ranks, as many as the plan has; None on the others.

    Every rank calls this. On CPUs it is a new group even if it has all ranks: shared memory for gradients lives as long
    as its group.
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
