"""Prediction of the cost of a plan on a cluster, without running the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job, base_precision
from paceline.planning.arguments import AnyCluster, AnyJob, AnyPlan, cluster_of, job_of, plan_of
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.cost.frameworks import PACELINE, PACELINE_COMPILED
from paceline.planning.cost.layout import Layout, Machines, Prediction
from paceline.planning.history import corrected
from paceline.planning.machines import Adjustment, adjusted, machines
from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.model_info import matrix_work, model_info, optimizer_bytes, state_tensors, trace
from paceline.planning.plan import DEGREES, Plan
from paceline.planning.sync_info import CompressSpec, SyncSpec
from paceline.units import count

if TYPE_CHECKING:
    from paceline.planning.machines import Basis


def estimate(
    job: AnyJob, plan: AnyPlan, *, cluster: AnyCluster | None = None, calibration: Basis | None = None
) -> Prediction:
    """Predict step time, memory, throughput and cost of a plan, without running it.

    Earlier measurements on this hardware correct the prediction. The notes of the prediction state the correction.

    Args:
        job: a `Job`, its YAML file, or the file's URL.
        plan: a `Plan` or its text. `auto` is refused, because it names no single plan; `paceline.plan` finds one.
        cluster: a `Cluster`, its file, or a name such as `64x8xH100-SXM, 400gbit`; None selects this machine.
        calibration: measurements of the machines, or the factors of measured runs (`paceline.calibrate_on`); None uses
            the catalogue's figures.

    Raises:
        JobError: the job cannot be read, or its model cannot be built.
        ClusterError: the cluster cannot be read, or a device is not in the catalogue and nothing was measured.
        PlanError: the text is not a plan.

    Example:
        >>> found = paceline.estimate("job.yaml", "tp=8", cluster="8xH100-SXM")
        >>> found.step_time_s, found.fits
    """
    job, cluster = job_of(job), cluster_of(cluster)
    plan = plan_of(plan, job)
    found = modelled(job, cluster, plan, calibration)
    if isinstance(calibration, Adjustment):
        return found
    return corrected(found, job, cluster, plan, calibrated=calibration is not None)


def modelled(job: Job, cluster: Cluster, plan: Plan, calibration: Basis | None = None) -> Prediction:
    """Predict the cost of a plan without corrections from the history of earlier runs.

    Raises the errors of `estimate`.
    """
    layout = layout_of(job, cluster, plan, calibration)
    return priced(predict_layout(layout), job, cluster, plan, layout)


def layout_of(job: Job, cluster: Cluster, plan: Plan, calibration: Basis | None = None) -> Layout:
    """Return a plan as numbers for the cost model.

    Raises the same errors as `estimate`.
    """
    return Layouts(job, machines(cluster, calibration)).of(plan, _threads(plan, cluster))


class Layouts:
    """Factory for the layouts of many plans of one job on the same machines.

    Parts that several layouts share are computed only once.
    """

    def __init__(self, job: Job, on: Machines) -> None:
        self.job, self.machines = job, on
        self._traces: dict[tuple[str, int], ModelTrace] = {}
        self.trace = self.trace_at(job.precision)
        info = model_info(job.model)
        self.state_tensors = state_tensors(job, info)
        self.matrices = matrix_work(job, info) if job.optimizer.name == "muon" else (0.0, 0.0)
        self.held_part, self.trained = info.held_part, sum(info.trained) / max(info.numel, 1)
        self._places = {name: i for i, name in enumerate(self.trace.names) if name}

    @cached_property
    def _is_linear(self) -> bool:
        """False for models with convolutions or experts, whose products stay in bf16."""
        return not any(gemm.read or gemm.experts for block in self.trace.blocks for gemm in block.gemms)

    def trace_at(self, precision: str, tp: int = 1) -> ModelTrace:
        """Return the trace in a precision, divided for `tp` ranks.

        With tp=1, the trace is divided for the smallest degree that works.
        """
        precision = base_precision(precision)
        if (precision, tp) not in self._traces:
            usual = self.trace_at(precision) if tp > 1 else None
            found = trace(self.job, precision, None if usual is None else tp)
            self._traces[precision, tp] = usual if usual is not None and usual == found else found
        return self._traces[precision, tp]

    def of(self, plan: Plan, threads: int = 1) -> Layout:
        """Return the layout of a plan.

        On CPUs, each rank has `threads` compute threads.
        """
        blocks = len(self.trace.blocks)
        if plan.stages > max(blocks, 1):
            apart = f"at most {count(blocks, 'block')} of the model can be predicted separately"
            raise PlanError(
                "plan.stages_do_not_fit",
                "plan {plan} makes {stages} stages, but {reason}",
                plan=plan,
                stages=plan.stages,
                reason=apart,
            )
        asked, sync = plan.precision_for(self.job), SyncSpec.parse(plan.sync)
        precision, number = base_precision(asked), plan.held_bytes(self.job)
        return Layout(
            trace=self.trace_at(precision, plan.tp),
            machines=self.machines,
            **{axis: getattr(plan, axis) for axis in DEGREES},
            zero=plan.zero,
            sequence=plan.sequence,
            samples=_fullest_share(self.job, plan) / plan.microbatches,
            microbatches=plan.microbatches,
            schedule=plan.schedule,
            chunks=plan.stages_per_rank,
            remat=plan.remat,
            precision=precision,  # type: ignore[arg-type]
            products="fp8" if asked == "fp8" and self._is_linear else "",
            parameter_bytes=number * self.held_part,
            gradient_bytes=number,
            optimizer_bytes=optimizer_bytes(self.job, self.state_tensors, number),
            matrix_flops=self.matrices[0],
            matrix_numbers=self.matrices[1],
            offload=plan.offload,
            offload_activations=plan.offload_activations and not self.machines.device.is_core,
            cut=_cut(plan, self.trace, self._places),
            sync_bytes=_sent_bytes(plan, self.trace, number),
            sync_every=sync.period,
            servers=sync.servers.parts if sync.servers else 0,
            served=sync.info.served,
            framework=PACELINE if plan.compile == "off" else PACELINE_COMPILED,
            threads=threads,
            transport=plan.transport,
            fused=plan.fuses(self.job, accelerators=not self.machines.device.is_core),
            loss_chunk=self.job.loss.chunk,
            reference=self.job.loss.has_reference,
            trained=self.trained,
        )


def priced(prediction: Prediction, job: Job, cluster: Cluster, plan: Plan, layout: Layout) -> Prediction:
    """Add the interval, the actual throughput and the cost of the run to a prediction.

    The throughput is lower than predicted if the global batch is not divided evenly. The cost is None if the cluster
    has no price or the job's stop rule sets no number of steps.
    """
    even = job.global_batch / (_fullest_share(job, plan) * plan.data_ranks)
    mfu = prediction.mfu and prediction.mfu * even
    prediction = adjusted(replace(prediction, throughput=prediction.throughput * even, mfu=mfu), layout)
    if cluster.price_per_hour is None or job.stop.steps is None:
        return prediction
    hours = prediction.step_time_s * job.stop.steps / 3600
    return replace(prediction, cost_per_run=hours * plan.ranks * cluster.price_per_hour)


def _fullest_share(job: Job, plan: Plan) -> int:
    """Return the largest number of samples that a data-parallel rank gets in a step."""
    return ceil(job.global_batch / plan.data_ranks)


def _threads(plan: Plan, cluster: Cluster) -> int:
    most = max(cluster.ranks_per_host(plan.ranks))
    return plan.threads_for(cluster.hosts[0], most)


def _cut(plan: Plan, of: ModelTrace, places: dict[str, int]) -> tuple[int, ...]:
    """Return the number of blocks of each virtual stage according to the plan's cuts.

    The result is () if the plan has no cuts, or if a cut is not the name of a block.
    """
    starts = [places.get(name) for name in plan.cut.split(",")] if plan.cut else []
    known = [start for start in starts if start is not None]
    if not starts or len(known) < len(starts):
        return ()
    edges = [0, *known, len(of.blocks)]
    return tuple(later - earlier for earlier, later in pairwise(edges))


def _sent_bytes(plan: Plan, of: ModelTrace, number: float) -> float:
    if plan.compress in ("none", "auto"):
        return number
    matrices = [(gemm.n, gemm.k, gemm.times) for block in of.blocks for gemm in block.gemms if not gemm.batch]
    return CompressSpec.parse(plan.compress).sent_bytes(number, matrices)
