"""Registry of rules: maps a plan's `sync=` and `compress=` to the rule."""

from __future__ import annotations

from typing import Any

from paceline.errors import PlanError
from paceline.plans.plan import Plan
from paceline.plans.sync_info import RULES, SyncSpec, others
from paceline.sync.allreduce import AllReduce
from paceline.sync.rule import Replica, SyncRule


def build_rule(plan: Plan) -> SyncRule:
    """The rule that a plan names, not yet attached to a replica. One of another package gets its settings as they are written.

    Raises:
        PlanError: another package's rule cannot be imported, or does not take its settings.
    """
    spec = SyncSpec.parse(plan.sync)
    if spec.name not in RULES:
        return _of_another_package(spec)
    arguments = dict(spec.arguments)
    first = arguments.pop("")
    if spec.name == "allreduce":
        return AllReduce(first, compress=plan.compress)
    if spec.name == "local":
        from paceline.sync.local import LocalSGD

        return LocalSGD(first)
    from paceline.sync.diloco import DiLoCo

    return DiLoCo(first, **arguments, compress=plan.compress)


def attach(rule: SyncRule, replica: Replica, plan: Plan) -> None:
    """Hand a replica to the rule of its plan. Every call of another package's rule is compared over the ranks before it starts.

    Raises:
        SyncError: the replicas hold different parameters.
    """
    if SyncSpec.parse(plan.sync).name not in RULES:
        replica.dp, replica.inner, replica.world = (group.checked() for group in (replica.dp, replica.inner, replica.world))
    rule.attach(replica)


def _of_another_package(spec: SyncSpec) -> SyncRule:
    entry = others()[spec.name]
    arguments = dict(spec.arguments)
    given: list[Any] = [arguments.pop("")] if "" in arguments else []
    try:
        rule: SyncRule = entry.load()(*given, **arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise PlanError(f"sync={spec.name}: the rule {entry.value}, registered by a package, cannot be made: {error}") from error
    return rule
