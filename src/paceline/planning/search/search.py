"""Search of the fastest legal plans of a job on a cluster.

Rows (degrees and microbatches) are taken in the order of their lower bounds; each is expanded to its variants, and
these to the factorisations of their data-parallel ranks into dp × fsdp, as long as the lower bound is below the best
found. So all omitted plans are slower, and the result is that of trying all of them. It depends on nothing but its
arguments: no clock ends it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.adjustment import factor_of
from paceline.planning.machines import machines
from paceline.planning.plan import Plan
from paceline.planning.predict import Layouts, priced
from paceline.planning.search.branch_and_bound import BranchAndBound
from paceline.planning.search.rejected import nothing_fits, why_it_loses, why_it_wins
from paceline.planning.search.result import SearchResult, preferred
from paceline.planning.search.space import Space

if TYPE_CHECKING:
    from paceline.planning.adjustment import Basis


def search(
    job: Job,
    cluster: Cluster,
    *,
    top: int = 10,
    calibration: Basis | None = None,
    base: Plan | None = None,
) -> SearchResult:
    """The plans predicted to be fastest, of all that pass `check_plan` and fit the memory.

    Args:
        top: number of plans to list, each with other degrees.
        calibration: measurements of the cluster, or the factors of measured runs, by which the plans found are put in
            order; without, the catalogue is used.
        base: values of keys that do not vary: precision, sync, compress and the knobs; `Plan()` by default.

    Raises:
        JobError: the model cannot be built.
        ClusterError: a device is not in the catalogue, and nothing was measured.
        PlanError: no plan works; the message says what is missing.
    """
    started = time.perf_counter()
    base = base or Plan()
    layouts = Layouts(job, machines(cluster, calibration))
    space = Space(job, cluster, base, layouts.trace)
    solver = BranchAndBound(space, layouts, top)
    gap = solver.run()
    # offload is the slowest way to save memory, so it is tried only if no other works
    if not solver.found and cluster.has_accelerators and not base.offload:
        offloaded = Space(job, cluster, replace(base, offload=True), layouts.trace)
        again = BranchAndBound(offloaded, layouts, top)
        gap = again.run()
        space, solver = (offloaded, again) if again.found else (space, solver)
    if not solver.found:
        raise nothing_fits(space, solver.rejections, solver.layout)
    # measured runs may tell plans apart that the cost model does not
    told = [(c, priced(c.prediction, job, cluster, c.plan, c.layout)) for c in solver.found.values()]
    told = sorted(told, key=lambda one: (one[1].step_time_s, str(one[0].plan)))[:top]
    chosen = preferred([replace(c, prediction=prediction) for c, prediction in told])
    told = sorted(told, key=lambda one: one[0].plan != chosen.plan)  # stable sort: the others stay in order of time
    winner, usual = told[0][0], factor_of(told[0][0].layout)
    whys = [why_it_wins(winner), *(why_it_loses(c, winner, factor_of(c.layout) / usual) for c, _ in told[1:])]
    best = [replace(c, prediction=prediction, why=why) for (c, prediction), why in zip(told, whys, strict=True)]
    found = SearchResult(
        best=tuple(best),
        excluded=solver.rejections.excluded(space),
        considered=solver.considered,
        gap=gap,
        evaluated=solver.evaluated,
        pruned=solver.considered - solver.evaluated - solver.rejections.plans,
    )
    return replace(found, seconds=time.perf_counter() - started)


def plan(job: Job | str | Path, cluster: Cluster | str | Path | None = None, calibration: Basis | None = None) -> Plan:
    """The plan for a job on a cluster, found without running anything.

    If predictions cannot tell plans apart, the one with the fewest moving parts is returned, then the fewest ranks,
    then the most free memory.

    Args:
        job: the job, or the YAML file that holds it.
        cluster: the cluster, its file, or a name such as `64x8xH100-SXM, 400gbit`; None: this machine.
        calibration: measurements of its machines, or the factors of measured runs (`paceline.calibrate_on`); without,
            the catalogue's figures are used.

    Raises:
        JobError: the job cannot be read, or its model not be built.
        ClusterError: the cluster cannot be read, or its devices are in no catalogue.
        PlanError: no plan can run the job there; the message says why, and what would.
    """
    read = job if isinstance(job, Job) else Job.load(job)
    return search(read, _cluster(cluster), calibration=calibration).best[0].plan


def _cluster(cluster: Cluster | str | Path | None) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        from paceline.cluster.discover import discover

        return discover()
    from paceline.cluster.named import cluster_from

    return cluster_from(str(cluster))
