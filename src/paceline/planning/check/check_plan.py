"""Check of a plan: every reason against it, and the nearest plan that works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice, takewhile
from math import log2, prod
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.nearest import closest
from paceline.planning.axes import DATA_AXES, DEGREES
from paceline.planning.check.plan_context import Check, PlanContext
from paceline.planning.check.rules import CHECKS, MEMORY, reasons_against
from paceline.planning.plan import Plan


def check_plan(plan: Plan, job: Job, cluster: Cluster, world: int | None = None) -> list[str]:
    """Every reason why a plan cannot run a job on a cluster.

    Each reason names the value that would work. After the reasons comes the nearest plan that works, if one was found.
    If the plan divides the model, the model is built, without memory for its weights if its code allows that. Problems
    that only the data and a forward pass show are not found: activations, the last batch of an epoch, a loss of the
    user's own.

    Args:
        world: the number of ranks that were started already, as by torchrun; None if the plan says how many to start.

    Raises:
        JobError: the model cannot be built.
    """
    reasons = reasons_against(plan, job, cluster, world)
    if reasons and (nearest := nearest_plan(plan, job, cluster, world)):
        reasons.append(f"Nearest plan that works: {nearest}.")
    return reasons


# number of changed keys that are compared with each other
_MOST_CHANGES = 4
# combinations tried for each number of changes, nearest first
_MOST_DEGREES_TRIED = 2000
_MOST_MICROBATCHES = 64  # more are not proposed
_MOST_VIRTUAL = 12
_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": (3, 2, 1),
    "offload": (False, True),
    "sequence": (False,),
    "schedule": ("1f1b", "interleaved", "gpipe"),
    "remat": ("none",),
    "memory_format": ("contiguous",),
    "compile": ("on", "off"),
    "fused": (False,),
    "onednn": (False,),
    "num_workers": (0,),
    "compress": ("none", "int8"),
    "sync": ("allreduce",),
    "transport": ("auto",),
    "balance": ("auto",),
}


def nearest_plan(
    plan: Plan, job: Job, cluster: Cluster, world: int | None = None, *, further: tuple[Check, ...] = ()
) -> Plan | None:
    """Find the plan that passes every check and differs least from `plan`.

    It differs in the fewest keys; among such plans, its degrees differ least. A degree of 1 in `plan` stays 1, except
    `dp` and, if the state exceeds the memory, `fsdp`. The plan needs no more ranks than `plan`, and no more than there
    are devices. If no split is left, `dp` is the number of ranks of `plan`, if that passes every check.
    Equal arguments give equal results.

    Args:
        world: the number of ranks that were started already; the plan then needs exactly these.
        further: checks that run after all others, such as those that divide the model.

    Returns:
        None if none was found; `plan` itself if it works.

    Raises:
        JobError: a plan divides the model, and that cannot be built.
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
    out_of_memory = MEMORY in failed
    varied = [key for key in DEGREES if key == "dp" or getattr(plan, key) > 1 or (key == "fsdp" and out_of_memory)]
    values = {key: _values(asked, key, ranks) for key in varied}
    exact = world is not None
    for changes in range(1, _MOST_CHANGES + 1):
        for in_degrees in range(min(changes, len(varied)) + 1):
            for context in _with_other_degrees(asked, values, in_degrees, ranks, exact):
                if (found := _others_repaired(context, changes - in_degrees, checks)) is not None:
                    return found
    # far off: change as many other keys as needed, with the first value of each that helps
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
    """Values for exactly `changes` of the degrees, nearest first.

    Together they need at most (or exactly) `ranks` ranks.
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
    """Combinations of one value per list, with a product of at most `most`."""
    if not choices:
        yield ()
        return
    for value in takewhile(lambda value: value <= most, choices[0]):
        yield from ((value, *others) for others in _within(most // value, choices[1:]))


def _values(context: PlanContext, key: str, most: int) -> list[int]:
    """Other values of a degree that pass its own checks, ascending.

    Candidates are small values, powers of 2, divisors, and those that the job suggests.
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
    """The plan with exactly `changes` other keys changed to pass the checks, or None.

    With `changes=None` any number may change.
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
    """Other values of a key that is not a degree, nearest first."""
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
    """Cut names replaced by the most similar known ones, in the model's order."""
    known = context.model_info.modules
    meant = {cut if cut in known else closest(cut, known) for cut in context.plan.cut.split(",")}
    return ",".join(sorted((cut for cut in meant if cut), key=known.index))


# Further cores become threads of ranks: communication grows with the ranks, and cores of one host share memory.
_MOST_CPU_RANKS = 8


def auto_plan(job: Job, cluster: Cluster) -> Plan:
    """Default plan: one rank per GPU, or on CPUs one per core up to 8.

    Remaining cores become threads of the ranks. Measuring begins with this plan. There are never more replicas than
    devices or samples in the global batch, and exactly as many as the job's partition has weights.

    Raises:
        PlanError: the weights ask for more replicas than there are devices or samples.
    """
    most = cluster.devices if cluster.has_accelerators else min(cluster.devices, _MOST_CPU_RANKS)
    weights = job.partition.weights
    plan = Plan(dp=min(most, job.global_batch) if weights is None else len(weights))
    reasons = check_plan(plan, job, cluster)
    if plan.ranks > cluster.devices and not cluster.has_accelerators:
        reasons.append(
            f"the job's partition has {plan.ranks} weights, one for each rank, and {cluster.name} has "
            f"{cluster.devices} devices. "
            f'Ask for --plan "{plan}" to have ranks share cores, or give the job at most {cluster.devices} weights.'
        )
    if reasons:
        raise PlanError("\n".join(reasons))
    return plan
