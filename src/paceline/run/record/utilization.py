"""Model FLOPs utilization (MFU) of a run, from FLOPs and peaks that its start events record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.named import known
from paceline.job.job import Job, base_precision
from paceline.planning.cost.compute import peak_flops
from paceline.planning.model.model_info import trace
from paceline.planning.plan import Plan
from paceline.run.record.run import Speed

FLOPS, PEAK = "flops", "peak_flops"  # fields of the event `start`; PEAK also of `resume`


def flops_of(job: Job) -> dict[str, float] | None:
    """Return the FLOPs of one sample in a training step.

    The result is None if the model cannot be traced. The model is built and traced without memory, which takes some
    seconds.

    Returns:
        `weights` and `activations` as in `ModelTrace.training_flops`, for a sample of `tokens` tokens.
    """
    found = None
    # the model is the user's code, and a run does not depend on its MFU
    with suppress(Exception):
        found = trace(job, job.precision)
    # a pair of answers has two sequences, and its reference another pass
    if found is None or found.estimated or job.loss.has_reference:
        return None
    weights, activations = found.training_flops
    return {"weights": weights, "activations": activations, "tokens": float(found.tokens)}


def peak_of(job: Job, plan: Plan, cluster: Cluster) -> float | None:
    """Return the peak FLOP/s of all devices of a plan; None if it is unknown.

    It is unknown for CPUs and for devices that are not in the catalogue. For `fp8`, the result is the peak of bf16, as
    in predictions.
    """
    ranks = zip(cluster.hosts, cluster.ranks_per_host(plan.ranks), strict=True)
    names = [gpu.name for host, count in ranks for gpu in host.gpus[:count]]
    devices = [device for name in names if (device := known(name)) is not None]
    if len(devices) < plan.ranks:
        return None
    return sum(peak_flops(device, base_precision(plan.precision_for(job))) for device in devices)


def utilization(events: Sequence[Mapping[str, Any]], speed: Speed | None) -> float | None:
    """Return the MFU of a run (Chowdhery et al., 2022, arXiv:2204.02311); None if it is unknown.

    Positions without a token do not count. The products of activations of a sample grow with the square of its tokens,
    and the mean of squares is at least the square of the mean, so the result is never too large.
    """
    begun = [event for event in events if event.get("event") in ("start", "resume")]
    of_sample = next((event.get(FLOPS) for event in reversed(begun) if event["event"] == "start"), None)
    peak = begun[-1].get(PEAK) if begun else None
    if not isinstance(of_sample, Mapping) or speed is None:
        return None
    values = [of_sample.get(name) for name in ("weights", "activations", "tokens")]
    weights, activations, tokens, peak = (float(v) if isinstance(v, int | float) else 0.0 for v in (*values, peak))
    if not (peak > 0 and tokens > 0):
        return None
    part = 1.0 if speed.filled is None else speed.filled / tokens
    return speed.throughput * (weights * part + activations * part**2) / peak
