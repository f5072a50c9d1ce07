"""Warnings about a plan that runs, but slowly or with an uncommon result.

Each names a value that avoids it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster, devices_of_a_domain
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.planning.check.plan_context import PlanContext
from paceline.planning.limits import fitting_microbatches
from paceline.planning.sync_info import SyncSpec
from paceline.units import count

if TYPE_CHECKING:
    from paceline.planning.plan import Plan

_ZOO_WITHOUT_BATCH_NORM = ("mlp", "cifar_cnn", "bert", "gpt", "moe")


def warnings_about(plan: Plan, job: Job, cluster: Cluster) -> list[str]:
    """Warnings about a plan that runs, each with a value that avoids it."""
    context = PlanContext(plan, job, cluster)
    found = [
        *_more_ranks_than_cores(context),
        *_more_threads_than_cores(context),
        *_cores_shared_by_ranks(context),
        *_slow_bf16(context),
        *_matrices_across_hosts(context),
        *_parameters_gathered_often(plan),
        *_vocabulary_left_whole(context),
        *_idle_stages(plan),
        *_fewer_microbatches(context),
        *_many_activations(plan),
        *_uneven_attention(context),
        *_nothing_to_offload_to(context),
        *_statistics_of_microbatches(context),
        *_nobody_to_agree_with(plan),
        *_ends_between_agreements(context),
    ]
    # once if hosts are alike
    return list(dict.fromkeys(found))


def _more_ranks_than_cores(context: PlanContext) -> Iterator[str]:
    plan, cluster = context.plan, context.cluster
    if cluster.has_accelerators or plan.ranks <= context.devices:
        return
    share = (
        f"{plan.ranks} ranks share {count(context.devices, 'core')}, {context.devices / plan.ranks:.2f} of a core each"
    )
    if plan.ranks > plan.dp:
        yield f"plan {plan}: {share}; degrees that multiply to {context.devices} give each rank one."
        return
    fewer = f" {replace(plan, dp=context.devices)}, with a core for each rank, is likely faster."
    better = "" if context.job.partition.weights else fewer
    yield f"plan {plan}: {share}, and every rank keeps a copy of the model.{better}"


def _more_threads_than_cores(context: PlanContext) -> Iterator[str]:
    plan = context.plan
    for host, ranks in zip(context.cluster.hosts, context.ranks_per_host, strict=True):
        fitting = max(1, host.cores // max(ranks, 1))
        if ranks and plan.threads > fitting:
            threads = f"{ranks} × {plan.threads} threads on a host with {host.cores} cores"
            yield f"plan {plan} runs {threads}; threads={fitting} fits."


def _cores_shared_by_ranks(context: PlanContext) -> Iterator[str]:
    plan = context.plan
    for host, ranks in zip(context.cluster.hosts, context.ranks_per_host, strict=True):
        if plan.pin and ranks > max(host.cores, sum(map(len, host.affinity))):
            pinned = f"{ranks} ranks to {host.cores} cores of a host"
            yield f"plan {plan} pins {pinned}, so that some share one; pin=off lets them move."


def _slow_bf16(context: PlanContext) -> Iterator[str]:
    plan, cluster = context.plan, context.cluster
    without = {d.name for host in cluster.hosts_in_use for d in host.devices if d.bf16 is False}
    if plan.precision_for(context.job) == "bf16" and without:
        names = ", ".join(sorted(without))
        slow = f"computes in bf16, which {names} does only in software"
        yield f"plan {plan} {slow}; precision=fp32 is likely faster there."


def _matrices_across_hosts(context: PlanContext) -> Iterator[str]:
    """Warning about tensor-parallel groups that are divided by the end of a host or domain."""
    plan = context.plan
    joined = devices_of_a_domain(context.cluster) if plan.tp > 1 else None
    ends = list(range(joined, context.devices, joined)) if joined else list(accumulate(context.ranks_per_host))[:-1]
    if plan.tp > 1 and any(end % plan.tp and end < plan.ranks for end in ends):
        fitting = [n for n in range(1, plan.tp) if plan.tp % n == 0 and not any(end % n for end in ends)]
        talk = "divides matrices across hosts, which then talk in every layer"
        yield f"plan {plan} {talk}; tp={fitting[-1]} stays within a host."


def _parameters_gathered_often(plan: Plan) -> Iterator[str]:
    # a pipeline gathers once a step
    if plan.fsdp > 1 and plan.zero == 3 and plan.microbatches > 1 and plan.pp == 1:
        yield (
            f"plan {plan} gathers the parameters anew for each of {plan.microbatches} microbatches; "
            "zero=2 gathers them once a step, for the memory of one whole copy."
        )


def _idle_stages(plan: Plan) -> Iterator[str]:
    """Warning about a bubble of (pp - 1) / microbatches (Huang et al., 2019, arXiv:1811.06965)."""
    if 1 <= plan.microbatches < plan.pp:
        waiting = "has fewer microbatches than pipeline ranks, so some always wait"
        yield f"plan {plan} {waiting}; microbatches={4 * plan.pp} keeps them busy."


def _fewer_microbatches(context: PlanContext) -> Iterator[str]:
    """Warning that fewer microbatches will be used. A pipeline's stages need equal ones."""
    plan, shares = context.plan, context.shares
    fitting = fitting_microbatches(shares, plan.microbatches)
    if plan.pp > 1 and fitting != plan.microbatches:
        per_rank, equal = f"shares of {' and '.join(map(str, shares))} samples", plan.data_ranks * plan.microbatches
        yield (
            f"plan {plan} has {per_rank}, which cannot be divided into {plan.microbatches} equal microbatches, so "
            f"{fitting} will be used; a global batch of {-(-context.job.global_batch // equal) * equal} would divide."
        )


