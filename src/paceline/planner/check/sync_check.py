"""Checks of how the replicas of a plan agree: the rule, its settings, and compression."""

from __future__ import annotations

from paceline.planner.check.plan_context import Check, PlanContext
from paceline.plans.sync_info import RULES, SyncSpec, sync_info


def _nothing_to_compress(context: PlanContext) -> str | None:
    """Reason against compression with a rule that cannot use it, or None.

    Local SGD averages the parameters themselves; other rules send as they do.
    """
    plan, spec = context.plan, SyncSpec.parse(context.plan.sync)
    if plan.compress == "none" or spec.info.compresses:
        return None
    what = "averages parameters, whose every bit counts" if spec.info.sends == "parameters" else "sends by itself"
    others = " or ".join(name for name, info in RULES.built_in.items() if info.compresses)
    return f"plan {plan} compresses what is sent, but sync={spec.name} {what}: compress=none, or sync={others}."


def _nothing_to_try(context: PlanContext) -> str | None:
    plan = context.plan
    info = sync_info(plan.sync)
    if plan.compress != "auto" or (info.compresses and not info.local_steps):
        return None
    return (
        f"plan {plan} tries compressions out against sums of every step, which sync={plan.sync} does not take: "
        "compress=int8."
    )


def _too_wide_to_compress(context: PlanContext) -> str | None:
    plan = context.plan
    if plan.compress == "none" or plan.precision_for(context.job) != "fp64":
        return None
    return f"plan {plan} compresses gradients, but in fp64, which is asked for where every digit counts: compress=none."


def _cannot_go_back(context: PlanContext) -> str | None:
    plan = context.plan
    if context.job.nonfinite != "rewind" or not sync_info(plan.sync).local_steps:
        return None
    return (
        f"plan {plan} lets replicas train independently, and the job rewinds all of them when a loss is not "
        "finite, of which the others do "
        "not know: nonfinite: skip in the job, or sync=allreduce."
    )


def _batch_over_all_replicas(context: PlanContext) -> str | None:
    plan, job = context.plan, context.job
    if plan.dp == 1 or not sync_info(plan.sync).local_steps:
        return None
    if job.loss.is_over_whole_batch:
        name = job.loss.name.rpartition(":")[2]
        why = f"the {name} loss compares the samples of all of them"
        return f"plan {plan} lets replicas train independently, and {why}: sync=allreduce."
    if job.batch_norm == "sync":
        why = "batch_norm: sync joins them in every layer"
        return f"plan {plan} lets replicas train independently, and {why}: batch_norm: local, or sync=allreduce."
    return None


SYNC_CHECKS: tuple[Check, ...] = (
    Check(_nothing_to_compress, ("compress", "sync")),
    Check(_nothing_to_try, ("compress", "sync")),
    Check(_too_wide_to_compress, ("compress", "precision")),
    Check(_cannot_go_back, ("sync",)),
    Check(_batch_over_all_replicas, ("sync",)),
)
