"""The engine: one optimizer step of a plain model over all replicas, for paceline's own loop and for users' loops alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.comm import Group
from paceline.comm.gather import gather
from paceline.data.deal import deal
from paceline.data.loader import Loader, Position
from paceline.engine.agreement import Apart, Together
from paceline.engine.calls import call, prepared
from paceline.engine.loss_scale import LossScale
from paceline.engine.meter import CHECKPOINT, COMM, COMPUTE, DATA, OPTIMIZER, Meter, Timing
from paceline.engine.nonfinite import PATIENCE, Policy, explain, gave_up, stop
from paceline.engine.replica_state import ReplicaState
from paceline.engine.signals import Notes
from paceline.engine.status import Phase, StatusBoard
from paceline.engine.weighing import Weighing
from paceline.errors import DataError, JobError, PlanError
from paceline.job.batch import Batch, place, rows, split, target_of
from paceline.job.loss import Loss, Metric
from paceline.job.zoo.metrics import LossMetric
from paceline.job.zoo.models.moe import Router, add_counts, moe_counts, weigh_balance
from paceline.plans.plan import Compile, Plan
from paceline.plans.sync_info import SyncSpec
from paceline.split.compile_cache import keep_compiled_code_private
from paceline.split.mesh import DATA_AXES, REPLICA
from paceline.split.parts import Part
from paceline.sync import Replica, SyncRule, attach, build_rule
from paceline.sync.batchnorm import has_batch_norm, unsynchronise

if TYPE_CHECKING:
    from paceline.split.apply import Split

_AS_IT_IS = nullcontext()


@dataclass(slots=True)
class StepResult:
    """What one step did, the same on every rank but for `timing`.

    Where replicas train apart (local rules), `grad_norm` and `problem` are of this replica; so is `loss` in steps that are not `agreed`.

    Attributes:
        step: optimizer steps so far, this one included.
        loss: mean over the global batch, before the update.
        samples: the global batch.
        grad_norm: L2 norm of the whole gradient, before clipping.
        problem: why the update was left out (loss or gradient not finite); None when it was made.
        votes: how many ranks asked for a stop, for a checkpoint, … (see `Notes`).
        timing: this rank's times; on CUDA those of the step before, and None at the first.
        agreed: whether loss and votes are what all replicas know.
    """

    step: int
    loss: float
    samples: int
    grad_norm: float
    problem: str | None
    votes: dict[str, int]
    timing: Timing | None
    agreed: bool = True


@dataclass
class Settings:
    """What the engine does besides forward, backward and update; the defaults are those of `setup`."""

    clip_norm: float | None = None
    nonfinite: Policy = "stop"
    batch_norm: str = "local"
    precision: str = "fp32"
    seed: int = 0
    buffers: str = "same"


class Engine:
    """Runs the steps of one rank. Made by `paceline.setup`.

    Attributes:
        model: the user's module, on this rank's device. The same object, not a wrapper; in a pipeline, this rank's stages.
        loader: this data-parallel rank's share of every global batch, one epoch per iteration. A replica of several ranks has one or
            more data-parallel ranks; all its ranks that compute parts of the same samples have the same one.
        split: how the model is divided over the ranks of a replica; None where each holds all of it.
        rule: how the replicas agree.
        replica: what the rule sees of this rank; its `traffic` is what the rule has sent.
        apart: whether replicas differ between the steps in which they agree (local rules).
        device: where the model is.
        before_update: called before every optimizer step (the checkpoint writer copies weights until then).
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
    ) -> None:
        self.split, self.model = split, model
        self.extra = dict(extra or {})  # parameters and buffers outside of the model that are trained with it
        self.optimizer, self.loss, self.loader = optimizer, loss, loader
        self.weighing = Weighing(self)
        self.step_loss = loss  # what a step minimises; in another form where the logits of a step stay divided
        self.plan, self.group, self.settings = plan, group, settings
        self.data_group = split.mesh.group(*DATA_AXES) if split else group
        self.device = group.device
        self.step_count = 0
        self.before_update: Callable[[], object] = lambda: None
        self.on_phase: Callable[[Phase, int], None] = StatusBoard.of_this_rank().mark
        self.meter = Meter(self.device)
        self._configure()
        self.notes = Notes(group) if split is None else Notes(group, torch.float64)  # then they travel alone, and need not match anything
        self.rule: SyncRule = build_rule(plan)
        self.items_per_sample: float | None = None
        self._skipped_in_a_row = self._dealt = 0
        self._balances = any(isinstance(module, Router) for module in self.model.modules())
        self._attach()
        self.replica_state = ReplicaState(self)
        # From here on every data-parallel rank draws its own dropout masks.
        torch.manual_seed(settings.seed * 1_000_003 + 1 + self.data_group.rank)

    def step(self, batch: Batch | None) -> StepResult:
        """Forward, backward, agreement and update on this replica's share of a global batch.

        Args:
            batch: what `loader` yielded: (inputs …, target) or a mapping with "labels"; None where this replica's share is empty.

        Raises:
            NonFiniteError: NaN or Inf in the loss or the gradients, and the policy is to stop. Nothing was updated.
            SyncError: another rank is gone or did not come in time.
            DataError: the batch is not one of `loader`'s, has no target, or has a label out of range.
        """
        self._follow_changes()
        self.replica.step = step = self.step_count + 1
        position = self._position(batch)
        self.meter.mark(DATA)
        self.on_phase("compute", step)
        self.weighing.prepare()
        if self.items_per_sample is None:
            self.items_per_sample = self._agree_on_items(batch)
        backup = self._buffers() if self.settings.nonfinite != "stop" else []
        self._clear_gradients()
        with self._gradients("collected"):
            self._backward(batch, position)
        self.meter.mark(COMPUTE)
        if self.split is not None and self.split.pipeline is not None:
            self.meter.waited_in_pipeline(self.split.pipeline.bubble_s)
        self.on_phase("sync", step)
        agreed = self._agreement.agree()
        if self.loss_scale is not None:
            self.loss_scale.unscale(self.replica.gradients)
        norm = self._agreement.gradient_norm()
        self.on_phase("optimizer", step)
        loss = agreed.loss if agreed.own_loss is None else agreed.own_loss
        problem = None
        if _is_finite(loss) and _is_finite(norm):
            self._update(step, norm)
            self._skipped_in_a_row = 0
            if self.loss_scale is not None:
                self.loss_scale.grow()
        elif self.loss_scale is not None and _is_finite(loss):
            problem = self.loss_scale.shrink()
        else:
            problem = self._refuse(batch, backup, step=step, loss=loss, norm=norm)
        if self.apart:
            self._agree_on_parameters(step)
        self.step_count = step
        self.meter.mark(OPTIMIZER)
        return StepResult(step, agreed.loss, position.total, norm, problem, agreed.votes, self.meter.finish(step), agreed.everywhere)

    def deal(self, loader: DataLoader[Any]) -> Loader:
        """Another `DataLoader` dealt to the ranks, as the one given to `setup`: a second data set, an actor's stream, a validation set.

        Iterating it yields this rank's share of each batch; its `position` tells the samples of the share and of the global batch.
        Every rank must call this, in the same order.
        """
        self._dealt += 1
        return deal(loader, self.data_group, self.group, self.settings.seed + 7919 * self._dealt)

    def evaluate(self, batches: Iterable[Batch | None], metrics: list[Metric]) -> dict[str, float]:
        """The metrics over all data-parallel ranks' `batches`, exact for any division of the samples; the model is in eval mode meanwhile.

        Every rank must call this, and where a replica has several data-parallel ranks each with as many batches as the others: None where
        it has none left. For the measurement, replicas that train apart take the parameters that they agree on, and batch-norm statistics
        are averaged over the data-parallel ranks.
        """
        sums = torch.zeros(len(metrics), 2, dtype=torch.float64)
        with self.measuring():
            for i, batch in enumerate(batches):
                self.begin_measure(i)
                sums += self._measured(batch, metrics)
        sums = sums.to(self.device)
        self.group.all_reduce(sums)
        self.meter.restart()
        return {m.name: m.result(total, count) for m, (total, count) in zip(metrics, sums.tolist(), strict=True)}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within, the model is the one to be measured: in eval mode, its parameters and statistics those that all replicas agree on."""
        self.weighing.prepare()
        training = [module for module in self.model.modules() if module.training]  # a user may keep some layers in eval mode
        self.model.eval()
        devices = [self.device.index or 0] if self.device.type == "cuda" else []
        # FSDP2 keeps what it gathers from one pass to the next, and what inference mode makes cannot be trained on.
        without_gradients = torch.inference_mode() if self.split is None else torch.no_grad()
        try:
            # Agreement comes first: what a transport allocates in inference mode could not be used after it.
            with self.rule.in_agreement(), self._averaged_buffers(), torch.random.fork_rng(devices), without_gradients, self._autocast():
                yield
        finally:
            for module in training:
                module.training = True

    def begin_measure(self, number: int) -> None:
        """Called before a held-out batch is computed: its random numbers are its own, where batches are dealt in turn."""
        torch.manual_seed(self.settings.seed + number * self.data_group.size + self.data_group.rank)
        self.on_phase("evaluate", self.step_count)  # a sign of life: the set may be long

    def _measured(self, batch: Batch | None, metrics: list[Metric]) -> Tensor:
        """(metrics, 2): what every metric adds up and counts in a batch; zeros where that is for another rank to tell."""
        if self.split is not None:
            found = self.divided.output(batch)
        else:
            assert batch is not None, "only data-parallel ranks of one replica wait for each other"
            placed = self._place(batch)
            found = self._call(placed), placed
        if found is None or batch is None:
            return torch.zeros(len(metrics), 2, dtype=torch.float64)
        output, placed = found
        self._check_target(output, batch, "in the held-out set")
        target = self.weighing.target(placed)
        values = [self.weighing.measured(m, output, placed) if isinstance(m, LossMetric) else m(output, target) for m in metrics]
        return torch.tensor(values, dtype=torch.float64).reshape(-1, 2)

    def close(self) -> None:
        """Let go of the model: no hooks of paceline remain in it. A model that was divided stays divided."""
        self.rule.detach()
        if self.split is not None:
            self.split.close()
        self.replica_state.close()
        unsynchronise(self.model)

    @property
    def parts(self) -> dict[str, Part] | None:
        """What this rank holds of every parameter that it has; None where that is all of each."""
        return self.split.parts if self.split is not None else None

    @property
    def parameter_count(self) -> int:
        """Of the whole model, however it is divided."""
        return self.split.parameter_count if self.split is not None else sum(p.numel() for p in self.model.parameters())

    def expert_counts(self) -> dict[str, Any]:
        """What the mixtures of experts on this rank did with its tokens so far (`moe_counts`); {} where other ranks tell it."""
        if self.split is None:
            return moe_counts(self.model)
        if self.split.mesh.place["tp"]:
            return {}
        return add_counts([moe_counts(module) for module in self.split.modules])

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What this rank's optimizer steps on, by the names in the undivided model."""
        extra = {name: p for name, p in self.extra.items() if isinstance(p, nn.Parameter)}
        return self.split.parameters if self.split is not None else {**dict(self.model.named_parameters()), **extra}

    def named_buffers(self) -> dict[str, Tensor]:
        """This rank's buffers, by the names in the undivided model."""
        extra = {name: b for name, b in self.extra.items() if not isinstance(b, nn.Parameter)}
        return self.split.named_buffers() if self.split is not None else {**dict(self.model.named_buffers()), **extra}

    # How the model is set up

    def _attach(self, *, alike: bool = False) -> None:
        """Give the model to the rule and find who computes it; `alike`: the replicas have the same parameters already."""
        split, world = self.split, self.group
        if split is None:
            extra, owner = list(self.extra.values()), self._owners()
            self.replica = Replica(
                self.model, world, self.notes.tensor, extra=extra, owner=owner, inner=Group(device=world.device), world=world, alike=alike
            )
            attach(self.rule, self.replica, self.plan)
            self.notes.tensor = self.replica.notes
            self._forward: Callable[..., Any] = _compiled(self.model, self.plan.compile, self.device)
        else:
            held, nothing = list(split.parameters.values()), self.notes.tensor.new_empty(0)
            inner = Group(device=world.device) if SyncSpec.parse(self.plan.sync).name == "allreduce" else split.mesh.group(*REPLICA)
            self.replica = Replica(self.model, split.mesh.group("dp"), nothing, held, inner, world)
            attach(self.rule, self.replica, self.plan)
            self._forward = self.model
            from paceline.engine.split_model import Divided  # with all of FSDP2 and the pipelines, which a plain run does without

            self.divided = Divided(self, split)
        self.replica.gradients_go = "refused"
        self._parameters = list(dict.fromkeys([*self.model.parameters(), *self._held_by_optimizer()]))
        self._trained = self._signature()
        self.apart = not self.replica.agreed  # a rule that lets replicas differ says so when it is attached
        self._agreement = Apart(self) if self.apart else Together(self)
        if self.apart and (getattr(self.loss, "whole_batch", False) or self.settings.batch_norm == "sync"):
            raise PlanError(
                f"sync={self.plan.sync} lets replicas train apart; a loss over the whole batch, or batch_norm: sync, joins them in every "
                "step. Use sync=allreduce."
            )

    def _owners(self) -> dict[Tensor, int]:
        """Which optimizer steps on a parameter, by number; {} where there is one."""
        return {}

    def _held_by_optimizer(self) -> list[nn.Parameter]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    def _signature(self) -> tuple[int, ...]:
        """What changes when the optimizer gets or loses a trainable parameter, also by freezing and unfreezing."""
        return tuple([id(p) if p.requires_grad else 0 for p in self._held_by_optimizer()])

    def _follow_changes(self, *, forward_is_done: bool = False) -> None:
        """Agree on the gradients of parameters that were unfrozen, or added to the optimizer, since the last step.

        Raises:
            PlanError: the plan divides the model, so its parts were settled at the start.
            JobError: the forward pass was computed with parameters that the ranks have not agreed on.
        """
        if self._signature() == self._trained:
            return
        if self.split is not None:
            raise PlanError(
                f"plan {self.plan} divides the parameters that were trainable at the start; some were frozen, unfrozen or added to the "
                f"optimizer since. Call paceline.setup again, or use dp={self.group.size}."
            )
        known = {*self._parameters, *self.extra.values()}
        added = [p for p in self._held_by_optimizer() if p not in known]
        if added and forward_is_done and self.group.size > 1:
            raise JobError(
                f"{len(added)} parameters were added to the optimizer since setup, and the ranks may have other values for them: call "
                "engine.agree() after add_param_group, before the forward pass"
            )
        for parameter in added:
            self.group.broadcast(parameter.detach())
        self.extra |= {f"added.{len(self.extra) + i}": p for i, p in enumerate(added) if p not in set(self.model.parameters())}
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # it may lie in memory that the rule gives back
        self.rule.detach()
        self.rule = build_rule(self.plan)
        self.notes = Notes(self.group)
        self._attach(alike=True)

    @contextmanager
    def _gradients(self, go: Literal["collected", "kept"]) -> Iterator[None]:
        """Where the backward passes within leave their gradients; outside, plain `loss.backward()` is refused."""
        self.replica.gradients_go = go
        try:
            yield
        finally:
            self.replica.gradients_go = "refused"

    def _configure(self) -> None:
        plan, settings = self.plan, self.settings
        if plan.threads:
            torch.set_num_threads(plan.threads)
        self.precision = plan.precision or settings.precision
        self.loss_scale = LossScale() if self.precision == "fp16" else None
        self._channels_last = plan.memory_format == "channels_last"
        if self.split is None:
            self.model = prepared(self.model, settings.batch_norm, self.precision, self.group)
            self.model.to(self.device)
        for outside in self.extra.values():
            wide = torch.float64 if self.precision == "fp64" and outside.is_floating_point() else None
            outside.data = outside.data.to(self.device, wide)
        if self._channels_last:
            _to_channels_last(self.model)
        if settings.batch_norm == "sync" and has_batch_norm(self.model):
            self.loader.fill_every_rank("batch_norm: sync")
        if getattr(self.loss, "whole_batch", False):
            self.loader.fill_every_rank("a loss over the whole batch")
            if plan.microbatches > 1:
                raise PlanError("a loss over the whole batch cannot be accumulated over microbatches; use microbatches=1")

    def _position(self, batch: Batch | None) -> Position:
        """Where in the data the batch stands, and how much of the global batch it is."""
        position = self.loader.position
        if position is None or rows(batch) != position.local:
            raise DataError(
                f"step takes the batches of engine.loader: the newest has {position.local if position else 0} samples on rank "
                f"{self.group.rank}, the one given has {rows(batch)}. Transform a batch as you like, but keep its samples: "
                "they are weighed by what every replica was dealt."
            )
        return position

    # Forward and backward

    def _clear_gradients(self) -> None:
        """As `optimizer.zero_grad`, and also for parameters that the optimizer does not hold: theirs would add up from step to step."""
        for parameter in self._parameters:
            parameter.grad = None

    def _backward(self, batch: Batch | None, position: Position) -> None:
        """Accumulate the gradient of this replica's part of the global mean loss."""
        self.notes.begin()
        if self.split is not None:
            self.divided.backward(batch, position)
            return
        if position.local == 0 or batch is None:
            self.notes.add_loss(0.0, 0.0)
            return
        placed = self._place(batch)
        parts = self.microbatches(placed)
        for i, part in enumerate(parts):
            self.replica.last_backward = i == len(parts) - 1
            self.weigh_balance(part, position)
            with self._autocast():
                output = self._call(part)
                if i == 0 and self.device.type == "cuda":
                    self._check_target(output, batch, self._here(), self.loader.indices)
                loss, items = self.weighed_loss(output, part, batch, position)
            scaled = loss if items == 1.0 else loss * items
            (scaled if self.loss_scale is None else self.loss_scale.scale(scaled)).backward()
            self.notes.add_loss(scaled.detach(), items)

    def microbatches(self, placed: Batch) -> list[Batch]:
        """The parts of this rank's share that it computes one after the other."""
        return list(split(placed, self.plan.microbatches))

    def weighed_loss(self, output: Any, part: Batch, batch: Batch, position: Position) -> tuple[Tensor, float | Tensor]:
        """The mean loss of a microbatch of `batch`, and the share of the global batch that it stands for.

        Raises:
            DataError: the target cannot be compared with the output; names the sample.
        """
        try:
            return self._loss(output, part, position)
        except DataError:
            self._check_target(output, batch, self._here(), self.loader.indices, self.step_loss)  # says better where it is
            raise

    def weigh_balance(self, part: Batch | None, position: Position, *, alike: bool = False) -> None:
        """Tell a mixture of experts what the sequences of a microbatch count for; `alike`: one number for all. None counts for nothing."""
        if not self._balances:
            return
        if part is None:
            weigh_balance(self.model, 0.0)
            return
        items = torch.tensor([float(self.weighing.items(row)) for row in split(part, rows(part))], dtype=torch.float64, device=self.device)
        if self.split is not None and self.split.context is not None and self.weighing.counts:
            self.split.context.group.all_reduce(items)  # of the whole sequences
        if self._is_whole_batch:
            weights = items / items.sum().clamp(min=1)
        else:
            assert self.items_per_sample is not None
            weights = items / (position.total * self.items_per_sample)
        weigh_balance(self.model, weights.mean() if alike else weights)

    @property
    def _is_whole_batch(self) -> bool:
        """Whether every microbatch is a whole global batch, over which a loss is the mean already, whatever its items are."""
        return self.data_group.size == self.plan.microbatches == self.plan.cp == 1

    def _here(self) -> str:
        return f"in step {self.step_count + 1} on rank {self.group.rank}"

    def _check_target(self, output: Any, batch: Batch, where: str, samples: list[int] | None = None, loss: Loss | None = None) -> None:
        """Have the loss look at the batch's target, which is still on the host, while a GPU computes the output."""
        check = getattr(loss or self.loss, "check", None)
        if check is not None and not (target := target_of(batch)).is_cuda:
            check(output, target, where, samples)

    def _loss(self, output: Any, part: Batch, position: Position) -> tuple[Tensor, float | Tensor]:
        target = self.weighing.target(part)
        if getattr(self.loss, "whole_batch", False):
            counts = self.loader.partition.shares(position.step)
            outputs = gather(self.data_group, _tensor(output), counts)
            targets = gather(self.data_group, target, counts)
            return self.step_loss(outputs, targets), 1.0 / self.data_group.size  # every rank has the same loss
        loss = self.step_loss(output, target)
        if self._is_whole_batch:
            return loss, 1.0
        self.weighing.look(output, target, self.step_count + 1, position)
        return self.weighing.weighed(loss, part, position)

    def _agree_on_items(self, batch: Batch | None) -> float:
        """Items per sample, at most, in the first batch: the unit in which every replica weighs its part from then on."""
        local = float(self.weighing.items(batch)) / rows(batch) if batch is not None and rows(batch) else 0.0
        unit = torch.tensor([local], dtype=torch.float64, device=self.device)
        self.group.all_reduce(unit, "max")
        return float(unit.item()) or 1.0

    def _call(self, batch: Batch) -> Any:
        return call(self._forward, batch, loss=self.loss)

    def _place(self, batch: Batch) -> Batch:
        wide = torch.float64 if self.precision == "fp64" else None
        return place(batch, self.device, dtype=wide, channels_last=self._channels_last)

    def _autocast(self) -> AbstractContextManager[Any]:
        casts = self.split is not None and self.split.fully is not None and self.split.fully.casts
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return torch.autocast(self.device.type, narrow) if narrow is not None and not casts else _AS_IT_IS

    # Update

    def _update(self, step: int, norm: float) -> None:
        clip = self.settings.clip_norm
        if clip is not None and norm > clip:
            torch._foreach_mul_(self.replica.gradients, clip / (norm + 1e-6))
        self.replica_state.before_update()
        self.meter.mark(OPTIMIZER)
        self.before_update()
        self.meter.mark(CHECKPOINT)
        self.optimizer.step()
        if not self.apart:
            self.rule.after_step(step)

    def _agree_on_parameters(self, step: int) -> None:
        """Replicas that train apart do this in every step: others wait in it also for one that left its update out."""
        self.meter.mark(OPTIMIZER)
        self.on_phase("sync", step)
        self.rule.after_step(step)
        self.meter.mark(COMM)

    def _refuse(self, batch: Batch | None, backup: list[tuple[Tensor, Tensor]], *, step: int, loss: float, norm: float) -> str:
        """Leave the update out and undo what the forward pass left in the buffers; raise where the policy is to stop."""
        among = self.replica.inner if self.apart else self.group  # the ranks that know of it
        problem = explain(among, batch, self.loader.indices, step=step, loss=loss, norm=norm, rank=self.group.rank)
        self._skipped_in_a_row += 1
        if self.settings.nonfinite == "stop":
            raise stop(problem)
        if self._skipped_in_a_row >= PATIENCE:
            raise gave_up(problem, self._skipped_in_a_row)
        for buffer, saved in backup:
            buffer.copy_(saved)
        return problem

    # Buffers

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [(b, b.clone()) for b in self.model.buffers()]

    def _averaged_buffers(self) -> AbstractContextManager[None]:
        floating = [b for b in self.model.buffers() if b.is_floating_point()]
        if self.data_group.size == 1 or not floating or self.settings.batch_norm == "sync":
            return nullcontext()
        return _AveragedBuffers(floating, self.data_group)


