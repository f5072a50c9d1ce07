"""The engine of a user's own loop: `engine.backward(loss)`, then `engine.update()` or `optimizer.step()`.

After `backward`, `.grad` is the gradient of the global batch on every rank, so torch's functions for gradients work as
in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.comm import Group
from paceline.comm.gather import gather
from paceline.data.loader import Loader, Position
from paceline.engine.engine import RankEngine, StepResult
from paceline.engine.guard import Settings, explain, stop
from paceline.engine.loss_normalization import NoGradient
from paceline.engine.reduction import clip_elements
from paceline.errors import JobError
from paceline.job.batch import Batch
from paceline.job.loss import Loss, Metric
from paceline.planning.plan import Plan
from paceline.run.own_loop import state as own_state
from paceline.run.own_loop.optimizer_steps import (
    LossShares,
    NoLoader,
    Optimizers,
    OptimizerSteps,
    Refusals,
    check_all_step,
    check_backward,
    no_loss,
    summed_apart,
)
from paceline.run.own_loop.state import Measure, evaluate, mean_loss, own_batches
from paceline.sync.rows import numbers_of

OnStep = Callable[[StepResult], object]

_OPEN: WeakSet[Engine] = WeakSet()  # the open engines of this process


class Engine(RankEngine):
    """The engine of a training loop of your own, as `paceline.setup` returns it.

    With a loss, `step` does a whole step. Without one, the loop calls `backward`, then `update` or `optimizer.step()`.

    Attributes:
        model: the model on this rank's device: the object given to `setup`, not a wrapper. In a pipeline it is this
            rank's stages.
        models: the modules as `setup` got them: one, a list, or a dict.
        optimizers: the optimizers, in the order in which `setup` got them.
        loader: this rank's batches, one epoch per iteration.
        plan: the plan.
        step_count: optimizer steps so far.
        on_step: functions that get the `StepResult` of every `step` and `update`, on every rank, such as trackers.
        is_main: True on the first rank, which prints and logs.

    Example:
        >>> engine = paceline.setup(model, optimizer, loader=loader)
        >>> for inputs, labels in engine.loader:
        ...     loss = cross_entropy(model(inputs), labels)
        ...     engine.backward(loss)
        ...     engine.update()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        loss: Loss | None,
        loader: Loader | None,
        plan: Plan,
        group: Group,
        settings: Settings,
        split: Any = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.steps = OptimizerSteps(optimizers)
        self.optimizers = self.steps.optimizers
        self.loaders: list[Loader] = [] if loader is None else [loader]
        optimizer: Any = self.optimizers[0] if len(self.optimizers) == 1 else Optimizers(self.optimizers)
        self.refusals = Refusals()
        batches: Any = loader or NoLoader(group)
        super().__init__(model, optimizer, loss or no_loss, batches, plan, group, settings, split, extra)
        self.models: Any = model
        self.on_step: list[OnStep] = []
        self.is_main = group.rank == 0
        self.has_loss = loss is not None
        self.counts_measures = split is None or split.owns_loss  # among ranks that compute the same samples, one counts
        self.example: Any = None  # a placeholder batch that is evaluated but not counted, if this rank has none left
        for dealt in self.loaders:
            if loss is None:
                self._serve(dealt)
        self.shares = LossShares(self.loaders, self.data_group, self.device)
        self._casting = False
        self._newest_loss = torch.zeros((), dtype=torch.float64)
        self._not_stepped_since: Position | None = None  # of the first batch whose gradient no step has used
        self.guard.remember()
        self.compute.normalization.warns = self.is_main
        self.steps.watch(
            self._before_own_step,
            self._end_own_step,
            lambda: self._newest_loss,
            ranks=group.size,
            divided_by=None if split is None else plan,
            scaled=self.compute.loss_scale is not None,
        )
        if split is not None:
            split.begin_microbatch(last=True)
            self.refusals.refuse_copies(self.model, plan, group.size)
        _OPEN.add(self)

    def __repr__(self) -> str:
        """Return the plan, this rank, and the number of steps."""
        return f"<Engine of plan {self.plan}: rank {self.group.rank} of {self.group.size}, {self.step_count:,} steps>"

    # Steps in two calls

    def backward(
        self,
        loss: Tensor,
        *optimizers: Optimizer,
        items: float | Tensor | None = None,
        sync: bool = True,
        retain_graph: bool = False,
    ) -> Tensor:
        """Add the gradient of the global mean loss to `.grad`; every rank calls it.

        Only parameters that the loss depends on get a gradient.

        Args:
            loss: mean over this rank's samples of the batch. Its weight is this rank's share of the global batch.
            optimizers: optimizers whose parameters get gradients, such as that of a GAN's generator; the loss leaves no
                gradient elsewhere. Without any, every parameter that the loss depends on gets one.
            items: number of items that the mean was taken over, if these are not the samples of the loader's last
                batch: tokens, valid labels, samples of another batch. The weight of the loss is then this rank's share
                of all ranks' items. A loss with 0 items adds nothing.
            sync: False keeps the gradients on this rank, without communication, until a later call with True, or
                `update` (gradient accumulation).
            retain_graph: as in `Tensor.backward`.

        Returns:
            The mean loss over all ranks, the same number on each, without a gradient.

        Raises:
            JobError: the result would differ from that of one process; the message says what to write instead.
            PlanError: the plan does not allow this call.
            DataError: the samples of the loss are not known.
        """
        if sync:
            self._refuse_without_updates()
        check_backward(self, loss, casts=self._casting or self.compute.casts, sync=sync)
        if items is None:
            self.shares.check_data()
        self._follow_changes(forward_is_done=True)
        if self.compute.reads is not None:
            newest = self.step_count + 1
            everywhere = type(loss) is not Tensor or not newest & (newest - 1)
            self.compute.reads.check(loss, everywhere=everywhere)
        targets = self.steps.numbers(optimizers)
        self.steps.refuse_leftovers(targets, named=bool(optimizers))
        parameters = self.steps.parameters_of(targets) if optimizers else None
        share, self._newest_loss = self.shares.weigh(loss, items, local_steps=self.local_steps)
        for parameter in self._untrained:
            parameter.grad = None  # no optimizer updates them, so they would accumulate from pass to pass
        self.replica.backward.only = set(parameters) if parameters is not None else None
        self.replica.backward.last = sync and self.split is None
        gradients = self._gradients("collected" if sync else "kept")
        reduces = self.group.size > 1 and not self.local_steps
        already = self.steps.parameters_of(targets - self.steps.with_gradients(targets, own=True)) if reduces else []
        if not sync:
            # the next reduction sums over ranks: already reduced gradients must count once, on one rank
            for parameter in already:
                parameter.grad = None if self.group.rank or parameter.grad is None else parameter.grad.clone()
            already = []
        with summed_apart(already), gradients, self._in_backward():
            scale = 1.0 if self.compute.loss_scale is None else self.compute.loss_scale.value
            # a rank without items takes part in the backward pass and adds nothing
            empty = None if (share if items is None else items) else NoGradient(loss)
            scaled = empty.loss if empty is not None else loss * share * scale
            torch.autograd.backward(scaled, retain_graph=retain_graph, inputs=parameters)
            if empty is not None:
                empty.release()
            if sync:
                self._agree()
        self.steps.computed(targets, reduced=sync)
        self.replica.backward.only = None
        return self._newest_loss

    def update(
        self, *optimizers: Optimizer, clip_norm: float | None = None, clip_value: float | None = None
    ) -> StepResult:
        """Clip the gradients, step the optimizers and clear their gradients; every rank calls it.

        Args:
            optimizers: the optimizers to step; all if none is named.
            clip_norm: largest L2 norm of their gradients together; None takes that of `setup`.
            clip_value: largest absolute value of an element of a gradient; applied before `clip_norm`.

        Returns:
            The numbers of the step, the same on every rank.

        Raises:
            NonFiniteError: a gradient or the loss is not finite, and the policy is to stop. Nothing was updated.
            JobError: there is no gradient to step by.
        """
        stepped = self.steps.numbers(optimizers)
        self.steps.check_no_closure(stepped)
        if self.steps.with_gradients(stepped, own=True):
            self.replica.backward.only = set(self.steps.parameters_of(stepped))
            self._agree()
            self.replica.backward.only = None
            self.steps.computed(stepped, reduced=True)
        if not self.steps.with_gradients(stepped, own=False):
            raise JobError(
                "loop.no_gradient",
                "update has no gradient. Call engine.backward(loss) before each update.",
            )
        gradients = self.reduction.gradients = numbers_of(self.steps.parameters_of(stepped))
        if self.compute.loss_scale is not None:
            self.compute.loss_scale.unscale(gradients)
        if clip_value is not None:
            clip_elements(gradients, clip_value)
        norm = self.reduction.norm()
        loss, step = float(self._newest_loss), self.step_count + 1
        problem = self.guard.check(self.reduction.deciders, None, [], step=step, loss=loss, norm=norm)
        if problem is None:
            self._clip(norm, clip_norm)
            self._prepare_update(step)
            with self.steps.by_the_engine():
                for number in sorted(stepped):
                    self.optimizers[number].step()
            if self.compute.loss_scale is not None:
                self.compute.loss_scale.grow()
        self.reduction.gradients = []
        for parameter in self.steps.parameters_of(stepped):
            parameter.grad = None
        self.steps.stepped(stepped)
        self._end_own_step(len(stepped), updated=problem is None)
        self.guard.remember()
        position = self.loader.position
        result = StepResult(step, loss, 0 if position is None else position.total, norm, problem, {}, None)
        for callback in self.on_step:
            callback(result)
        return result

    def step(self, batch: Batch | None) -> StepResult:
        """Take a step: forward, backward, update; then call `on_step`. Every rank calls it.

        Args:
            batch: this rank's batch, from `engine.loader`; None if the rank has none left.

        Raises:
            NonFiniteError: the loss or a gradient is not finite, and the policy is to stop. Nothing was updated.
            JobError: `setup` got no loss.
        """
        if not self.has_loss:
            raise JobError(
                "loop.step_without_loss",
                "step needs a loss: use paceline.setup(model, optimizer, loss=loss, loader=loader), or call "
                "engine.backward and engine.update",
            )
        self.steps.check_no_closure(self.steps.numbers(()))
        with self.steps.by_the_engine():
            result = super().step(batch)
        for callback in self.on_step:
            callback(result)
        return result

    # Other parts of a loop

    def broadcast_new_parameters(self) -> None:
        """Broadcast parameters added to an optimizer since `setup` from rank 0; every rank calls it."""
        self._follow_changes()

    def deal(self, loader: DataLoader[Any]) -> Loader:
        """Divide the batches of another loader among the ranks.

        Every rank calls it, in the same order. `save` keeps the loader's position, too.

        Args:
            loader: a `DataLoader` as one process would use it; its `batch_size` is the global batch.

        Returns:
            This rank's batches, one epoch per iteration.
        """
        dealt = super().deal(loader)
        self._serve(dealt)
        self.loaders.append(dealt)
        return dealt

    def _serve(self, loader: Loader) -> None:
        """Convert a loader's batches to the form that a loop with its own loss needs."""
        loader.fills_empty, loader.device = True, self.device

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of all ranks in rank order.

        It is for losses over the global batch. Gradients flow back to every rank's own rows.

        Args:
            rows: this rank's rows, shape (rows, …); ranks may have different numbers of rows.
        """
        counts = torch.zeros(self.data_group.size, dtype=torch.int64, device=self.device)
        counts[self.data_group.rank] = len(rows)
        self.data_group.all_reduce(counts)
        return gather(self.data_group, rows, counts.tolist())

    def mean(self, value: float | Tensor, items: float | Tensor | None = None) -> float:
        """Average a number over all ranks; every rank calls it.

        Args:
            value: this rank's number.
            items: weight of this rank's number; None takes its samples of the loader's last batch.
        """
        _, mean = self.shares.weigh(torch.as_tensor(value, device=self.device), items, local_steps=self.local_steps)
        return float(mean)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute forward pass and loss in the precision given to `setup`; with fp32, nothing changes."""
        self._casting = True
        with self.compute.autocast():
            yield

    def print(self, *values: object, **keywords: Any) -> None:
        """Print on the first rank only; arguments are those of `print`."""
        if self.is_main:
            print(*values, **keywords)

    def ignore(self, optimizer: Optimizer) -> None:
        """Exempt an optimizer whose parameters every rank trains by itself, such as a probe."""
        self.steps.ignore(optimizer)

    @overload
    def evaluate(self, data: DataLoader[Any] | Iterable[Any], metrics: Measure | None = None) -> dict[str, float]: ...

    @overload
    def evaluate(self, data: DataLoader[Any] | Iterable[Batch | None], metrics: list[Metric]) -> dict[str, float]: ...

    def evaluate(self, data: Any, metrics: Any = None) -> dict[str, float]:
        """Measure the model on a validation set; every rank calls it.

        Each result is the mean over all samples, the same on any number of ranks. The model is measured in eval mode,
        without gradients, and in the precision of `setup`. If replicas take local steps, the parameters of their last
        synchronization are measured. Batch-norm statistics are averaged.

        Args:
            data: a `DataLoader` as one process would use it; the ranks take its batches in turn. An iterable that is no
                `DataLoader` has this rank's batches.
            metrics: a function `measure(batch)` that computes a batch and returns a dict. Each value is the mean over
                the batch's samples, a 1-D tensor with one value per sample, or a pair (sum, count). Or a list of
                `paceline.Metric`, which get the model's output and the target. None measures the loss of `setup`.

        Returns:
            The results by name, the same on every rank.
        """
        if isinstance(metrics, list):
            return super().evaluate(own_batches(data, self) if isinstance(data, DataLoader) else data, metrics)
        return mean_loss(self, data) if metrics is None else evaluate(self, data, metrics)

    def save(self, folder: str | Path, *, keep: int = 2, **objects: Any) -> Path:
        """Write a checkpoint into `folder`, for any plan; every rank calls it.

        A checkpoint holds models, optimizers, the position in the data, and random states, as safetensors and JSON.
        Nothing is pickled.

        Args:
            folder: the same folder for all ranks, on storage that they share.
            keep: number of newest checkpoints to keep in the folder.
            objects: further state by name: anything with a `state_dict` (schedulers, averages, samplers), and plain
                values.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        return own_state.save(self, Path(folder), objects, keep)

    def load(self, folder: str | Path, **objects: Any) -> dict[str, Any] | None:
        """Resume from the newest whole checkpoint in `folder`, if there is one.

        Every rank calls it, before the first step. The next iteration of the loaders continues behind the last batch.

        Args:
            folder: the folder that `save` got.
            objects: objects whose state `load_state_dict` restores, by the names given to `save`.

        Returns:
            The plain values that were saved, by name; None if there is no checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
            DataError: the data set has another number of samples, or its first, middle or last sample has changed.
        """
        return own_state.load(self, Path(folder), objects)

    def export(self, path: str | Path) -> None:
        """Write the model that `evaluate` measures as one safetensors file; every rank calls it.

        One process reads it by `model.load_state_dict(safetensors.torch.load_file(path))`.
        """
        own_state.export(self, Path(path))

    def clear(self) -> None:
        """Drop gradients that no optimizer has stepped on."""
        self._clear_gradients()
        self.steps.gradients.clear()
        self._not_stepped_since = None
        self.shares.forget()

    def close(self) -> None:
        """Remove all hooks of paceline from the model and the optimizers."""
        _OPEN.discard(self)
        self.steps.close()
        self.refusals.close()
        super().close()

    def _agree(self) -> None:
        if self.group.size == 1:
            return
        self.signals.tensor.zero_()
        self.reduction.apply_rule(self.step_count + 1)

    def _refuse_without_updates(self) -> None:
        """Raise an error if no optimizer has stepped for a whole epoch of reduced gradients."""
        first, now = self._not_stepped_since, self.loader.position
        if first is None or now is None:
            self._not_stepped_since = now
        elif now[:2] >= (first.epoch + 1, first.step):
            raise JobError(
                "loop.no_update",
                "engine.backward(loss) has computed gradients for a whole epoch, and no optimizer has stepped by them. "
                "Call engine.update() after each batch, or engine.clear() to drop the gradients.",
            )

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        self.on_phase("compute", self.step_count + 1)
        yield
        self.on_phase("data", self.step_count + 1)

    # Steps that the loop takes with `optimizer.step()`

    def _before_own_step(self) -> None:
        if not math.isfinite(loss := float(self._newest_loss)):
            raise stop(explain(self.group, None, [], step=self.step_count + 1, loss=loss, norm=0.0))
        self._prepare_update(self.step_count + 1)

    def _end_own_step(self, stepped: int = 1, *, updated: bool = True) -> None:
        if self.local_steps:
            check_all_step(self.plan, stepped, len(self.optimizers))
            self._follow_changes()
        # a replica that skipped its update still takes part in an average, because others wait for it
        if updated or self.local_steps:
            self.rule.after_step(self.step_count + 1)
        self.step_count += 1
        self._not_stepped_since = None
        self._casting = False

    # Ownership of parameters

    def _owners(self) -> dict[Tensor, int]:
        if len(self.optimizers) == 1:
            return {}
        return {
            p: i for i, optimizer in enumerate(self.optimizers) for g in optimizer.param_groups for p in g["params"]
        }

    def _attach(self, *, identical: bool = False) -> None:
        super()._attach(identical=identical)
        held = set(self._held_by_optimizer())
        self._untrained = [p for p in self.replica.trainable if p not in held]
        # hooks of the rule refuse it themselves
        refuses = self.group.size > 1 and not self.local_steps and not getattr(self.rule, "hooks", None)
        divided = self._parameters if self.split is None else self.split.divided.values()
        self.refusals.refuse_backward(divided if refuses else (), self.replica)


def refuse_model_of_another_engine(model: nn.Module, group: Group) -> None:
    """Raise JobError if an open engine trains a parameter of `model`.

    On several ranks both engines would handle the gradients of the parameter.
    """
    own = {id(p) for p in model.parameters() if p.requires_grad}
    if any(id(p) in own for engine in _OPEN if group.size > 1 for p in engine.named_parameters().values()):
        raise JobError(
            "setup.twice",
            "an engine of an earlier paceline.setup still trains this model. Call engine.close() before the second "
            "setup, or call setup only once, outside of the loop.",
        )
