"""What keeps a plan from running a job on a cluster, and what slows one that runs: every reason, with the value that would work."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.job.partition import Partition, PartitionSpec

if TYPE_CHECKING:
    from paceline.plan.plan import Plan

_ZOO_WITHOUT_IMAGES = ("mlp", "bert", "gpt")
_WITH_FUSED_STEP = ("sgd", "adam", "adamw")  # torch's own; LARS and LAMB are ours
_FITTING_PLANS_NAMED = 3
_RANK_BYTES = 2**28  # of a rank with torch in it, before it has a model


def reasons_against(plan: Plan, job: Job, cluster: Cluster) -> list[str]:
    """See `Plan.check`."""
    found = (
        _too_few_devices(plan, job, cluster),
        _too_little_memory(plan, cluster),
        _other_weights(plan, job, cluster),
        _share_too_small(plan, job),
        _loss_over_the_whole_batch(plan, job),
        _no_fused_step(plan, job),
        _no_images(plan, job),
        _no_cuda_graphs(plan, cluster),
        _no_such_transport(plan, cluster),
    )
    return [reason for reason in found if reason]


def warnings_about(plan: Plan, job: Job, cluster: Cluster) -> list[str]:
    """See `Plan.warnings`."""
    found = [
        *_more_ranks_than_cores(plan, job, cluster),
        *_more_threads_than_cores(plan, cluster),
        *_cores_shared_by_ranks(plan, cluster),
        *_slow_bf16(plan, job, cluster),
    ]
    return list(dict.fromkeys(found))  # once where hosts are alike


def _too_few_devices(plan: Plan, job: Job, cluster: Cluster) -> str | None:
    """Ranks may share the cores of CPUs, but no GPU."""
    if plan.ranks <= cluster.devices or cluster.kind == "cpu":
        return None
    fitting = " · ".join(str(p) for p in _plans_that_fit(plan, job, cluster))
    have = f"plan {plan} needs {_count(plan.ranks, 'rank')}; {cluster.name} has {_count(cluster.devices, 'device')}."
    if fitting:
        return f"{have} Plans that fit: {fitting}."
    weights = job.partition.weights or ()
    if len(weights) > cluster.devices:
        have += f" The job's partition has {_count(len(weights), 'weight')}, one per replica: at most {cluster.devices} can work here."
    return have


def _too_little_memory(plan: Plan, cluster: Cluster) -> str | None:
    """Only where ranks share cores: the rest is for the memory to tell."""
    if plan.ranks <= cluster.devices or cluster.kind != "cpu":
        return None
    most = sum(host.memory_bytes // _RANK_BYTES for host in cluster.hosts)
    if plan.ranks <= most:
        return None
    return (
        f"plan {plan} needs {_count(plan.ranks, 'rank')}, for which torch alone takes {plan.ranks * _RANK_BYTES / 2**30:,.0f} GiB "
        f"of memory; {cluster.name} has room for {most:,} and cores for {cluster.devices}: dp={cluster.devices}."
    )


def _plans_that_fit(plan: Plan, job: Job, cluster: Cluster) -> list[Plan]:
    """The plan with fewer replicas, most first, and with whatever else keeps it from running set right."""
    weights = job.partition.weights
    most = min(cluster.devices, job.global_batch)
    sizes = range(most, 0, -1) if weights is None else [n for n in (len(weights),) if n <= most and _smallest_share(job, n) > 0]
    return [_set_right(replace(plan, dp=n), job) for n in sizes[:_FITTING_PLANS_NAMED]]


def _set_right(plan: Plan, job: Job) -> Plan:
    return replace(
        plan,
        microbatches=1 if _loss_over_the_whole_batch(plan, job) else min(plan.microbatches, _smallest_share(job, plan.dp)),
        fused=plan.fused and not _no_fused_step(plan, job),
        memory_format="contiguous" if _no_images(plan, job) else plan.memory_format,
        transport="auto",
    )


def _other_weights(plan: Plan, job: Job, cluster: Cluster) -> str | None:
    weights = job.partition.weights
    if weights is None or len(weights) == plan.dp:
        return None
    fitting = f"dp={len(weights)}, or " if len(weights) <= cluster.devices else ""
    return (
        f"plan {plan} has {_count(plan.dp, 'replica')}, but the job's partition has {_count(len(weights), 'weight')}, one per replica: "
        f"{fitting}{_count(min(plan.dp, cluster.devices), 'weight')} in the job would fit."
    )


def _share_too_small(plan: Plan, job: Job) -> str | None:
    if plan.dp > job.global_batch:
        return (
            f"plan {plan} has {plan.dp} replicas for a global batch of {job.global_batch}, and each needs a sample: "
            f"dp is at most {job.global_batch}, or the job's global_batch at least {plan.dp}."
        )
    share = _smallest_share(job, plan.dp)
    if share == 0 and (weights := job.partition.weights):
        enough = math.ceil(sum(weights) / min(weights))
        return (
            f"plan {plan} deals a global batch of {job.global_batch} by the job's weights, which leave a replica no sample: "
            f"a global_batch of {enough} is enough."
        )
    if plan.microbatches > share:
        return (
            f"plan {plan} cuts a replica's share of the global batch into {plan.microbatches} parts, but the smallest share is "
            f"{_count(share, 'sample')}: microbatches is at most {share}."
        )
    return None


def _smallest_share(job: Job, replicas: int) -> int:
    """How many samples of a full global batch the replica with the fewest gets. The job's weights count where there is one per replica."""
    weights = job.partition.weights
    if weights is None or len(weights) != replicas:
        return job.global_batch // replicas
    spec, batch = PartitionSpec(weights=weights), job.global_batch
    return min(Partition(spec, samples=batch, global_batch=batch, seed=0, replica=0, replicas=replicas).shares(0))


