"""Check of a plan: all errors, the nearest valid plan, and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, combinations, islice, takewhile
from math import log2, prod
from typing import Any

from paceline.cluster.cluster import Cluster, devices_of_a_domain
from paceline.errors import JobError, PlanError, PlanProblem
from paceline.job.job import Job
from paceline.planning.arguments import AnyCluster, AnyJob, AnyPlan, cluster_of, job_of, plan_of
from paceline.planning.check.plan_context import Check, PlanContext
from paceline.planning.check.rules import CHECKS, reasons_against
from paceline.planning.check.split_rules import MEMORY
from paceline.planning.limits import fitting_microbatches
from paceline.planning.plan import DATA_AXES, DEGREES, Plan
from paceline.planning.sync_info import SyncSpec
from paceline.text import closest
from paceline.units import count


def plan_errors(
    job: AnyJob, plan: AnyPlan, *, cluster: AnyCluster | None = None, world: int | None = None
) -> PlanProblems:
    """Find every reason why a plan cannot run a job on a cluster.

    Each reason names a value that would work. If the plan divides the model, the model is built, without memory for its
    weights if its code allows that. Problems that appear only with the data and a forward pass are not found. Examples
    are the memory of activations, the last batch of an epoch, and a custom loss.

    Args:
        job: a `Job`, its YAML file, or the file's URL.
        plan: a `Plan` or its text.
        cluster: a `Cluster`, its file, or a name such as `2x8xH100-SXM`; None selects this machine.
        world: the number of ranks that were started already, for example by torchrun; None if the plan says how many to
            start.

    Returns:
        List of problems; its attribute `nearest` is the valid plan that differs least from `plan`.

    Raises:
        JobError: the job cannot be read, or its model cannot be built.
        ClusterError: the cluster cannot be read.
        PlanError: the text is not a plan.

    Example:
        >>> found = paceline.plan_errors("job.yaml", "tp=3")
        >>> [problem.code for problem in found]
        ['plan.heads_not_divisible']
        >>> found.nearest
        Plan(tp=2)
    """
    job, cluster = job_of(job), cluster_of(cluster)
    return _problems(job, plan_of(plan, job), cluster, world)


class PlanProblems(list[PlanProblem]):
    """List of all reasons why a plan cannot run.

    Attributes:
        nearest: the valid plan that differs least; None if the checked plan itself is valid or no valid plan was found.
    """

    def __init__(self, problems: Iterable[PlanProblem] = (), nearest: Plan | None = None) -> None:
        super().__init__(problems)
        self.nearest = nearest

    def __str__(self) -> str:
        """Return the problems, one per line, followed by the nearest valid plan."""
        return str(self.error())

    def error(self) -> PlanError:
        """Return a PlanError with the text of these problems."""
        return PlanError.of_problems(self, nearest=self.nearest)


def refuse(job: Job, plan: Plan, cluster: Cluster, world: int | None = None) -> None:
    """Raise an error for a plan that cannot run.

    Raises:
        PlanError: the plan cannot run; the error lists all reasons and the nearest valid plan.
    """
    if problems := _problems(job, plan, cluster, world):
        raise problems.error()


def _problems(job: Job, plan: Plan, cluster: Cluster, world: int | None) -> PlanProblems:
    problems = reasons_against(plan, job, cluster, world)
    return PlanProblems(problems, nearest_plan(plan, job, cluster, world) if problems else None)


# maximum number of changed keys in the plans that are compared
_MOST_CHANGES = 4
# combinations tried for each number of changes, nearest first
_MOST_DEGREES_TRIED = 2000
_MOST_MICROBATCHES = 64  # more are not proposed
_MOST_VIRTUAL = 12
_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": (3, 2, 1),
    "offload": (False, True),
    "offload_activations": (False, True),
    "sequence": (False,),
    "schedule": ("1f1b", "interleaved", "gpipe"),
    "remat": ("none", "selective", "block"),
    "memory_format": ("contiguous",),
    "compile": ("on", "off"),
    "fused": (False,),
    "onednn": (False,),
    "num_workers": (0,),
    "compress": ("none", "int8"),
    "sync": ("allreduce",),
    "transport": ("auto",),
    "balance": ("auto",),
    "precision": ("bf16",),
}


def nearest_plan(
    plan: Plan, job: Job, cluster: Cluster, world: int | None = None, *, further: tuple[Check, ...] = ()
) -> Plan | None:
    """Find the valid plan that differs least from `plan`.

    The result differs from `plan` in the fewest keys; among such plans, the one with the closest degrees is chosen. A
    degree of 1 stays 1, except `dp` and, if the state exceeds the memory, `fsdp`. The result needs no more ranks than
    `plan` has or the cluster has devices. If the result no longer divides the model, `dp` is raised to the number of
    ranks of `plan`, provided that this plan is valid. Equal arguments give equal results.

    Args:
        world: the number of ranks that were started already; the result then has exactly this number of ranks.
        further: additional checks, which run last; for example, checks of the traced model.

    Returns:
        The nearest valid plan, which is `plan` itself if it is valid; None if no valid plan was found.

    Raises:
        JobError: a tested plan divides the model, but the model cannot be built.
    """
    checks = (*CHECKS, *further)
    asked = PlanContext(plan, job, cluster, world)
    # a whole model may be too large as well
    asked = replace(asked, weighed=asked.divides)
    found = _nearest(asked, checks)
    if found is None or found.splits or world is not None:
        return found
    # without any split, all requested ranks hold replicas
    wider = replace(asked, plan=replace(found, dp=max(found.dp, min(plan.ranks, asked.devices))))
    return _others_repaired(wider, 0, checks) or found


def _nearest(asked: PlanContext, checks: tuple[Check, ...]) -> Plan | None:
    plan, world = asked.plan, asked.world
    if (found := _others_repaired(asked, 0, checks)) is not None:
        return found
    failed = {check.keys for check in checks if check.reason(asked)}
    ranks = asked.devices if DEGREES in failed else max(plan.ranks, asked.devices)
    ranks = ranks if world is None else world
    # sharding the state helps then
    out_of_memory = any(set(MEMORY) <= set(keys) for keys in failed)
    varied = [key for key in DEGREES if key == "dp" or getattr(plan, key) > 1 or (key == "fsdp" and out_of_memory)]
    values = {key: _values(asked, key, ranks) for key in varied}
    exact = world is not None
    for changes in range(1, _MOST_CHANGES + 1):
        for in_degrees in range(min(changes, len(varied)) + 1):
            for context in _with_other_degrees(asked, values, in_degrees, ranks, exact):
                if (found := _others_repaired(context, changes - in_degrees, checks)) is not None:
                    return found
    # no near plan found: change as many other keys as needed, with the first value of each that helps
    for in_degrees in range(len(varied) + 1):
        for context in _with_other_degrees(asked, values, in_degrees, ranks, exact):
            if (found := _others_repaired(context, None, checks)) is not None:
                return found
    return None


def _with_other_degrees(
    asked: PlanContext, values: dict[str, list[int]], changes: int, ranks: int, exact: bool
) -> Iterator[PlanContext]:
    for degrees in islice(_degrees(asked.plan, values, changes, ranks, exact=exact), _MOST_DEGREES_TRIED):
        yield replace(asked, plan=replace(asked.plan, **degrees))


def _degrees(
    plan: Plan, values: dict[str, list[int]], changes: int, ranks: int, *, exact: bool
) -> Iterator[dict[str, Any]]:
    """Yield new values for exactly `changes` degrees, the nearest first.

    The resulting plans have at most `ranks` ranks, or exactly `ranks` if `exact` is True.
    """
    found = []
    for keys in combinations(values, changes):
        kept = plan.ranks // prod(getattr(plan, key) for key in keys)
        for chosen in _within(ranks // max(1, kept), [values[key] for key in keys]):
            total = kept * prod(chosen)
            if total == ranks if exact else total <= ranks:
                distance = sum(abs(log2(value / getattr(plan, key))) for key, value in zip(keys, chosen, strict=True))
                found.append((round(distance, 9), -total, dict(zip(keys, chosen, strict=True))))
    for _, _, values_of in sorted(found, key=lambda entry: entry[:2]):
        yield values_of


def _within(most: int, choices: list[list[int]]) -> Iterator[tuple[int, ...]]:
    if not choices:
        yield ()
        return
    for value in takewhile(lambda value: value <= most, choices[0]):
        yield from ((value, *others) for others in _within(most // value, choices[1:]))


def _values(context: PlanContext, key: str, most: int) -> list[int]:
    """Return other values of a degree that pass the checks of this degree alone.

    The candidates are small numbers, powers of two, divisors, and values that would use all devices, samples or
    weights.
    """
    own, weights, data_ranks = getattr(context.plan, key), context.job.partition.weights or (), context.plan.data_ranks
    powers = [2**n for n in range(max(1, most).bit_length())]
    nearby = [own - 1, own + 1, *(n for n in range(1, min(own, 4096)) if own % n == 0)]
    others = max(1, (data_ranks if key in DATA_AXES else context.plan.ranks) // own)
    suggested = [most, most // others, context.job.global_batch // others, len(weights) // others]
    candidates = sorted({n for n in (*range(1, 17), *powers, *nearby, *suggested) if 1 <= n <= most and n != own})
    alone = [check for check in CHECKS if check.keys == (key,)]
    contexts = [(n, replace(context, plan=replace(context.plan, **dict[str, Any]({key: n})))) for n in candidates]
    return [n for n, changed in contexts if not any(check.reason(changed) for check in alone)]


def _others_repaired(
    context: PlanContext, changes: int | None, checks: tuple[Check, ...], fixed: frozenset[str] = frozenset(DEGREES)
) -> Plan | None:
    """Find a valid plan by changing exactly `changes` keys that are not in `fixed`.

    If `changes` is None, any number of keys may change.
    """
    failed = next((check for check in checks if check.reason(context)), None)
    if failed is None:
        return None if changes else context.plan
    if changes == 0:
        return None
    for key in (key for key in failed.keys if key not in fixed):
        for value in _other_values(context, key):
            changed = replace(context, plan=replace(context.plan, **{key: value}))
            if failed.reason(changed):
                continue
            if (found := _others_repaired(changed, changes and changes - 1, checks, fixed | {key})) is not None:
                return found
    return None


def _other_values(context: PlanContext, key: str) -> list[Any]:
    own = getattr(context.plan, key)
    if key == "microbatches":
        share = min(context.smallest_share, _MOST_MICROBATCHES)
        return sorted((n for n in range(1, share + 1) if n != own), key=lambda n: (abs(log2(n / own)), n))
    if key == "cut":
        meant = [_intended_cut(context)] if context.plan.pp > 1 else []
        return [cut for cut in dict.fromkeys((*meant, "")) if cut != own]
    if key == "virtual":
        return list(range(min(own - 1, _MOST_VIRTUAL), 1, -1))
    return [value for value in _CHOICES[key] if value != own]


def _intended_cut(context: PlanContext) -> str:
    """Replace each name in `cut` with the most similar module name of the model."""
    known = context.model_info.modules
    meant = {cut if cut in known else closest(cut, known) for cut in context.plan.cut.split(",")}
    return ",".join(sorted((cut for cut in meant if cut), key=known.index))


# Additional cores become threads of the ranks: communication grows with the number of ranks, and cores of one host
# share memory.
_MOST_CPU_RANKS = 8


def auto_plan(job: Job, cluster: Cluster) -> Plan:
    """Return the default plan: one rank per GPU, or up to 8 ranks on CPUs.

    On CPUs, the remaining cores become threads of the ranks. Measuring begins with this plan. The number of replicas
    never exceeds the number of devices or of samples in the global batch. If the job's partition has weights, there is
    one replica for each weight.

    Raises:
        PlanError: the weights require more replicas than the cluster has devices or the global batch has samples.
    """
    most = cluster.devices if cluster.has_accelerators else min(cluster.devices, _MOST_CPU_RANKS)
    weights = job.partition.weights
    plan = Plan(dp=min(most, job.global_batch) if weights is None else len(weights))
    plan = plan.for_job(job)
    problems = plan_errors(job, plan, cluster=cluster)
    if plan.ranks > cluster.devices and not cluster.has_accelerators:
        problems.append(
            PlanProblem(
                "plan.more_weights_than_devices",
                "the job's partition has {ranks} weights, one for each rank, but {cluster} has {devices} devices. "
                'Pass --plan "{plan}" to let ranks share cores, or give the job at most {devices} weights.',
                plan=plan,
                ranks=plan.ranks,
                cluster=cluster.name,
                devices=cluster.devices,
            )
        )
    if problems:
        raise problems.error()
    return plan


_ZOO_WITHOUT_BATCH_NORM = ("mlp", "cifar_cnn", "bert", "gpt", "moe")


def warnings_about(plan: Plan, job: Job, cluster: Cluster) -> list[str]:
    """Return warnings about a valid plan, each with a value that avoids the problem."""
    context = PlanContext(plan, job, cluster)
    found = [
        *_more_ranks_than_cores(context),
        *_more_threads_than_cores(context),
        *_cores_shared_by_ranks(context),
        *_slow_bf16(context),
        *_slow_float8(context),
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
    # several hosts may give the same warning
    return list(dict.fromkeys(found))


def _more_ranks_than_cores(context: PlanContext) -> Iterator[str]:
    plan, cluster = context.plan, context.cluster
    if cluster.has_accelerators or plan.ranks <= context.devices:
        return
    share = (
        f"{plan.ranks} ranks share {count(context.devices, 'core')}, {context.devices / plan.ranks:.2f} of a core each"
    )
    if plan.ranks > plan.dp:
        yield f"plan {plan}: {share}; use degrees whose product is {context.devices} to give each rank a core."
        return
    fewer = f" {replace(plan, dp=context.devices)}, which gives each rank a core, is likely faster."
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
            yield f"plan {plan} pins {pinned}, so some ranks share a core; pin=off lets ranks move between cores."


def _slow_bf16(context: PlanContext) -> Iterator[str]:
    plan, cluster = context.plan, context.cluster
    without = {d.name for host in cluster.hosts_in_use for d in host.devices if d.bf16 is False}
    if plan.precision_for(context.job) == "bf16" and without:
        names = ", ".join(sorted(without))
        slow = f"computes in bf16, which {names} does only in software"
        yield f"plan {plan} {slow}; precision=fp32 is likely faster on this hardware."


def _slow_float8(context: PlanContext) -> Iterator[str]:
    plan, cluster = context.plan, context.cluster
    if plan.precision_for(context.job) != "fp8":
        return
    if not cluster.has_accelerators:
        yield f"plan {plan} emulates float8 on the CPU, which is slower than predicted; use precision=bf16 for speed."
    elif plan.compile == "off":
        yield f"plan {plan} casts to float8 in many small kernels; compile=on fuses them."


def _matrices_across_hosts(context: PlanContext) -> Iterator[str]:
    """Warn about tensor-parallel groups that span several hosts or NVLink domains."""
    plan = context.plan
    joined = devices_of_a_domain(context.cluster) if plan.tp > 1 else None
    ends = list(range(joined, context.devices, joined)) if joined else list(accumulate(context.ranks_per_host))[:-1]
    if plan.tp > 1 and any(end % plan.tp and end < plan.ranks for end in ends):
        fitting = [n for n in range(1, plan.tp) if plan.tp % n == 0 and not any(end % n for end in ends)]
        talk = "divides matrices across hosts, which must then communicate in every layer"
        yield f"plan {plan} {talk}; tp={fitting[-1]} stays within a host."


def _parameters_gathered_often(plan: Plan) -> Iterator[str]:
    # a pipeline gathers only once per step
    if plan.fsdp > 1 and plan.zero == 3 and plan.microbatches > 1 and plan.pp == 1:
        yield (
            f"plan {plan} gathers the parameters again for each of {plan.microbatches} microbatches; "
            "zero=2 gathers them once per step, but needs memory for a full copy."
        )


def _idle_stages(plan: Plan) -> Iterator[str]:
    """Warn about a bubble of (pp - 1) / microbatches (Huang et al., 2019, arXiv:1811.06965)."""
    if 1 <= plan.microbatches < plan.pp:
        waiting = "has fewer microbatches than pipeline ranks, so some ranks are always idle"
        yield f"plan {plan} {waiting}; microbatches={4 * plan.pp} keeps all ranks busy."


def _fewer_microbatches(context: PlanContext) -> Iterator[str]:
    """Warn that fewer microbatches will be used, because pipeline stages need microbatches of equal size."""
    plan, shares = context.plan, context.shares
    fitting = fitting_microbatches(shares, plan.microbatches)
    if plan.pp > 1 and fitting != plan.microbatches:
        per_rank, equal = f"shares of {' and '.join(map(str, shares))} samples", plan.data_ranks * plan.microbatches
        yield (
            f"plan {plan} has {per_rank}, which cannot be divided into {plan.microbatches} equal microbatches, so "
            f"{fitting} will be used; a global batch of {-(-context.job.global_batch // equal) * equal} divides evenly."
        )


def _vocabulary_left_whole(context: PlanContext) -> Iterator[str]:
    plan = context.plan
    wrong = [n for n in context.model_info.vocabulary if n % plan.tp] if plan.tp > 1 else []
    left = f"plan {plan} does not divide the vocabulary between ranks"
    for n in wrong:
        yield (
            f"{left}, because {n} is not a multiple of {plan.tp}; a vocabulary of {n + -n % plan.tp} would be divided."
        )


def _many_activations(plan: Plan) -> Iterator[str]:
    if plan.microbatches > plan.pp > 1 and plan.schedule == "gpipe":
        yield (
            f"plan {plan} keeps the activations of all {plan.microbatches} microbatches until the backward pass; "
            f"schedule=1f1b keeps the activations of at most {plan.pp} microbatches, at the same speed."
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
    if cluster.has_accelerators:
        return
    if plan.offload and plan.fsdp > 1:
        kept = "keeps shards in host memory, but ranks without a GPU always keep them there"
        yield f"plan {plan} {kept}; offload=off has the same effect."
    if plan.offload_activations:
        kept = "keeps activations in host memory, but ranks without a GPU always keep them there"
        yield f"plan {plan} {kept}; offload_activations=off has the same effect."


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
        f"plan {plan}: {where} normalize with the statistics of {over}, not of the whole share, and update the "
        f"running statistics {count(plan.microbatches, 'time')} per step. Losses differ from a run with microbatches=1."
    )


def _nobody_to_agree_with(plan: Plan) -> Iterator[str]:
    # The text form omits defaults.
    said = " ".join(word for word in str(plan).split() if word.startswith(("sync=", "compress=")))
    if plan.dp == 1 and said:
        alone = "has one replica and nothing to synchronize"
        yield f"plan {plan} {alone}, so {said} has no effect; use dp=2 or more."


def _ends_between_agreements(context: PlanContext) -> Iterator[str]:
    """Warn about a run that ends before its replicas have synchronized."""
    plan, steps = context.plan, context.job.stop.steps
    period = SyncSpec.parse(plan.sync).period
    if plan.dp > 1 and steps is not None and steps < period:
        rarely = f"synchronizes every {period} steps, but the job ends after {steps}"
        yield f"plan {plan} {rarely}; with a period of {max(1, steps // 4)}, replicas synchronize during the run."
