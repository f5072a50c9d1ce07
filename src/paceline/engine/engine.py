"""The engine: one optimizer step of a plain model over all replicas.

paceline's training loop and users' own loops use the same engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.comm import Group
from paceline.comm.positions import name_layers_of
from paceline.data.deal import deal
from paceline.data.loader import Loader, Position
from paceline.engine.calls import made_ready
from paceline.engine.compute import Compute, LocalLoss, WholeModel
from paceline.engine.evaluation import Evaluation
from paceline.engine.guard import Guard, LossSpikes, Settings
from paceline.engine.meter import CHECKPOINT, COMM, COMPUTE, DATA, OPTIMIZER, Meter, Timing
from paceline.engine.reduction import (
    GradientReduction,
    LocalReduction,
    Reduced,
    ReductionAhead,
    StepSignals,
    UnreadStep,
    clip_elements,
)
from paceline.engine.reference import Reference
from paceline.engine.replica_state import ReplicaState
from paceline.errors import DataError, JobError, PlanError
from paceline.job.batch import Batch, rows
from paceline.job.loss import Loss, Metric
from paceline.job.loss_items import has_reference
from paceline.planning.plan import REPLICA, Plan
from paceline.planning.sync_info import sync_info
from paceline.split.layout import Part
from paceline.state.average import FirstWeights, WeightAverage
from paceline.sync import Replica, SyncRule, acts_after_step, attach, build_rule
from paceline.sync.batchnorm import unsynchronise
from paceline.sync.rows import LateNorm, numbers_of
from paceline.wire.status import Phase, StatusBoard, ends_generation

if TYPE_CHECKING:
    from paceline.split.apply import Split


@dataclass(slots=True)
class Outcome:
    """Numbers of a step that every rank uses for its update.

    Attributes:
        rescale: factor that turns the gradients into gradients of the mean loss; see `Reduced`.
        norm: L2 norm of the gradient, before clipping; None if nothing clips and the norm was not computed.
        updated: False if the update was skipped.
        last_losses: recent losses, with which `LossSpikes` compares the next loss.
        loss_scale: state of the loss scale after the step; None unless the precision is fp16.
    """

    loss: float
    rescale: float
    norm: float | None
    updated: bool
    last_losses: list[float]
    loss_scale: dict[str, Any] | None = None


@dataclass(slots=True, repr=False)
class StepResult:
    """Result of one step; only `timing` differs between ranks.

    With local rules, `grad_norm` and `problem` describe only this replica. If `reduced` is False, `loss` also describes
    only this replica.

    Attributes:
        step: number of optimizer steps so far, including this step.
        loss: mean loss over the global batch, before the update.
        samples: number of samples of the global batch.
        grad_norm: L2 norm of the whole gradient, before clipping. The norm of sparse gradients that are not clipped may
            be computed when it is first read; until then, the result keeps these gradients in memory.
        problem: reason for a skipped update (NaN or Inf in loss or gradient, or a spike); None if the update was made.
        votes: number of ranks that requested each action, such as a stop or a checkpoint.
        timing: this rank's times. On accelerators, these are the times of the previous step (None at the first step),
            unless the engine runs ahead.
        reduced: True if loss and votes cover all replicas.
    """

    step: int
    loss: float
    samples: int
    grad_norm: float
    problem: str | None
    votes: dict[str, int]
    timing: Timing | None
    reduced: bool = True

    def __repr__(self) -> str:
        """Return step, loss and gradient norm, and the problem if the update was skipped."""
        left_out = f", not updated: {self.problem}" if self.problem else ""
        norm = f"gradient norm {self.grad_norm:.4g}"
        return f"<StepResult {self.step}: loss {self.loss:.6g}, {norm}, {self.samples:,} samples{left_out}>"

    @property
    def is_spike(self) -> bool:
        """Return True if the update was skipped because of a spike in the loss."""
        return self.problem is not None and math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class LateResult(StepResult):
    """Result of a step with numbers that are read or computed at the first access.

    If the numbers are still on an accelerator, the first access waits for the device, like `loss.item()`.

    Args:
        numbers: function that returns the other numbers, and may wait for them.
        known: numbers that are already known.
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Callable[[], Mapping[str, Any]], **known: Any) -> None:
        self._numbers: Callable[[], Mapping[str, Any]] | None = numbers
        for name, number in known.items():
            setattr(self, name, number)

    def __getattr__(self, name: str) -> Any:
        # Python calls this method only for slots without a value and for unknown names
        if name not in LATE_NUMBERS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        assert self._numbers is not None, "the numbers were read before"
        numbers, self._numbers = self._numbers(), None
        for other, number in numbers.items():
            setattr(self, other, number)
        return getattr(self, name)

    def __reduce__(self) -> tuple[type[StepResult], tuple[Any, ...]]:
        # a copy has the numbers, not the function that reads them
        return StepResult, tuple(getattr(self, field.name) for field in fields(StepResult))


