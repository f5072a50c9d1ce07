"""Legal plans: every plan that can run a job on a cluster.

`paceline check --all` tries them, and the planner chooses from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.planning.axes import DEGREES, REMATS, SCHEDULES
from paceline.planning.check.plan_context import PlanContext
from paceline.planning.check.rules import CHECKS, MEANT_FOR, reasons_of
from paceline.planning.limits import microbatches_fit
from paceline.planning.plan import Plan

VARIED = (*DEGREES, "zero", "sequence", "schedule")
_VALUES = {"zero": (3, 2, 1), "sequence": (False, True), "schedule": SCHEDULES}


def legal_plans(
    job: Job, cluster: Cluster, ranks: int | Iterable[int], *, keys: Sequence[str] = VARIED, base: Plan | None = None
) -> list[Plan]:
    """Every plan with `ranks` ranks that passes `check_plan`, small ones first.

    The order never changes. Variants that would compute the same are left out: `zero` varies with `fsdp` only, and not
    in a pipeline, which gathers and reduces once a step anyway; `sequence` varies with `tp`, `schedule` with `pp`. With
    a pipeline, each schedule gets the fewest microbatches, not fewer than `base` has, that keep every stage busy once.

    Args:
        ranks: the number of ranks, or several such numbers, as `range(1, 5)` for up to four.
        keys: the keys that vary: degrees, `zero`, `sequence`, `schedule`, `remat`. The others stay as in `base`.
        base: `Plan()` by default.

    Raises:
        ValueError: a key that does not vary here.
        JobError: the model cannot be built.
    """
    if unknown := set(keys) - {*VARIED, "remat"}:
        raise ValueError(
            f"keys: {', '.join(sorted(unknown))} do not vary in the space of plans; there are "
            f"{', '.join(VARIED)}, remat"
        )
    base = base or Plan()
    wanted = sorted({ranks} if isinstance(ranks, int) else set(ranks))
    context = PlanContext(base, job, cluster)
    fitting = _fitting_degrees(context, max(wanted, default=1), keys)
    found = []
    for total in wanted:
        for degrees in _factors(total, [(key, fitting[key]) for key in DEGREES]):
            plans = _variants(replace(base, **degrees), job, keys)
            found += [plan for plan in plans if not reasons_of(replace(context, plan=plan))]
    return list(dict.fromkeys(found))


def _fitting_degrees(context: PlanContext, most: int, keys: Sequence[str]) -> dict[str, list[int]]:
    """Values of each degree that pass the checks of that degree alone."""
    fitting = {}
    for key in DEGREES:
        own = [check for check in CHECKS if check.keys == (key,)]
        values = range(1, most + 1) if key in keys else (getattr(context.plan, key),)
        if key == "cp" and key in keys and most > 1 and not context.model_info.takes_parts_of_sequences:
            # it may run, but not as the cost model predicts
            values = (1,)
        contexts = [
            (value, replace(context, plan=replace(context.plan, **dict[str, Any]({key: value})))) for value in values
        ]
        fitting[key] = [
            value for value, changed in contexts if value == 1 or not any(check.reason(changed) for check in own)
        ]
    return fitting


def _factors(total: int, degrees: list[tuple[str, list[int]]]) -> Iterator[dict[str, Any]]:
    """Factorisations of `total` with one value for each degree. Large values of the first degrees come first."""
    (key, values), rest = degrees[0], degrees[1:]
    for value in reversed(values):
        if total % value == 0:
            if rest:
                yield from ({key: value} | others for others in _factors(total // value, rest))
            elif value == total:
                yield {key: value}


def _variants(plan: Plan, job: Job, keys: Sequence[str]) -> Iterator[Plan]:
    """Variants of the plan: every value of the keys that are meaningful with its degrees."""
    values: dict[str, Sequence[Any]] = {"remat": REMATS if "remat" in keys else (plan.remat,)}
    for key, (degree, default) in MEANT_FOR.items():
        values[key] = (getattr(plan, key),) if getattr(plan, degree) > 1 else (default,)
        if key in _VALUES and key in keys and getattr(plan, degree) > 1 and (key, plan.pp > 1) != ("zero", True):
            values[key] = _VALUES[key]
    for combination in product(*values.values()):
        variant = replace(plan, **dict(zip(values, combination, strict=True)))
        if variant.schedule != "interleaved":
            variant = replace(variant, virtual=Plan.virtual)
        parts = _microbatches(variant, job) if plan.pp > 1 else plan.microbatches
        if parts is not None:
            yield replace(variant, microbatches=parts)


def _microbatches(plan: Plan, job: Job) -> int | None:
    """Fewest microbatches, at least one per stage, that the schedule can run.

    The smallest part of the batch has a sample for each. If all numbers are too small, the largest is taken; None if
    there is none.
    """
    share = job.global_batch // plan.data_ranks
    fitting = [
        n
        for n in range(1, min(share, 4 * plan.pp + plan.microbatches) + 1)
        if microbatches_fit(plan.schedule, plan.pp, n)
    ]
    enough = [n for n in fitting if n >= max(plan.pp, plan.microbatches)]
    return next(iter(enough or reversed(fitting)), None)
