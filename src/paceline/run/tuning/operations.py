"""Operations of a plan's ranks in a few steps, by torch's profiler on each."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.cluster.cluster import Cluster
from paceline.elastic.run_on_ranks import run_on_plan
from paceline.errors import RunError
from paceline.job.job import Job
from paceline.planning.plan import Plan, cores_of
from paceline.planning.sync_info import sync_info

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

# begins the names of the slices of a step and of its phases
STEP, PHASE = "paceline step ", "paceline "


@dataclass(frozen=True)
class _Request:
    """Steps of a plan to profile."""

    job: Job
    cluster: Cluster
    plan: Plan
    steps: int


@dataclass(frozen=True)
class RankOperations:
    """Chrome trace of one rank, as torch's profiler exports it, compressed."""

    packed: str

    @classmethod
    def of(cls, text: str) -> RankOperations:
        """Compress a trace."""
        return cls(base64.b64encode(zlib.compress(text.encode(), 1)).decode())

    def trace(self) -> dict[str, Any]:
        """The trace."""
        found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(self.packed)))
        return found


def operations_of(job: Job, cluster: Cluster, plan: Plan, steps: int) -> list[RankOperations]:
    """Profile a few steps of a plan on real data, after a warm-up.

    There is one trace a rank, and nothing is learned.


    Raises:
        RunError: the plan has servers, or its ranks were on hosts that are not emulated here.
        LaunchError: the ranks failed; with the reason.
    """
    if sync_info(plan.sync).served:
        raise RunError(f"sync={plan.sync}: workers of servers take no steps together, so none are profiled")
    if len(cluster.hosts) > 1 and cluster.emulate is None:
        raise RunError("operations are profiled on this machine, and the run was on several hosts")
    return run_on_plan(_profiled, _Request(job, cluster, plan, steps), job=job, cluster=cluster, plan=plan)


def _profiled(request: _Request) -> RankOperations:
    """Take the steps as one of the ranks."""
    from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

    from paceline.comm.agree import greatest
    from paceline.comm.backend import joined
    from paceline.device import synchronize
    from paceline.files import scratch_folder
    from paceline.run.build import seed_all
    from paceline.run.tuning.candidate import TrialCandidate, part_of

    job, plan, host = request.job, request.plan, request.cluster.hosts[0]
    with joined(deadline_s=job.deadline_s) as group:
        seed_all(job.seed)
        data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
        cores = set(cores_of(group.rank, plan.ranks, host)) if plan.pin else set(os.sched_getaffinity(0))
        here = max(request.cluster.ranks_per_host(plan.ranks))
        candidate = TrialCandidate(
            job, plan, data, part_of(group, plan), threads=plan.threads_for(host, here), cores=cores
        )
        candidate.is_warm(greatest(group, candidate.warm_up()))
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it logs a missing GPU as an error
        assert candidate.engine is not None
        with profile(activities=supported_activities() or [ProfilerActivity.CPU]) as profiler:
            greatest(group, 0.0)  # the first of the profiler's own work is over on all ranks
            for number in range(1, request.steps + 1):
                with record_function(f"{STEP}{number}"), _phases(candidate.engine):
                    candidate.step()
            synchronize(candidate.engine.device)
        candidate.close()
        with scratch_folder() as folder:
            profiler.export_chrome_trace(str(folder / "trace.json"))
            return RankOperations.of((folder / "trace.json").read_text())


@contextmanager
def _phases(engine: Engine) -> Iterator[None]:
    """Slices named after the phases of a step, within."""
    from torch.profiler import record_function

    before, under_way = engine.on_phase, list[Any]()

    def end() -> None:
        if under_way:
            under_way.pop().__exit__(None, None, None)

    def began(phase: Any, step: int) -> None:
        before(phase, step)
        end()
        under_way.append(record_function(f"{PHASE}{phase}"))
        under_way[-1].__enter__()

    engine.on_phase = began
    try:
        yield
    finally:
        end()
        engine.on_phase = before