LATE_NUMBERS = {field.name for field in fields(StepResult)} - {"step", "samples"}


def step_result(norm: float | LateNorm, *, reduced: bool = True, **known: Any) -> StepResult:
    """Return the result of a step; a `LateNorm` is computed at the first access."""
    if isinstance(norm, LateNorm):
        return LateResult(lambda: {"grad_norm": float(norm)}, reduced=reduced, **known)
    return StepResult(grad_norm=norm, reduced=reduced, **known)


class RankEngine:
    """Training steps of one rank; `paceline.Engine` adds what users' own loops need.

    Attributes:
        model: the user's module itself, not a wrapper, on this rank's device. In a pipeline, this rank's stages.
        loader: this rank's share of every global batch; one iteration over the loader is one epoch. Ranks that compute
            parts of the same samples get the same share.
        compute: forward and backward passes of this rank, through the whole model or a part of it.
        split: how the model is divided over the ranks of a replica; None if each rank holds the whole model.
        reduction: reduction of gradients, loss and votes over all replicas.
        guard: check that stops or skips updates with NaN, Inf or loss spikes.
        rows: embedding tables with sparse gradients.
        average: moving average of the weights, which evaluations use; None if the job does not set `ema`.
        first: the weights before training, which are the reference of the loss; None if the loss has no reference.
        rule: the sync rule of the replicas.
        replica: the object through which the rule accesses this rank; its `traffic` counts the bytes that the rule has
            sent.
        messages: lines for the run's record, from the rule and from the comparison of replicas.
        about_weights: sentences for the run's record about the initial weights, such as a new head.
        local_steps: True if replicas may differ between synchronizations (local rules).
        updates: number of updates so far.
        runs_ahead: True if the host reads the loss and gradient norm of a step only after `begin` returns.
        device: device of the model.
        outcome: outcome of the newest step; not set if the engine runs ahead.
        sync_interrupted: True if the generation ended before replicas synchronized the parameters of the newest step
            (local rules). This replica then keeps the result of its own update.
        before_update: called with the step number before every optimizer step, because the checkpoint writer may still
            be copying weights; None without a writer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        loader: Loader,
        plan: Plan,
        group: Group,
        settings: Settings,
        split: Split | None = None,
        extra: Mapping[str, Tensor] | None = None,
        *,
        identical: bool = False,
    ) -> None:
        """Create the engine of one rank.

        Args:
            identical: True if the replicas already have the same parameters.
        """
        # parameters and buffers outside of the model that are trained with it
        self.extra = dict(extra or {})
        self.split, self.optimizer, self.loss, self.loader = split, optimizer, loss, loader
        self.group, self.settings, self.device = group, settings, group.device
        self.precision = plan.precision or settings.precision
        self.step_count = self._dealt = 0
        self.rows: set[Tensor] = set()
        self.before_update: Callable[[int], object] | None = None
        self.updates = 0
        self.outcome: Outcome | None = None
        self.sync_interrupted = False
        self.on_phase: Callable[[Phase, int], None] = StatusBoard.of_this_rank().mark
        self.meter = Meter(self.device)
        self.model = made_ready(self, model, plan)
        name_layers_of(self.model)
        self.compute = self._compute(plan)
        self.data_group = self.compute.data_group
        # An aborted reduction has undefined results, which must not reach an update.
        self.runs_ahead = group.interruption is None and settings.runs_ahead(plan, self.device)
        spikes = None if settings.spike.policy == "off" else LossSpikes(settings.spike)
        self.average = None if settings.ema is None else WeightAverage(optimizer, settings.ema)
        self.first = FirstWeights(optimizer) if has_reference(loss) else None
        self.copies: list[FirstWeights] = [copy for copy in (self.average, self.first) if copy is not None]
        if self.first is not None:
            self.compute.reference = Reference(self.compute, self._reference_weights)
        self.guard = Guard(
            settings.nonfinite, self.model, self.compute.loss_scale, group.rank, late=self.runs_ahead, spikes=spikes
        )
        self.evaluation = Evaluation(
            self.compute,
            statistics=settings.batch_norm != "sync",
            seed=settings.seed,
            on_phase=lambda phase: self.on_phase(phase, self.step_count),
            on_end=lambda: self.replica_state.max_norm.renormalize(),
            weights=self._measured_weights,
        )
        self.signals = StepSignals(group, pipelined=split is not None and split.pipeline is not None)
        self.base_digest: str | None = None  # of the frozen base of adapters, computed when first needed
        self.messages: list[str] = []
        self.about_weights: list[str] = []
        self.rule: SyncRule = build_rule(plan)
        with ExitStack() as undo:
            undo.callback(unsynchronise, self.model)
            undo.callback(self.rule.detach)
            self._attach(identical=identical)
            self.replica_state = ReplicaState(self)
            undo.pop_all()
        # From here on every data-parallel rank draws its own dropout masks.
        torch.manual_seed(settings.seed * 1_000_003 + 1 + self.data_group.rank)

    def step(self, batch: Batch | None) -> StepResult:
        """Run forward, backward, reduction and update on this replica's share of a global batch.

        Args:
            batch: a batch from `loader`: (inputs …, target) or a mapping with "labels"; None if this replica's share is
                empty.

        Raises:
            NonFiniteError: the loss or a gradient has NaN or Inf, and the policy is `stop`. No parameter was updated.
            SyncError: another rank failed or missed the deadline.
            DataError: the batch does not come from `loader`, has no target, or has a label out of range.
        """
        return self.settle(self.begin(batch))

    def begin(self, batch: Batch | None) -> StepResult | UnreadStep:
        """Begin a step; `settle` returns its result.

        If the engine runs ahead, this call only queues the step and its update, and does not read the loss or gradient
        norm. The gradient may have NaN or Inf, so call `settle` before you save or evaluate the weights.
        """
        step, position = self._prepare(batch)
        self.replica.backward.gradients = "collected"
        try:
            local = self.compute.forward_backward(batch, position, step)  # gradients and loss of this rank
        finally:
            self.replica.backward.gradients = "refused"
        self.meter.mark(COMPUTE)
        interruption = self.group.interruption
        if interruption is None:
            self.on_phase("sync", step)
        else:
            interruption.begin_phase_after_compute(partial(self.on_phase, "sync", step))
        if isinstance(self.reduction, ReductionAhead):
            return self._queue(self.reduction, step, batch, position, local)
        reduced = self.reduction.reduce(local, step)  # gradients and loss of all ranks
        if interruption is not None:
            interruption.end_phase()
        self.on_phase("optimizer", step)
        problem = self.guard.check(
            self.reduction.deciders, batch, self.loader.indices, step=step, loss=reduced.step_loss, norm=reduced.norm
        )
        if problem is None:  # neither NaN, nor Inf, nor a spike
            self._update(step, reduced.norm)
        if self.local_steps:
            self._synchronize_parameters(step)
        return self._end(step, position.total, reduced, problem)

    def settle(self, begun: StepResult | UnreadStep) -> StepResult:
        """Return the result of a step that `begin` started.

        On accelerators, the host waits for the device only in this call.

        Raises:
            NonFiniteError: as for `step`, but if the engine runs ahead, the weights are already updated.
        """
        if isinstance(begun, StepResult):
            return begun
        self.on_phase("sync", begun.step)
        result = self.numbers(begun)
        self.check_late(begun, result)
        return result

    def numbers(self, begun: UnreadStep) -> StepResult:
        """Wait for the numbers of a queued step, and return them without a check."""
        reduced, norm = begun.read()
        timing = self.meter.ended(begun.step, reduced.slowest_busy_s, begun.own_busy_s)
        return StepResult(begun.step, reduced.loss, begun.total, norm, None, reduced.votes, timing)

    def check_late(self, begun: UnreadStep, result: StepResult) -> None:
        """Check the numbers of a step whose update is already queued; every rank calls it.

        Raises:
            NonFiniteError: the loss or gradient has NaN or Inf.
        """
        loss, norm = result.loss, result.grad_norm
        self.guard.check(self.group, begun.batch, begun.samples, step=begun.step, loss=loss, norm=norm)

    def examines(self, step: int) -> bool:
        """Return True if a step compares replicas, or verifies a user's loss or model.

        A step with a comparison or verification waits for the device. Earlier steps are settled first, so that their
        problems are not reported as problems of this step.
        """
        if self.updates + 1 >= self.replica_state.due or self.compute.packed.examines(step):
            return True
        return self.compute.normalization.examines(step)

    def finish(self, outcome: Outcome, stage: Literal["summed", "mean"]) -> None:
        """Finish a step with the reduced gradients in `.grad`, without other ranks.

        Used by a rank whose step was interrupted after the gradients were summed.

        Args:
            outcome: outcome of the step on the ranks that completed it.
            stage: `summed` if the gradients are sums over all ranks, `mean` if they are already rescaled to the mean.
        """
        step = self.step_count + 1
        if outcome.updated:
            self.updates += 1
            self.reduction.take(numbers_of(self.named_parameters().values()))
            if stage == "summed":
                self.reduction.scale(outcome.rescale)
            if outcome.norm is not None:
                self._clip(outcome.norm)
            self._step_optimizer(step)
        if self.compute.loss_scale is not None and outcome.loss_scale is not None:
            self.compute.loss_scale.load_state_dict(outcome.loss_scale)
        self.step_count = step

    def deal(self, loader: DataLoader[Any]) -> Loader:
        """Distribute another `DataLoader` over the ranks, as `setup` does.

        Use this method for a second data set, a validation set, or a stream of samples from an actor.

        The returned loader yields this rank's share of each batch. The loader's `position` gives the number of samples
        in the share and in the global batch. Every rank must call this method, in the same order.
        """
        self._dealt += 1
        return deal(loader, self.data_group, self.group, self.settings.seed + 7919 * self._dealt)

    def evaluate(self, batches: Iterable[Batch | None], metrics: list[Metric]) -> dict[str, float]:
        """Compute metrics over the batches of all data-parallel ranks.

        The results are exact for any division of the samples over ranks. The model is in eval mode during the
        evaluation.

        Every rank must call this method. If a replica has several data-parallel ranks, each of them must pass the same
        number of batches, with None for a missing batch. With local rules, the replicas evaluate synchronized
        parameters. Batch-norm statistics are averaged over the data-parallel ranks.
        """
        found = self.evaluation.means(batches, metrics, self.rule)
        self.meter.restart()
        return found

    def close(self) -> None:
        """Release the model and remove paceline's hooks; a divided model stays divided."""
        with ExitStack() as held:  # closes all of them, even if one fails because ranks are gone
            held.callback(unsynchronise, self.model)
            held.callback(self.replica_state.close)
            if self.split is not None:
                held.callback(self.split.close)
            elif self.compute.float8 is not None:
                from paceline.split.float8 import restore

                held.callback(restore, self.model, self.compute.float8)
            held.callback(self.rule.detach)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.compute.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.compute.plan = plan

    @property
    def parts(self) -> dict[str, Part] | None:
        """Return this rank's shards of the parameters; None if this rank holds whole parameters."""
        return self.split.parts if self.split is not None else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model, however it is divided."""
        return self.split.parameter_count if self.split is not None else sum(p.numel() for p in self.model.parameters())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank's optimizer updates, by name in the undivided model."""
        extra = {name: p for name, p in self.extra.items() if isinstance(p, nn.Parameter)}
        return self.split.parameters if self.split is not None else {**dict(self.model.named_parameters()), **extra}

    def named_buffers(self) -> dict[str, Tensor]:
        """Return this rank's buffers, by name in the undivided model."""
        extra = {name: b for name, b in self.extra.items() if not isinstance(b, nn.Parameter)}
        return self.split.named_buffers() if self.split is not None else {**dict(self.model.named_buffers()), **extra}

    # One step

    def _prepare(self, batch: Batch | None) -> tuple[int, Position]:
        self._follow_changes()
        step = self.step_count + 1
        position = self._position(batch)
        self.meter.mark(DATA)
        self.on_phase("compute", step)
        normalization = self.compute.normalization
        if not normalization.prepared or normalization.items_per_sample is None:
            self.compute.prepare(batch)
        if self.compute.packed.pending:
            self.compute.packed.look(step)
        if self.replica_state.base.names:
            self.replica_state.base.remember()
        self.guard.remember()
        self._clear_gradients()
        return step, position

    def _queue(
        self, reduction: ReductionAhead, step: int, batch: Batch | None, position: Position, local: LocalLoss
    ) -> UnreadStep:
        """Queue the rest of a step without waiting for the device."""
        by_samples = self.compute.normalization.by_samples
        limits = {"clip_norm": self.settings.clip_norm, "clip_value": self.settings.clip_value}
        unread = reduction.queue(local, step, by_samples=by_samples, **limits)
        unread.step, unread.total, unread.batch, unread.samples = step, position.total, batch, self.loader.indices
        self.on_phase("optimizer", step)
        self._prepare_update(step)
        self._step_optimizer(step)
        self.step_count = step
        self.meter.mark(OPTIMIZER)
        self.meter.end(step)
        # queued after the end of the step, so that one wait serves both
        unread.send()
        return unread

    def _update(self, step: int, norm: float | LateNorm) -> None:
        self._prepare_update(step)
        self._clip(norm)
        self._step_optimizer(step)

    def _end(self, step: int, samples: int, reduced: Reduced, problem: str | None) -> StepResult:
        spikes = self.guard.spikes
        last_losses = [] if spikes is None else spikes.state_dict()
        scale = None if self.compute.loss_scale is None else self.compute.loss_scale.state_dict()
        norm = None if isinstance(reduced.norm, LateNorm) else reduced.norm
        self.outcome = Outcome(reduced.step_loss, reduced.rescale, norm, problem is None, last_losses, scale)
        self.reduction.stage = "own"
        self.step_count = step
        self.meter.mark(OPTIMIZER)
        timing = self.meter.finish(step)
        return step_result(
            reduced.norm,
            step=step,
            loss=reduced.loss,
            samples=samples,
            problem=problem,
            votes=reduced.votes,
            timing=timing,
            reduced=reduced.everywhere,
        )

    # Model setup

    def _compute(self, plan: Plan) -> Compute:
        if self.split is None:
            return WholeModel(self.model, self.loss, self.loader, plan, self.group, self.precision)
        # imports all of FSDP2 and the pipelines, which a plain run does not need
        from paceline.engine.split_model import SplitModel

        return SplitModel(self.split, self.loss, self.loader, plan, self.group, self.precision)

    def _attach(self, *, identical: bool = False) -> None:
        """Attach the model to the rule.

        Args:
            identical: True if the replicas already have the same parameters.
        """
        split, world, info = self.split, self.group, sync_info(self.plan.sync)
        inner = split.mesh.group(*REPLICA) if split is not None and info.needs_inner else Group(device=world.device)
        self.replica = Replica(
            self.model,
            dp=world if split is None else split.mesh.group("dp"),
            scalar_count=len(self.signals.tensor) if split is None else 0,
            parameters=None if split is None else list(split.parameters.values()),
            inner=inner,
            world=world,
            extra=list(self.extra.values()) if split is None else [],
            owner=self._owners() if split is None else {},
            rows=self.rows,
            identical=identical,
            log=self.messages.append,
        )
        attach(self.rule, self.replica, self.plan)
        self.replica.backward.gradients = "refused"
        self.compute.replica = self.replica
        self._parameters = list(dict.fromkeys([*self.model.parameters(), *self._held_by_optimizer()]))
        self._trained = self._signature()
        # a worker of parameter servers is alone in its group and has nothing to reduce
        self.local_steps = info.local_steps and not info.served
        acts = not self.local_steps and acts_after_step(self.rule)
        self._after_update = self.rule.after_step if acts else None
        kind: type[GradientReduction]
        kind = LocalReduction if self.local_steps else ReductionAhead if self.runs_ahead else GradientReduction
        clips = self.settings.clip_norm is not None or self.settings.clip_value is not None
        self.reduction = kind(
            self.rule, self.replica, self.signals, self.meter, world, split, self.compute.loss_scale, clips=clips
        )
        if self.first is not None and self.local_steps:
            raise PlanError(
                "plan.reference_of_local_steps",
                "plan {plan} lets replicas train independently, so their copies of the initial weights, which are the "
                "reference of the loss, could differ. Use sync=allreduce.",
                plan=self.plan,
            )
        if info.local_steps and (getattr(self.loss, "whole_batch", False) or self.settings.batch_norm == "sync"):
            raise PlanError(
                "plan.joint_batch_under_local_rule",
                "sync={sync} lets replicas train independently, but a loss over the whole batch, or batch_norm: "
                "sync, connects them in every step. Use sync=allreduce.",
                sync=self.plan.sync,
            )

    def _owners(self) -> dict[Tensor, int]:
        """Return the index of each parameter's optimizer; {} if there is only one."""
        return {}

    def _held_by_optimizer(self) -> list[nn.Parameter]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    def _signature(self) -> tuple[int, ...]:
        """Return a key that changes when the optimizer gains or loses a trainable parameter."""
        # written out for speed, because every step calls it
        return tuple([id(p) if p.requires_grad else 0 for g in self.optimizer.param_groups for p in g["params"]])

    def _follow_changes(self, *, forward_is_done: bool = False) -> None:
        """Attach the sync rule again if the set of trained parameters has changed.

        With local rules, the replicas' parameters are averaged first. If the forward pass is already done, local rules
        postpone the change until after the update.

        Raises:
            PlanError: the set has changed, but the plan divides the model into shards that were fixed at the start.
            JobError: the forward pass has already used new parameters that may differ between the ranks.
        """
        if self._signature() == self._trained:
            return
        if self.split is not None:
            raise PlanError(
                "plan.trainable_changed",
                "plan {plan} divides the parameters that were trainable at the start, but some were frozen, "
                "unfrozen or added to the optimizer later. Call paceline.setup again, or use dp={size}.",
                plan=self.plan,
                size=self.group.size,
            )
        known = {*self._parameters, *self.extra.values()}
        added = [p for p in self._held_by_optimizer() if p not in known]
        if added and forward_is_done and self.group.size > 1:
            raise JobError(
                "loop.parameters_added",
                "{count} parameters were added to the optimizer since setup, and the ranks may hold different values "
                "of them. Call engine.broadcast_new_parameters() after add_param_group, before the forward pass.",
                count=len(added),
            )
        if self.local_steps and forward_is_done:
            return
        for parameter in added:
            self.group.broadcast(parameter.detach())
        self.extra |= {
            f"added.{len(self.extra) + i}": p for i, p in enumerate(added) if p not in set(self.model.parameters())
        }
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # it may lie in memory that the rule frees
        if self.local_steps:
            self._average_replicas()
        self.rule.detach()
        self.rule = build_rule(self.plan)
        self.signals = StepSignals(self.group)
        self._attach(identical=True)

    def _average_replicas(self) -> None:
        """Set all parameters, trained earlier or newly added, to their mean over the replicas."""
        with self.rule.shared_parameters():
            together = [p.detach().clone() for p in self._parameters]
        # the rule does not know new parameters, and the optimizer may have stepped on them already
        for parameter, mean in zip(self._parameters, together, strict=True):
            if parameter.requires_grad and id(parameter) not in self._trained:
                self.group.all_reduce(mean)
                mean.div_(self.group.size)
        torch._foreach_copy_([p.data for p in self._parameters], together)

    @contextmanager
    def _gradients(self, go: Literal["collected", "kept"]) -> Iterator[None]:
        """Return a context that sets where backward passes store gradients.

        Outside of the context, `loss.backward()` raises an error.
        """
        self.replica.backward.gradients = go
        try:
            yield
        finally:
            self.replica.backward.gradients = "refused"

    def _position(self, batch: Batch | None) -> Position:
        position = self.loader.position
        if position is None or rows(batch) != position.local:
            raise DataError(
                "loop.other_batch",
                "step needs the batches of engine.loader: the newest batch has {expected} samples on rank {rank}, "
                "but this batch has {rows}. You may transform a batch, but keep its samples, because losses are "
                "weighted by the number of samples on each replica.",
                expected=position.local if position else 0,
                rank=self.group.rank,
                rows=rows(batch),
            )
        if self.loader.left_out:
            self.loader.check_weight()
        return position

    def _clear_gradients(self) -> None:
        self.reduction.clear()
        for parameter in self._parameters:
            parameter.grad = None

    # Update

    def _clip(self, norm: float | LateNorm, most: float | None = None) -> None:
        """Clip gradients of norm `norm` to the norm `most`; without `most`, to the job's limits."""
        if most is None and self.settings.clip_value is not None:
            clip_elements(self.reduction.gradients, self.settings.clip_value)
        most = self.settings.clip_norm if most is None else most
        if most is not None and self.reduction.gradients and float(norm) > most:
            torch._foreach_mul_(self.reduction.gradients, most / (float(norm) + 1e-6))

    def _step_optimizer(self, step: int) -> None:
        for copy in self.copies:
            copy.before_update()
        try:
            self.rule.step_optimizer(self.optimizer)
        except BaseException:
            self.updates -= 1  # another rank was lost in an exchange of the optimizer, before any weight changed
            raise
        if self._after_update is not None:
            self._after_update(step)
        for copy in self.copies:
            copy.after_update()
        if self.compute.loss_scale is not None:
            self.compute.loss_scale.grow()

    @contextmanager
    def _measured_weights(self) -> Iterator[None]:
        """Return a context in which the model has the weights to evaluate."""
        if self.average is None:
            yield
            return
        if self.before_update is not None:
            self.before_update(self.step_count)  # a checkpoint may still be copying the weights
        with self.average.in_place():
            yield

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Return a context in which the model has the weights before training."""
        assert self.first is not None
        if self.before_update is not None:
            self.before_update(self.step_count)  # a checkpoint may still be copying the weights
        with self.first.in_place():
            yield

    def _prepare_update(self, step: int) -> None:
        """Compare replicas if due, and let a checkpoint copy parameters before the update."""
        update = self.updates + 1
        if update >= self.replica_state.due:
            self.replica_state.before_update(update)
        self.updates = update  # only after the comparison: a step interrupted there has made no update
        if self.before_update is not None:
            self.meter.mark(OPTIMIZER)
            self.before_update(step)
            self.meter.mark(CHECKPOINT)

    def _synchronize_parameters(self, step: int) -> None:
        """Let the local rule synchronize the parameters after a step.

        A replica that skipped its update also takes part, because the other replicas wait for it. If the generation
        ends during this call, this replica keeps its step, and the next synchronization includes it.
        """
        self.meter.mark(OPTIMIZER)
        self.on_phase("sync", step)
        try:
            self.rule.after_step(step)
        except Exception as error:
            if not ends_generation(error):
                raise
            self.sync_interrupted = True
        self.meter.mark(COMM)