def _vocabulary_left_whole(context: PlanContext) -> Iterator[str]:
    plan = context.plan
    wrong = [n for n in context.model_info.vocabulary if n % plan.tp] if plan.tp > 1 else []
    left = f"plan {plan} leaves the vocabulary whole on each rank"
    for n in wrong:
        yield f"{left}, for {n} is not a multiple of {plan.tp}; {n + -n % plan.tp} in the model would be divided."


def _many_activations(plan: Plan) -> Iterator[str]:
    if plan.microbatches > plan.pp > 1 and plan.schedule == "gpipe":
        yield (
            f"plan {plan} keeps the activations of all {plan.microbatches} microbatches until the backward pass; "
            f"schedule=1f1b keeps those of {plan.pp} at most, at the same speed."
        )


def _uneven_attention(context: PlanContext) -> Iterator[str]:
    plan, tokens, chunks = context.plan, context.tokens, 2 * context.plan.cp
    if plan.cp > 1 and tokens is not None and tokens % chunks:
        yield (
            f"plan {plan}: {tokens} tokens are not a multiple of {chunks}, so with causal attention the last of "
            f"{plan.cp} ranks has the most work; sequences of {-(-tokens // chunks) * chunks} tokens are divided "
            "evenly."
        )


def _nothing_to_offload_to(context: PlanContext) -> Iterator[str]:
    plan, cluster = context.plan, context.cluster
    if plan.offload and plan.fsdp > 1 and not cluster.has_accelerators:
        kept = "keeps shards in host memory, where ranks without a GPU keep them anyway"
        yield f"plan {plan} {kept}; offload=off does the same."


def _statistics_of_microbatches(context: PlanContext) -> Iterator[str]:
    plan, job = context.plan, context.job
    if plan.microbatches == 1 or job.model.zoo in _ZOO_WITHOUT_BATCH_NORM:
        return
    try:
        norms = context.model_info.batch_norms
    except JobError:  # the ranks will report it with more details
        return
    if not norms:
        return
    share = max(1, job.global_batch // plan.data_ranks // plan.microbatches)
    where = norms[0] + (f" and {len(norms) - 1} more" if norms[1:] else "")
    over = (
        f"{count(share, 'sample')} of a microbatch"
        if job.batch_norm == "local" or plan.data_ranks == 1
        else f"one microbatch of each of {plan.data_ranks} data-parallel ranks"
    )
    yield (
        f"plan {plan}: {where} normalise by the statistics of {over}, not of the whole share, and move the running "
        f"ones {count(plan.microbatches, 'time')} a step: losses differ from those of microbatches=1."
    )


def _nobody_to_agree_with(plan: Plan) -> Iterator[str]:
    # The text form leaves defaults out.
    said = " ".join(word for word in str(plan).split() if word.startswith(("sync=", "compress=")))
    if plan.dp == 1 and said:
        alone = "has one replica, which agrees with nobody"
        yield f"plan {plan} {alone}, so {said} does nothing; dp=2 or more has it work."


def _ends_between_agreements(context: PlanContext) -> Iterator[str]:
    """Warning about a run that ends before its replicas agree once."""
    plan, steps = context.plan, context.job.stop.steps
    period = SyncSpec.parse(plan.sync).period
    if plan.dp > 1 and steps is not None and steps < period:
        rarely = f"agrees every {period} steps, and the job ends after {steps}"
        yield f"plan {plan} {rarely}; a period of {max(1, steps // 4)} agrees four times."
