"""Least bytes of a model's state on a rank: parameters, gradients and optimizer state.

This is a lower bound, without activations and torch's own memory: if it exceeds the memory, no run can succeed. ZeRO:
Rajbhandari et al., 2020, arXiv:1910.02054.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.job.job import Job
from paceline.planning.check.plan_context import PlanContext
from paceline.units import size

if TYPE_CHECKING:
    from paceline.planning.model.model_info import ModelInfo, Sizes
    from paceline.planning.plan import Plan

_ADAMS = ("adam", "adamw", "lamb")  # two moments each


def state_bytes(plan: Plan, job: Job, model: ModelInfo) -> int:
    """Least bytes that a rank keeps on its compute device between and in steps."""
    whole, trained, largest_block = _held(plan, model)
    # bf16 is autocast's: the parameters stay fp32
    size = 8 if plan.precision_for(job) == "fp64" else 4
    if plan.offload:
        # one block at a time is on the device, with its gradients
        return int(size * 2 * largest_block)
    kept = whole if plan.zero < 3 or plan.pp > 1 else max(whole / plan.fsdp, largest_block)
    # torch's pipelines gather and reduce once a step
    gradients = trained if plan.zero == 1 or plan.pp > 1 else trained / plan.fsdp
    return int(size * (kept + gradients + moments(job) * trained / plan.fsdp))


def offloaded_bytes(plan: Plan, job: Job, model: ModelInfo) -> int:
    """Bytes that a rank of a plan with offload keeps in host memory."""
    whole, trained, _ = _held(plan, model)
    size = 8 if plan.precision_for(job) == "fp64" else 4
    return int(size * (whole + trained + moments(job) * trained) / plan.fsdp)


def memory_shortage(context: PlanContext) -> str | None:
    """Shortage of memory as text, such as `30 GiB on a GPU that has 16 GiB`; None if the state fits."""
    plan, job, cluster = context.plan, context.job, context.cluster
    on_device = state_bytes(plan, job, context.model_info)
    in_host = offloaded_bytes(plan, job, context.model_info) if plan.offload else 0
    if not cluster.has_accelerators:
        in_host = max(on_device, in_host)
    elif on_device > (memory := min(gpu.memory_bytes for host in cluster.hosts for gpu in host.gpus)):
        return f"{size(on_device)} on a GPU that has {size(memory)}"
    # ranks that were started elsewhere are on unknown hosts
    if not in_host or context.world is not None:
        return None
    for host, ranks in zip(cluster.hosts, context.ranks_per_host, strict=True):
        if ranks * in_host > host.memory_bytes:
            return f"{size(ranks * in_host)} in the memory of a host that has {size(host.memory_bytes)}"
    return None


def _held(plan: Plan, model: ModelInfo) -> tuple[float, float, float]:
    """Numbers of all parameters, trained ones and the largest block's on a rank before fsdp.

    Each rank is assumed to have an equal part.
    """
    whole, trained = (_part(plan, sizes) / plan.pp for sizes in (model.total, model.trained))
    return whole, trained, max((_part(plan, sizes) for sizes in model.kinds_of_blocks), default=0.0)


def _part(plan: Plan, sizes: Sizes) -> float:
    return sizes.vectors + sizes.matrices / plan.tp + sizes.experts / plan.tp / plan.ep


def moments(job: Job) -> int:
    """Number of optimizer values per parameter."""
    return 2 if job.optimizer.name in _ADAMS else int(job.optimizer.name == "lars" or job.optimizer.momentum > 0)
