"""Dry run of a plan: one step of every pipeline stage, without memory or peers.

The dry run uses the same engine, and the same code to divide the model, as a run. Tensors are PyTorch's `FakeTensor`s,
which have only shapes. The process group is PyTorch's `fake` backend, which sends nothing. So one process can check a
plan for thousands of ranks.
"""

from __future__ import annotations

import inspect
import resource
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode, UnsupportedOperatorException
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Device, Host
from paceline.comm import Group
from paceline.data.loader import Loader
from paceline.engine.compute import LocalLoss
from paceline.engine.engine import RankEngine
from paceline.engine.guard import Settings
from paceline.engine.meter import Meter
from paceline.engine.reduction import Reduced, StepSignals
from paceline.engine.split_model import without_memory
from paceline.errors import BatchError, DataError, PacelineError, PlanError
from paceline.job.batch import Batch
from paceline.job.experts import by_expert
from paceline.job.job import Job
from paceline.job.parameters import names_of
from paceline.job.samples import DataSets
from paceline.job.streams import with_few
from paceline.own_random import kept_random
from paceline.planning.check.plan_errors import refuse
from paceline.planning.model.forward_pass import find_blocks, mixtures
from paceline.planning.model.record import OperationMode
from paceline.planning.model.recorder import tensors_in, without_logs
from paceline.planning.plan import AXES, Plan
from paceline.planning.sync_info import sync_info
from paceline.run.build import loader_of
from paceline.split.apply import Split
from paceline.split.deferred_init import DeferredModel, record
from paceline.split.expert import sent_to_experts
from paceline.split.layout import StateBytes, predicted_bytes
from paceline.split.mesh import Mesh
from paceline.split.quantized import refuse_cut_moments
from paceline.split.whole_updates import muon_matrices, share_updates

DEVICES_PER_HOST = 8
_BEYOND_ANY = 2**60  # memory of an imaginary device in bytes: large enough for any plan
_WITHOUT_VALUES = (DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError)


class StepFailed(PlanError):
    """Raised if a dry-run step fails with an error other than `PacelineError`.

    Either the divided model's code has an error, or the code cannot run on tensors without values.
    """


@dataclass(frozen=True)
class StageDryRun:
    """Result of a dry run for the ranks of one pipeline stage.

    Without a pipeline, there is one stage with all ranks.

    Attributes:
        stage: index of the stage, 0-based.
        rank: the rank whose step was dry-run.
        report: lines that describe how the model was divided.
        state: bytes of parameters, gradients and optimizer state.
        peak_bytes: peak bytes of state and activations in a step, without kernel workspaces.
        sent_bytes: bytes that each rank sends per step, by mesh axis; single numbers, such as the gradient norm, are
            not counted.
        asked: types of modules whose code read tensor values; the reads returned False or 1.
        stopped_by: reason why the step could not be completed; None if the step was completed.
    """

    stage: int
    rank: int
    report: list[str]
    state: StateBytes
    peak_bytes: int
    sent_bytes: dict[str, int]
    asked: list[str]
    stopped_by: str | None


