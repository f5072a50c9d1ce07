"""Registry of rules: maps a plan's `sync=` and `compress=` to the rule."""

from __future__ import annotations

from dataclasses import replace

from paceline.comm.checked import CheckedGroup
from paceline.errors import JobError, PlanError
from paceline.job.read.imports import load_object
from paceline.plans.plan import Plan
from paceline.plans.sync_info import RULES, SyncSpec
from paceline.sync.rule import Replica, SyncRule


def build_rule(plan: Plan) -> SyncRule:
    """The rule that a plan names, not yet attached to a replica.

    Raises:
        PlanError: another package's rule cannot be imported, or does not take its arguments.
    """
    spec = SyncSpec.parse(plan.sync)
    info, arguments = spec.info, dict(spec.arguments)
    first = [arguments.pop("")] if "" in arguments else []
    if info.compresses:
        arguments["compress"] = plan.compress
    try:
        rule: SyncRule = load_object(info.rule)(*first, **arguments)
    except (JobError, TypeError, ValueError) as error:
        raise PlanError(f"sync={spec.name}: the rule {info.rule} cannot be made: {error}") from error
    return rule


def attach(rule: SyncRule, replica: Replica, plan: Plan) -> None:
    """Hand a replica to the rule of its plan.

    Every call of another package's rule is compared over the ranks before it starts.

    Raises:
        SyncError: the replicas hold different parameters.
    """
    if SyncSpec.parse(plan.sync).name not in RULES.built_in:
        dp, inner, world = (CheckedGroup.of(group) for group in (replica.dp, replica.inner, replica.world))
        replica = replace(replica, dp=dp, inner=inner, world=world)
    rule.attach(replica)