def _loss_over_the_whole_batch(plan: Plan, job: Job) -> str | None:
    if plan.microbatches == 1 or job.loss.name != "contrastive":
        return None
    why = "the contrastive loss compares all samples of a batch with each other"
    return f"plan {plan} computes a share in {plan.microbatches} parts, but {why}: microbatches=1."


def _no_fused_step(plan: Plan, job: Job) -> str | None:
    if not plan.fused or job.optimizer.name in _WITH_FUSED_STEP:
        return None
    return f"plan {plan} needs a fused step of {job.optimizer.name}; torch has one of {', '.join(_WITH_FUSED_STEP)} only: fused=off."


def _no_images(plan: Plan, job: Job) -> str | None:
    """Models by import path may take images; so they pass."""
    model = job.model
    takes_images = model.zoo not in _ZOO_WITHOUT_IMAGES and model.task in (None, "image_classification")
    if plan.memory_format != "channels_last" or takes_images:
        return None
    return f"plan {plan} is for images, and the model ({model.zoo or model.task}) takes none: memory_format=contiguous."


def _no_cuda_graphs(plan: Plan, cluster: Cluster) -> str | None:
    if plan.compile != "reduce-overhead" or cluster.kind == "cuda":
        return None
    return f"plan {plan} replays CUDA graphs, and {cluster.name} has no GPU: compile=on."


def _no_such_transport(plan: Plan, cluster: Cluster) -> str | None:
    if plan.transport != "auto" and cluster.kind == "cuda":
        return f"plan {plan} names a transport between CPUs, but the GPUs of {cluster.name} talk over NCCL: transport=auto."
    hosts = sum(ranks > 0 for ranks in _ranks_per_host(plan, cluster))
    if plan.transport == "shm" and hosts > 1:
        return f"plan {plan} needs memory that all ranks share, but they are on {hosts} hosts: transport=auto."
    return None


def _more_ranks_than_cores(plan: Plan, job: Job, cluster: Cluster) -> list[str]:
    if cluster.kind == "cuda" or plan.ranks <= cluster.devices:
        return []
    better = "" if job.partition.weights else f" {replace(plan, dp=cluster.devices)}, with a core for each rank, is likely faster."
    return [
        f"plan {plan}: {plan.ranks} ranks share {_count(cluster.devices, 'core')}, {cluster.devices / plan.ranks:.2f} of a core each, "
        f"and every rank keeps a copy of the model.{better}"
    ]


def _more_threads_than_cores(plan: Plan, cluster: Cluster) -> list[str]:
    return [
        f"plan {plan} runs {ranks} × {plan.threads} threads on a host with {host.cores} cores; threads={max(1, host.cores // ranks)} fits."
        for host, ranks in zip(cluster.hosts, _ranks_per_host(plan, cluster), strict=True)
        if ranks and plan.threads > max(1, host.cores // ranks)
    ]


def _cores_shared_by_ranks(plan: Plan, cluster: Cluster) -> list[str]:
    return [
        f"plan {plan} pins {ranks} ranks to {host.cores} cores of a host, so that some share one; pin=off lets them move."
        for host, ranks in zip(cluster.hosts, _ranks_per_host(plan, cluster), strict=True)
        if plan.pin and ranks > max(host.cores, sum(map(len, host.affinity)))
    ]


def _slow_bf16(plan: Plan, job: Job, cluster: Cluster) -> list[str]:
    without = {d.name for host in cluster.hosts if host.kind == cluster.kind for d in host.devices if d.bf16 is False}
    if plan.precision_for(job) != "bf16" or not without:
        return []
    names = ", ".join(sorted(without))
    return [f"plan {plan} computes in bf16, which {names} does only in software; precision=fp32 is likely faster there."]


def _ranks_per_host(plan: Plan, cluster: Cluster) -> list[int]:
    """Hosts are filled in their order, each core with as many ranks as it takes for all to have a place."""
    left, placed = plan.ranks, []
    per_device = math.ceil(plan.ranks / cluster.devices)
    for capacity in cluster.devices_per_host:
        placed.append(min(capacity * per_device, left))
        left -= placed[-1]
    return placed


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