@dataclass
class DryRun:
    """Result of a successful dry run.

    Attributes:
        plan: the requested plan.
        stages: one result per pipeline stage.
        notes: sentences about differences between the dry run and a real run.
        seconds, memory_bytes: duration of the dry run, and peak memory of this process.
    """

    plan: Plan
    stages: list[StageDryRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory_bytes: int = 0


def run_dry(job: Job, plan: Plan, say: Callable[[str], object] = str) -> DryRun:
    """Dry-run one step of a plan on `DEVICES_PER_HOST` imaginary devices per host.

    Args:
        say: function that is called with the name of each phase.

    Raises:
        PlanError: the plan cannot run; the message lists every reason.
        JobError, DataError: the job's model or data cannot be built.
    """
    started = time.monotonic()
    say("holding the plan against the job")
    cluster = _cluster_for(plan)
    refuse(job, plan, cluster)
    found = DryRun(plan)
    data = with_few(job.data.build(input_shape=job.model.input_shape(), seed=job.seed), job.global_batch)
    dry_plan = for_dry_run(job, plan, found.notes)
    job = with_data_at_hand(job)
    with kept_random():
        for stage in range(plan.pp):
            say(f"trying a step of stage {stage + 1} of {plan.pp}" if plan.pp > 1 else "trying a step")
            one = dry_run_stage(job, dry_plan, data, stage, accelerators=cluster.has_accelerators)
            found.stages.append(one)
    found.seconds = time.monotonic() - started
    found.memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB
    return found


def _cluster_for(plan: Plan) -> Cluster:
    """Return a cluster with one device per rank of the plan.

    The devices are CPUs if the plan names a transport, and GPUs otherwise.
    """
    gpus = tuple(Device(index=i, name="device", memory_bytes=_BEYOND_ANY) for i in range(DEVICES_PER_HOST))
    hosts: list[Host] = []
    for first in range(0, plan.ranks, DEVICES_PER_HOST):
        here = min(plan.ranks - first, DEVICES_PER_HOST)
        has = gpus[:here] if plan.transport == "auto" else ()
        hosts.append(Host(name=f"host {len(hosts)}", cores=DEVICES_PER_HOST, memory_bytes=_BEYOND_ANY, gpus=has))
    return Cluster(name=f"a cluster of {plan.ranks} devices", hosts=tuple(hosts))


def for_dry_run(job: Job, plan: Plan, notes: list[str]) -> Plan:
    """Set pipeline cuts in the plan, and remove what a dry run cannot do.

    Args:
        notes: list to which a note on each removal is added.
    """
    if plan.compile != "off":
        notes.append(f"compile={plan.compile} is left out of the dry run: blocks run as they are written")
    model = _recorded(job).model
    if any(mixtures(model)):
        notes.append(
            "tokens go to all experts in turn; where a router prefers some, their ranks take more memory and time"
        )
    if job.partition.host_files:
        notes.append("partition.host_files is left out of the dry run: what files the hosts hold is not known here")
    if plan.pp > 1 and not plan.cut:
        blocks, stages = find_blocks(model), plan.stages
        if len(blocks) >= stages:
            notes.append("stages are cut evenly by the number of blocks; a run measures the blocks and cuts by that")
            cut = ",".join(blocks[round(len(blocks) * i / stages)] for i in range(1, stages))
            plan = replace(plan, cut=cut)
    return replace(plan, compile="off", threads=0)


def with_data_at_hand(job: Job) -> Job:
    """Return the job without host-specific files and loader processes."""
    partition, data = (
        job.partition.model_copy(update={"host_files": False}),
        job.data.model_copy(update={"num_workers": 0}),
    )
    return job.model_copy(update={"partition": partition, "data": data})


def dry_run_stage(job: Job, plan: Plan, data: DataSets, stage: int, *, accelerators: bool = False) -> StageDryRun:
    """Dry-run the first rank of a pipeline stage, under a plan from `for_dry_run`.

    Args:
        accelerators: whether the optimizer's step is that of a run on accelerators.

    Raises:
        PlanError: the plan cannot divide the model.
        StepFailed: the step fails.
    """
    rank = stage * (plan.ranks // plan.dp // plan.pp)
    with _as_rank(rank, plan.ranks) as world:
        mesh = Mesh.of(plan, world)
        loader = loader_of(job, mesh, data)
        batch = _first(loader)
        recorded = _recorded(job)
        names = names_of(recorded.model)
        loss, settings = (
            job.loss.build(),
            Settings(job.clip_norm, job.nonfinite, job.batch_norm, job.precision, job.seed, job.buffers, ema=job.ema),
        )
        experts = {name for name, _ in mixtures(recorded.model)}
        split = _only_plan_errors(lambda: without_memory(recorded, plan, mesh, loader, loss, settings), plan, batch)
        watch = MemoryWatch()
        with without_logs(), FakeTensorMode(allow_non_fake_inputs=True), watch, watch.resizing():
            split.allocate(DeferredModel(recorded.model, None, _nothing))
            route_evenly(_own(experts, split.modules), mesh.group("ep"), watch)
            refuse_cut_moments(job.optimizer, split.parts, split.parameters, plan)
            fused = plan.fuses(job, accelerators=accelerators)
            optimizer = job.optimizer.build(split.parameters, names=names, fused=fused)
            equal = not sync_info(plan.sync).local_steps
            share_updates(optimizer, mesh, split.parameters, split.parts, identical_replicas=equal)
            engine = RankEngine(split.model, optimizer, loss, loader, plan, world, settings, split)
            engine.reduction.signals = _DryRunSignals(world)
            watch.begin()
            problem = _stepped(engine, batch, split.modules)
            sent = _by_axis(watch.sent_bytes, mesh)
            matrices = muon_matrices(optimizer)
            state = predicted_bytes(split.parts, split.parameters, job.optimizer, matrices, copies=job.weight_copies)
            engine.close()
    return StageDryRun(
        stage, rank, [*split.report, *engine.messages], state, watch.peak_bytes, sent, sorted(watch.asked), problem
    )


def _only_plan_errors(divide: Callable[[], Split], plan: Plan, batch: Batch | None) -> Split:
    """Divide the model; turn errors of the division or the first batch into PlanErrors."""
    try:
        split = divide()
        if split.context is not None and batch is not None:
            split.context.shard(batch)
    except BatchError:
        raise  # the model fails under every plan
    except DataError as error:
        raise PlanError("plan.dry_run_refused", "plan {plan}: {error}", plan=plan, error=error) from error
    except PacelineError:
        raise
    except Exception as error:
        what = next(iter(str(error).splitlines()), "")
        raise PlanError(
            "plan.model_not_divisible",
            "plan {plan}: this model cannot be divided in this way: {kind}: {error}",
            plan=plan,
            kind=type(error).__name__,
            error=what,
        ) from error
    return split


def _recorded(job: Job) -> DeferredModel:
    """Build the job's model on the meta device.

    Experts of transformers models are computed one by one, because the faster code does not support meta tensors in
    fp32.
    """
    recorded = record(job.model.build)
    if hasattr(recorded.model, "set_experts_implementation") and any(mixtures(recorded.model)):
        recorded.model.set_experts_implementation("eager")  # type: ignore[operator]
    return recorded


@contextmanager
def _as_rank(rank: int, ranks: int) -> Iterator[Group]:
    """Yield a group in which this process is one of `ranks` ranks, without peers.

    Received data is uninitialized memory.
    """
    if ranks == 1:
        yield Group()
        return
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield Group(rank, ranks, dist.group.WORLD, hosts=tuple(r // DEVICES_PER_HOST for r in range(ranks)))
    finally:
        dist.destroy_process_group()


def _first(loader: Loader) -> Batch | None:
    batches = iter(loader)
    batch: Batch | None = next(batches)
    batches.close()  # type: ignore[attr-defined]
    return batch


def _own(names: Container[str], modules: Sequence[nn.Module]) -> list[nn.Module]:
    named = [entry for root in modules for entry in root.named_modules()]
    return [module for name, module in named if name in names and any(True for _ in module.parameters())]


def _nothing(wanted: Callable[[str], bool], take: Any) -> None:
    """Weight source for `allocate` that does nothing, because fake tensors need no weights."""


class _DryRunSignals(StepSignals):
    """Step signals of a dry run: every rank reports a loss of 1.

    Real signals would have to be read from tensors, which have no values here.
    """

    def seal(self, meter: Meter, local: LocalLoss) -> float:
        return meter.busy_s()

    def own(self, local: LocalLoss) -> list[float | Tensor]:
        return [1.0, 1.0]

    def sums(self, local: LocalLoss) -> list[float | Tensor]:
        return self.own(local)

    def scaled(self, loss: float, items: float) -> Reduced:
        return self.read([loss, items])

    def read(self, sums: Sequence[float]) -> Reduced:
        return Reduced(loss=1.0, rescale=1.0, votes={}, slowest_busy_s=0.0)


def _stepped(engine: RankEngine, batch: Batch | None, modules: Sequence[nn.Module]) -> str | None:
    """Take a step; return a reason if it cannot finish because tensors have no values.

    Raises:
        StepFailed: the step fails for another reason.
    """
    try:
        engine.step(batch)
    except Exception as raised:
        # use the cause of a BatchError, because its traceback leads to the failing module
        error = raised.__cause__ if isinstance(raised, BatchError) and raised.__cause__ is not None else raised
        if isinstance(error, PacelineError):
            raise
        what = next(iter(str(error).splitlines()), "")
        where = _place_of(error.__traceback__, modules, engine)
        if isinstance(error, _WITHOUT_VALUES):
            return f"{where} needs the values of tensors, not only their shapes ({type(error).__name__}: {what})"
        raise StepFailed(
            "plan.step_failed",
            "a step of rank {rank} fails in {where}: {kind}: {error}",
            rank=engine.group.rank,
            where=where,
            kind=type(error).__name__,
            error=what,
        ) from error
    return None


def _place_of(trace: TracebackType | None, modules: Sequence[nn.Module], engine: RankEngine) -> str:
    """Return the name of the innermost module in a traceback, or the sync rule."""
    names, found = {module: name for root in modules for name, module in root.named_modules()}, "the model"
    while trace is not None:
        asking = trace.tb_frame.f_locals.get("self")
        if isinstance(asking, nn.Module):
            found = names.get(asking) or found
        elif asking is engine.rule:
            found = f"sync={engine.plan.sync}"
        trace = trace.tb_next
    return found


def _by_axis(sent: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
    groups = {axis: mesh.group(axis).backend for axis in AXES}
    return {
        axis: sent[group.group_name]
        for axis, group in groups.items()
        if group is not None and sent.get(group.group_name)
    }


def route_evenly(experts: Iterable[Any], ep: Group, watch: TorchDispatchMode) -> None:
    """Assign tokens to `experts` in turn, instead of by the router.

    Expert indices are real tensors, because the module's code reads their values. They are computed outside of the
    fake-tensor mode, but within `watch`.
    """
    for module in experts:
        if ep.size > 1:
            own, signature, total, _ = module.forward.args  # the form that `divide_experts` creates
        else:
            own, signature, total = module.forward, inspect.signature(module.forward), module.num_experts
        module.__dict__["forward"] = partial(_in_turn, own, signature, total, ep, watch)


def _in_turn(
    own: Any, signature: inspect.Signature, total: int, ep: Group, watch: TorchDispatchMode, *args: Any, **kwargs: Any
) -> Tensor:
    hidden, index, weights = signature.bind(*args, **kwargs).args
    with _disable_current_modes(), watch:
        even = (torch.arange(index.numel()) % total).view(index.shape)
        if ep.size == 1:
            made: Tensor = own(hidden, even, weights)
            return made
        order, counts = by_expert(even, total)
        of_experts = counts.view(ep.size, -1)
        return sent_to_experts(own, hidden, order, of_experts, of_experts[ep.rank].repeat(ep.size, 1), weights, ep)


# Bytes that a rank sends per input byte in a collective among n ranks: the lower bound for any algorithm (Patarasuk and
# Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
_SENT: tuple[tuple[str, Callable[[int], float]], ...] = (
    ("allreduce", lambda n: 2 * (n - 1) / n),
    ("allgather", lambda n: n - 1),
    ("reducescatter", lambda n: (n - 1) / n),
    ("alltoall", lambda n: (n - 1) / n),
    ("broadcast", lambda n: 1),
    ("send", lambda n: 1),
)
# c10d operations whose first argument is the result and whose second argument is the input
_PUTS_IN_SECOND = ("allgather", "reducescatter", "alltoall")


class MemoryWatch(OperationMode):
    """Dispatch mode, inside a `FakeTensorMode`, that counts live and sent bytes.

    Tensors have no values here, so code that reads a value gets False or 1.

    Attributes:
        live_bytes, peak_bytes: current and peak bytes of all tensors created in this mode.
        sent_bytes: bytes sent, by process group name.
        asked: types of modules whose code read tensor values.
    """

    def __init__(self) -> None:
        super().__init__(self._operation, self._answer)
        self.live_bytes = self.peak_bytes = 0
        self.sent_bytes: Counter[str] = Counter()
        self.asked: set[str] = set()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def begin(self) -> None:
        """Reset the peak and the bytes sent."""
        self.peak_bytes = self.live_bytes
        self.sent_bytes.clear()

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Within this context, count storages that are resized in place.

        The dispatcher does not see such a resize. FSDP2 frees gathered parameters by resizing.
        """
        resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._storages:
                self._note(storage)

        torch.UntypedStorage.resize_ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        elif func.namespace == "paceline":
            self._count_ring(func, args)
        for leaf in tensors_in(made):
            if leaf.device.type != "meta":
                self._note((leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage())

    def _answer(self, dtype: torch.dtype) -> bool | int | float:
        if (asking := _asking(sys._getframe(2))) is not None:
            self.asked.add(type(asking).__name__)
        return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count the bytes of a collective of torch, eager or functional.

        The position of the group among the arguments depends on the operation.
        """
        name = func.__name__.partition(".")[0].replace("_", "")
        for kind, factor in _SENT:
            if name.startswith(kind):
                second = func.namespace == "c10d" and kind in _PUTS_IN_SECOND
                group = next(found for a in reversed(args) if (found := _group(a)) is not None)
                size = sum(t.nbytes for t in tree_leaves(args[int(second)]))
                self.sent_bytes[group.group_name] += round(factor(group.size()) * size)

    def _count_ring(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count the bytes of a forward or backward pass of `split.ring`.

        Keys and values visit every other rank. Their gradients travel around the ring, back to their own rank.
        """
        backward = "backward" in func.__name__
        pair = args[2:4] if backward else args[1:3]
        group = next(found for a in args if (found := _group(a)) is not None)
        size = (group.size() - 1) * sum(t.nbytes for t in pair)
        if backward:
            size += group.size() * sum(t.numel() * max(4, t.element_size()) for t in pair)
        self.sent_bytes[group.group_name] += size

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            reference, before = self._storages[key]
        else:
            reference, before = weakref.ref(storage, lambda _: self._gone(key)), 0
        self._storages[key] = reference, size
        self.live_bytes += size - before
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)[1]


def _asking(frame: FrameType | None) -> nn.Module | None:
    """Return the module whose code runs in the innermost frame outside of torch, or None."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        if owner is not None and not frame.f_globals["__name__"].startswith("torch."):
            return None
        frame = frame.f_back
    return None


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, str):
        return dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[attr-defined, arg-type]
    if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
        return dist.ProcessGroup.unbox(argument)
    return None
