"""What a plan will cost on a cluster, before anything is started: the job, the cluster and the plan laid out for the cost model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.plan.case import STAGES_PER_RANK, count
from paceline.plan.cost.estimate import estimate
from paceline.plan.cost.layout import BYTES, Layout, Machines, Stack
from paceline.plan.cost.prediction import Prediction
from paceline.plan.history import corrected
from paceline.plan.machines import machines
from paceline.plan.plan import Plan
from paceline.plan.state import moments
from paceline.plan.sync import CompressSpec, SyncSpec
from paceline.plan.trace import Trace
from paceline.plan.tracing import trace

if TYPE_CHECKING:
    from paceline.plan.calibrate import Calibration

_SENT_BYTES = {"fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5, "1bit": 0.125}  # of a number; scales are less than a hundredth


def predict(job: Job, cluster: Cluster, plan: Plan | str, calibration: Calibration | None = None) -> Prediction:
    """The step time, memory, throughput and cost of a plan, without running it.

    What such predictions were wrong by on this hardware before, where that is known, corrects them; the notes say so.

    Args:
        calibration: what was measured on the machines; without, the catalogue's figures stand for them.

    Raises:
        JobError: the model cannot be built.
        ClusterError: a device is not in the catalogue, and nothing was measured.
        PlanError: the text is no plan.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    return corrected(modelled(job, cluster, plan, calibration), job, cluster, plan, calibrated=calibration is not None)


def modelled(job: Job, cluster: Cluster, plan: Plan, calibration: Calibration | None = None) -> Prediction:
    """What the cost model alone says, without what was learned from earlier runs. Raises as `predict` does."""
    return priced(estimate(layout_of(job, cluster, plan, calibration)), job, cluster, plan)


def layout_of(job: Job, cluster: Cluster, plan: Plan, calibration: Calibration | None = None) -> Layout:
    """The plan as numbers for the cost model. Raises as `predict` does."""
    return Layouts(job, machines(cluster, calibration)).of(plan, _threads(plan, cluster))


class Layouts:
    """Layouts of many plans of one job on the same machines: what they share is found out once."""

    def __init__(self, job: Job, on: Machines) -> None:
        self.job, self.machines = job, on
        self.trace = trace(job, job.precision)
        self._places = {name: i for i, name in enumerate(self.trace.names) if name}

    def of(self, plan: Plan, threads: int = 1) -> Layout:
        """The layout of a plan, whose ranks compute with so many threads each where they are on CPUs."""
        stages, blocks = plan.pp * STAGES_PER_RANK[plan.schedule] if plan.pp > 1 else 1, len(self.trace.blocks)
        if stages > max(blocks, 1):
            apart = f"no more than {count(blocks, 'block')} of the model can be predicted apart"
            raise PlanError(f"plan {plan} makes {stages} stages, and {apart}")
        precision = plan.precision_for(self.job)
        number = float(BYTES["fp64" if precision == "fp64" else "fp32"])  # bf16 is autocast's: parameters, gradients and moments stay fp32
        return Layout(
            trace=self.trace if precision == self.job.precision else trace(self.job, precision),
            machines=self.machines,
            **{axis: getattr(plan, axis) for axis in ("dp", "fsdp", "tp", "pp", "cp", "ep")},
            zero=plan.zero,
            sequence=plan.sequence,
            samples=_fullest_share(self.job, plan) / plan.microbatches,
            microbatches=plan.microbatches,
            schedule=plan.schedule,
            chunks=STAGES_PER_RANK[plan.schedule] if plan.pp > 1 else 1,
            remat=plan.remat,
            precision=precision,
            parameter_bytes=number,
            gradient_bytes=number,
            optimizer_bytes=number * moments(self.job),
            offload=plan.offload,
            cut=_cut(plan, self.trace, self._places),
            sync_bytes=_sent_bytes(plan, self.trace, number),
            sync_every=SyncSpec.parse(plan.sync).arguments.get("", 1) if _is_local(plan) else 1,
            stack=_STACK,
            threads=threads,
            transport=plan.transport,
            fused=plan.fused,
        )


_STACK = Stack(derating=1.09)  # as torch's FSDP in the published measurements: none of ours is from a GPU


def priced(prediction: Prediction, job: Job, cluster: Cluster, plan: Plan) -> Prediction:
    """With the samples that the step really has, where they do not deal evenly, and the cost of the whole run.

    The cost is None where the cluster has no price or the job's stop rule does not name steps.
    """
    even = job.global_batch / (_fullest_share(job, plan) * plan.readers)
    mfu = prediction.mfu and prediction.mfu * even
    prediction = replace(prediction, throughput=prediction.throughput * even, mfu=mfu)
    if cluster.price_per_hour is None or job.stop.steps is None:
        return prediction
    hours = prediction.step_time_s * job.stop.steps / 3600
    return replace(prediction, cost_per_run=hours * plan.ranks * cluster.price_per_hour)


def _fullest_share(job: Job, plan: Plan) -> int:
    """Samples of the reader that has the most; the others wait for it."""
    return ceil(job.global_batch / plan.readers)


def _threads(plan: Plan, cluster: Cluster) -> int:
    """Of each rank on the host that has the most."""
    most = max(cluster.ranks_per_host(plan.ranks))
    return plan.threads_for(cluster.hosts[0], most)


def _cut(plan: Plan, of: Trace, places: dict[str, int]) -> tuple[int, ...]:
    """How many blocks each virtual stage has, where the plan names where they begin and the trace knows all of these."""
    starts = [places.get(name) for name in plan.cut.split(",")] if plan.cut else []
    known = [start for start in starts if start is not None]
    if not starts or len(known) < len(starts):
        return ()
    edges = [0, *known, len(of.blocks)]
    return tuple(later - earlier for earlier, later in pairwise(edges))


def _is_local(plan: Plan) -> bool:
    return not SyncSpec.parse(plan.sync).agrees_every_step


def _sent_bytes(plan: Plan, of: Trace, number: float) -> float:
    """Of each gradient, on its way between replicas. Top-k sends indices too, PowerSGD two thin factors for each matrix."""
    if plan.compress in ("none", "auto"):
        return number
    (name, value), *second = CompressSpec.parse(plan.compress).codecs
    kept = _SENT_BYTES[second[0][0]] if second else number
    if name == "topk":
        return (value or 0.01) * (kept + 4)
    if name == "powersgd":
        gemms = [gemm for block in of.blocks for gemm in block.gemms if not gemm.batch]
        whole = sum(gemm.n * gemm.k * gemm.times for gemm in gemms)
        thin = sum((value or 4) * (gemm.n + gemm.k) * gemm.times for gemm in gemms)
        return kept * min(1.0, thin / whole) if whole else number
    return _SENT_BYTES[name]
