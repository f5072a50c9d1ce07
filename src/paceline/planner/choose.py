"""`paceline.plan(job, cluster)`: the plan that is predicted to be the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planner.search.search import search
from paceline.plans.plan import Plan

if TYPE_CHECKING:
    from paceline.planner.calibrate import Calibration


def plan(
    job: Job | str | Path, cluster: Cluster | str | Path | None = None, calibration: Calibration | None = None
) -> Plan:
    """The plan for a job on a cluster, found without running anything.

    Args:
        job: the job, or the YAML file that holds it.
        cluster: the cluster, its file, or a name such as `64x8xH100-SXM, 400gbit`; None: this machine.
        calibration: measurements of its machines; without, the catalogue's figures are used.

    Raises:
        JobError: the job cannot be read, or its model not be built.
        ClusterError: the cluster cannot be read, or its devices are in no catalogue.
        PlanError: no plan can run the job there; the message says why, and what would.
    """
    read = job if isinstance(job, Job) else Job.load(job)
    return search(read, _cluster(cluster), top=1, calibration=calibration).best[0].plan


def _cluster(cluster: Cluster | str | Path | None) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        from paceline.cluster.discover import discover

        return discover()
    from paceline.cluster.named import cluster_from

    return cluster_from(str(cluster))
