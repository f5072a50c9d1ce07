"""Conversion of arguments to job, plan and cluster.

The functions and commands of `paceline` accept the same forms, so each form means the same everywhere.
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
    """Return the job, or read it from its file or URL.

    Raises:
        JobError: the argument is not a job, file or URL, or the file is wrong.
        StorageError: the URL cannot be read.
    """
    if isinstance(job, Job):
        return job
    if isinstance(job, str | Path):
        return Job.load(job)
    raise JobError("api.not_a_job", "the job must be a paceline.Job, a file or a URL, not {kind}.", kind=_kind(job))


def plan_of(plan: AnyPlan, job: Job | None = None) -> Plan:
    """Return the plan, or parse it from its text.

    Args:
        job: the job whose `gradient_accumulation_steps` are used if the plan does not set `microbatches`.

    Raises:
        PlanError: the argument is neither a plan nor its text, or is `auto`, which stands for a choice among plans.
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
    """Return the plan as `plan_of` does, or None for `auto`."""
    return None if plan == "auto" else plan_of(plan, job)


def cluster_of(cluster: AnyCluster | None) -> Cluster:
    """Return the cluster, or read it from its file or name; None is this machine.

    Raises:
        ClusterError: the argument is none of these, the file or the name is wrong, or this machine's GPUs do not work.
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
    """Return the cluster as `cluster_of` does, if ranks can run on it.

    Raises:
        ClusterError: as `cluster_of`; or there is no such file; or the name is only in the hardware catalogue,
            without real machines.
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
    """Name the kind of a wrong argument; if two arguments were exchanged, name their order."""
    nouns = {Job: "a Job", Plan: "a Plan", Cluster: "a Cluster"}
    noun = next((noun for kind, noun in nouns.items() if isinstance(given, kind)), None)
    order = ". The order is (job, plan, *, cluster)" if noun else ""
    return f"{noun or type(given).__name__}{order}"
