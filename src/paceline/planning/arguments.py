"""Conversion of arguments to a job, a plan and a cluster.

All functions and commands of `paceline` accept the same forms of these arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from paceline.cluster.cluster import Cluster, cluster_from
from paceline.cluster.discover import discover
from paceline.errors import ClusterError, JobError, PlanError
from paceline.job.job import Job
from paceline.planning.plan import Plan

AnyJob: TypeAlias = Job | str | Path
AnyPlan: TypeAlias = Plan | str
AnyCluster: TypeAlias = Cluster | str | Path


def job_of(job: AnyJob) -> Job:
    """Return a job as it is, or load it from a file or URL.

    Raises:
        JobError: the argument is not a job, a file or a URL, or the job file is invalid.
        StorageError: the URL cannot be read.
    """
    if isinstance(job, Job):
        return job
    if isinstance(job, str | Path):
        return Job.load(job)
    raise JobError("api.not_a_job", "the job must be a paceline.Job, a file or a URL, not {kind}.", kind=_kind(job))


def plan_of(plan: AnyPlan, job: Job | None = None) -> Plan:
    """Return a plan as it is, or parse a plan from text.

    Args:
        job: the job whose `gradient_accumulation_steps` are used if the plan does not set `microbatches`.

    Raises:
        PlanError: the argument is not a plan or valid plan text, or it is `auto`, which names no single plan.
    """
    if isinstance(plan, Plan):
        return plan if job is None else plan.for_job(job)
    if plan == "auto":
        raise PlanError(
            "api.auto_plan",
            '"auto" lets paceline choose among plans, but one plan is needed here. paceline.plan(job) returns one.',
        )
    if isinstance(plan, str):
        parsed = Plan.parse(plan)
        return parsed if job is None or "microbatches=" in plan else parsed.for_job(job)
    raise PlanError(
        "api.not_a_plan", "the plan must be a paceline.Plan or its text, such as dp=2, not {kind}.", kind=_kind(plan)
    )


def plan_or_auto(plan: AnyPlan, job: Job | None = None) -> Plan | None:
    """Return the plan like `plan_of`, but accept `auto` and return None for it."""
    return None if plan == "auto" else plan_of(plan, job)


def cluster_of(cluster: AnyCluster | None) -> Cluster:
    """Return a cluster unchanged, or load it from a file or name. None selects this machine.

    Raises:
        ClusterError: the argument is not a cluster, a file or a name; the file or name is invalid; or a GPU of this
            machine does not work.
    """
    if cluster is None:
        return discover()
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, str | Path):
        return cluster_from(cluster)
    raise ClusterError(
        "api.not_a_cluster",
        "the cluster must be a paceline.Cluster, a file or a name, not {kind}.",
        kind=_kind(cluster),
    )


def cluster_to_run_on(cluster: AnyCluster | None) -> Cluster:
    """Return the cluster like `cluster_of`, but refuse a cluster on which no rank can run.

    Raises:
        ClusterError: `cluster_of` raises it, the file does not exist, or the name comes from the hardware catalogue and
            has no real machines.
    """
    try:
        found = cluster_of(cluster)
    except ClusterError as error:
        if error.code != "cluster.name_wrong" or Path(str(cluster)).is_file():
            raise
        raise ClusterError(
            "cluster.no_file",
            'there is no cluster file "{cluster}". Name a YAML file of hosts, or leave the cluster out to use this '
            "machine.",
            cluster=cluster,
        ) from error
    if found.only_planned:
        raise ClusterError(
            "cluster.catalogue_only",
            "{cluster} is a name from the catalogue of hardware. You can plan for it (paceline plan), but nothing "
            "can run on it. Leave the cluster out to use this machine, or name a cluster file.",
            cluster=found.name,
        )
    return found


def _kind(given: Any) -> str:
    """Describe the type of a wrong argument, and the expected order of swapped arguments."""
    nouns = {Job: "a Job", Plan: "a Plan", Cluster: "a Cluster"}
    noun = next((noun for kind, noun in nouns.items() if isinstance(given, kind)), None)
    order = ". The order is (job, plan, *, cluster)" if noun else ""
    return f"{noun or type(given).__name__}{order}"