@dataclass
class _AveragedBuffers(AbstractContextManager[None]):
    """Within the context, floating-point buffers hold their mean over the replicas; afterwards this replica's own again."""

    buffers: list[Tensor]
    group: Group
    own: list[Tensor] = field(default_factory=list)

    def __enter__(self) -> None:
        self.own = [b.clone() for b in self.buffers]
        flat = torch.cat([b.reshape(-1).double() for b in self.buffers])
        self.group.all_reduce(flat, "mean")
        for buffer, part in zip(self.buffers, flat.split([b.numel() for b in self.buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))

    def __exit__(self, *error: object) -> None:
        for buffer, own in zip(self.buffers, self.own, strict=True):
            buffer.copy_(own)


def _compiled(model: nn.Module, how: Compile, device: torch.device) -> Callable[..., Any]:
    """The model's forward pass through torch.compile, whose failure to compile becomes an error that says what to do."""
    if how == "off":
        return model
    if how == "reduce-overhead" and device.type != "cuda":
        raise PlanError("compile=reduce-overhead replays CUDA graphs, and this rank has no GPU; use compile=on")
    from torch._inductor.exc import InductorError  # heavy

    keep_compiled_code_private()
    compiled: Callable[..., Any] = torch.compile(model, mode=None if how == "on" else how)

    def forward(*args: Any, **keywords: Any) -> Any:
        try:
            return compiled(*args, **keywords)
        except InductorError as error:
            what = str(error).strip().partition("\n")[0]
            raise PlanError(
                f"compile={how}: torch cannot compile the model here: {what}. It needs a C++ compiler and Python's headers "
                "(on Debian and Ubuntu: apt install g++ python3-dev); or leave compile out."
            ) from error

    return forward


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def _is_finite(x: float) -> bool:
    return x - x == 0.0


def _to_channels_last(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
