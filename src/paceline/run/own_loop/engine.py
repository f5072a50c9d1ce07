"""The engine of a user's own loop: `engine.backward(loss)`, then `engine.update()` or `optimizer.step()`.

After `backward`, `.grad` is the gradient of the global batch on every rank. torch's gradient functions therefore work
as in one process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from paceline.direct_calls import backward
from paceline.engine.engine import LATE_NUMBERS, LateResult, RankEngine, StepResult, step_result
from paceline.engine.guard import Settings, explain, stop
from paceline.engine.loss_normalization import NoGradient
from paceline.engine.reduction import ReductionAhead, UnreadStep, clip_elements
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
from paceline.run.process import fail
from paceline.split.remat import compile_calls
from paceline.sync.rows import dense_and_sparse

OnStep = Callable[[StepResult], object]

_OPEN: WeakSet[Engine] = WeakSet()  # the open engines of this process
_UNCHECKED: set[Engine] = set()  # engines whose newest step is not checked yet; kept even if the script drops them


class Engine(RankEngine):
    """Engine of your own training loop; `paceline.setup` returns it.

    If `setup` got a loss, call `step` for a whole training step. Otherwise, call `backward` with your loss, then
    `update` or `optimizer.step()`.

    Attributes:
        model: the model that `setup` was given, on this rank's device; not a wrapper. With a pipeline, it is this
            rank's stages.
        models: the models in the form that `setup` was given: one module, a list, or a dict.
        optimizers: the optimizers, in the order that `setup` was given.
        loader: loader of this rank's batches; each iteration is one epoch.
        plan: plan of this training.
        step_count: number of optimizer steps so far.
        on_step: callbacks that get the `StepResult` of every `step` and `update`, on every rank; for example trackers.
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
        # if several ranks compute the same samples, count their measures once
        self.counts_measures = split is None or split.owns_loss
        self.example: Any = None  # placeholder batch for a rank without further batches; its measures do not count
        for dealt in self.loaders:
            if loss is None:
                self._serve(dealt)
        self.shares = LossShares(self.loaders, self.data_group, self.device)
        self._compiled: Callable[[], object] = lambda: None  # undoes `compile=`
        if loss is None and split is None and plan.compile != "off":
            # the loop calls the models itself, so these calls are compiled instead of the engine's forward pass
            several = isinstance(model, (nn.ModuleList, nn.ModuleDict))
            self.compute.forward = model
            self._compiled = compile_calls(list(model.children()) if several else [model], plan.compile, self.device)
        self._casting = False
        self._newest_loss = torch.zeros((), dtype=torch.float64)
        # the newest step, if its numbers may still be on the accelerator
        self._unread: tuple[UnreadStep, StepResult] | None = None
        self._not_stepped_since: Position | None = None  # position of the first batch whose gradient no step has used
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
        """Return the plan, the rank and the number of steps."""
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

        Only parameters on which the loss depends get a gradient.

        Args:
            loss: mean loss over this rank's samples. It is weighted by this rank's share of the global batch.
            optimizers: if given, only parameters of these optimizers get gradients, such as those of a GAN's generator.
            items: number of items in the mean, if it differs from the number of samples in the loader's last batch;
                for example a number of tokens. The loss is then weighted by this rank's share of all ranks' items. A
                loss with 0 items adds nothing to the gradients.
            sync: False accumulates gradients on this rank without communication, until `update` or a later call with
                True.
            retain_graph: as in `Tensor.backward`.

        Returns:
            The mean loss over all ranks, detached; the same on every rank.

        Raises:
            JobError: the result would differ from a single process's result; the message says what to write instead.
            PlanError: the plan does not support this call.
            DataError: the number of samples behind the loss is unknown.
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
            parameter.grad = None  # no optimizer clears these gradients, so they would accumulate
        self.replica.backward.only = set(parameters) if parameters is not None else None
        self.replica.backward.last = sync and self.split is None
        gradients = self._gradients("collected" if sync else "kept")
        reduces = self.group.size > 1 and not self.local_steps
        already = self.steps.parameters_of(targets - self.steps.with_gradients(targets, own=True)) if reduces else []
        if not sync:
            # the next reduction sums over ranks, so only one rank may add gradients that are already reduced
            for parameter in already:
                parameter.grad = None if self.group.rank or parameter.grad is None else parameter.grad.clone()
            already = []
        with summed_apart(already), gradients, self._in_backward():
            scale = 1.0 if self.compute.loss_scale is None else self.compute.loss_scale.value
            # a rank without items takes part in the backward pass and adds nothing
            empty = None if (share if items is None else items) else NoGradient(loss)
            own = loss if not isinstance(share, Tensor) and share == 1.0 else loss * share
            scaled = empty.loss if empty is not None else own if scale == 1.0 else own * scale
            if parameters is None:
                backward(scaled, retain_graph=retain_graph)
            else:
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
            optimizers: optimizers to step; by default, all of them.
            clip_norm: maximum L2 norm of all their gradients together; None takes `clip_norm` of `setup`.
            clip_value: maximum absolute value of each gradient element; applied before `clip_norm`.

        Returns:
            The result of the step, the same on every rank. On accelerators, the first access to its numbers waits for
                the device.

        Raises:
            NonFiniteError: a gradient or the loss is not finite, and the policy is `stop`, or 20 updates in a row were
                skipped. Nothing was updated. On accelerators, however, the policy `stop` raises this error one step
                later, after the update.
            JobError: none of these optimizers has gradients to apply.
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
                "engine.update() has no gradients to apply. Call engine.backward(loss) before each update.",
            )
        self.reduction.take(*dense_and_sparse(self.steps.parameters_of(stepped)))
        if clip_norm is not None or clip_value is not None:
            self.reduction.sum_rows()
        if self.compute.loss_scale is not None:
            self.compute.loss_scale.unscale(self.reduction.gradients)
        if clip_value is not None:
            clip_elements(self.reduction.gradients, clip_value)
        step, position = self.step_count + 1, self.loader.position
        samples = 0 if position is None else position.total
        result: StepResult | UnreadStep
        if isinstance(self.reduction, ReductionAhead):
            self._check_before(step)
            result = self.reduction.queue_own(
                self._newest_loss, clip_norm=self.settings.clip_norm if clip_norm is None else clip_norm
            )
            result.step, result.total, result.batch, result.samples = step, samples, None, []
            updated = True
        else:
            norm, loss = self.reduction.norm(), float(self._newest_loss)
            problem = self.guard.check(self.reduction.deciders, None, [], step=step, loss=loss, norm=norm)
            result = step_result(norm, step=step, loss=loss, samples=samples, problem=problem, votes={}, timing=None)
            updated = problem is None
            if updated:
                self._clip(norm, clip_norm)
        if updated:
            self._prepare_update(step)
            with self.steps.by_the_engine():
                for number in sorted(stepped):
                    self.optimizers[number].step()
            if self.compute.loss_scale is not None:
                self.compute.loss_scale.grow()
        self.reduction.take([])
        for parameter in self.steps.parameters_of(stepped):
            parameter.grad = None
        self.steps.stepped(stepped)
        self._end_own_step(len(stepped), updated=updated)
        self.guard.remember()
        if isinstance(result, UnreadStep):
            result.send()
        return self._told(result)

    def step(self, batch: Batch | None) -> StepResult:
        """Run forward pass, backward pass and update, then `on_step`; every rank calls it.

        Args:
            batch: this rank's batch from `engine.loader`; None if this rank's share is empty.

        Returns:
            The result of the step. On accelerators, the first access to its numbers waits for the device.

        Raises:
            NonFiniteError: the loss or a gradient is not finite, and the policy is `stop`, or 20 updates in a row were
                skipped. Nothing was updated. On accelerators, however, the policy `stop` raises this error one step
                later, after the update.
            JobError: `setup` was not given a loss.
        """
        if not self.has_loss:
            raise JobError(
                "loop.step_without_loss",
                "engine.step needs a loss. Use paceline.setup(model, optimizer, loss=loss, loader=loader), or call "
                "engine.backward and engine.update",
            )
        self.steps.check_no_closure(self.steps.numbers(()))
        self._check_before(self.step_count + 1)
        with self.steps.by_the_engine():
            begun = self.begin(batch)
        return self._told(begun)

    def _told(self, begun: StepResult | UnreadStep) -> StepResult:
        """Return the result of a step, after passing it to the callbacks in `on_step`."""
        result = self._late(begun) if isinstance(begun, UnreadStep) else begun
        for callback in self.on_step:
            callback(result)
        return result

    def _late(self, begun: UnreadStep) -> StepResult:
        """Return the result of a queued step, and check the previous step.

        The device computes the queued step while the host reads the numbers of the previous step.
        """
        self._check_newest()

        def numbers() -> dict[str, Any]:
            found = self.numbers(begun)
            return {name: getattr(found, name) for name in LATE_NUMBERS}

        result = LateResult(numbers, step=begun.step, samples=begun.total)
        self._unread = begun, result
        _UNCHECKED.add(self)
        return result

    def _check_newest(self) -> None:
        """Check the newest step's numbers, if they are not checked yet; every rank calls it."""
        unread, self._unread = self._unread, None
        if unread is not None:
            _UNCHECKED.discard(self)
            self.on_phase("sync", self.step_count)
            self.check_late(*unread)
            self.on_phase("data", self.step_count + 1)

    def _check_before(self, step: int) -> None:
        """Check the newest step if `step` compares replicas, or verifies the loss or model."""
        if self._unread is not None and self.examines(step):
            self._check_newest()

    # Other parts of a loop

    def broadcast_new_parameters(self) -> None:
        """Broadcast newly added parameters from rank 0; every rank calls it.

        These are parameters that were added to an optimizer since `setup`.
        """
        self._follow_changes()

    def deal(self, loader: DataLoader[Any]) -> Loader:
        """Divide the batches of another loader among the ranks.

        Every rank calls this method, for all loaders in the same order. `save` also saves the loader's position.

        Args:
            loader: a `DataLoader` as in a script for one process; its `batch_size` is the global batch size.

        Returns:
            A loader of this rank's batches; each iteration is one epoch.
        """
        dealt = super().deal(loader)
        self._serve(dealt)
        self.loaders.append(dealt)
        return dealt

    def _serve(self, loader: Loader) -> None:
        """Prepare a loader for a loop that computes the loss itself."""
        loader.fills_empty, loader.device = True, self.device

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of all ranks in rank order.

        Use it for losses over the global batch. Gradients flow back to each rank's own rows.

        Args:
            rows: this rank's rows, of shape (rows, …); the number of rows may differ between ranks.
        """
        counts = torch.zeros(self.data_group.size, dtype=torch.int64, device=self.device)
        counts[self.data_group.rank] = len(rows)
        self.data_group.all_reduce(counts)
        return gather(self.data_group, rows, counts.tolist())

    def mean(self, value: float | Tensor, items: float | Tensor | None = None) -> float:
        """Return the weighted mean of a number over all ranks; every rank calls it.

        Args:
            value: this rank's number.
            items: weight of this rank's number; None takes this rank's number of samples in the loader's last batch.
        """
        _, mean = self.shares.weigh(torch.as_tensor(value, device=self.device), items, local_steps=self.local_steps)
        return float(mean)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Within this context, compute in the precision given to `setup`.

        Use this context for the forward pass and the loss. With fp32, the context changes nothing.
        """
        self._casting = True
        with self.compute.autocast():
            yield

    def print(self, *values: object, **keywords: Any) -> None:
        """Print on the first rank only; the arguments are those of Python's `print`."""
        if self.is_main:
            print(*values, **keywords)

    def ignore(self, optimizer: Optimizer) -> None:
        """Allow an optimizer outside of `setup`, so that each rank trains its parameters alone."""
        self.steps.ignore(optimizer)

    @overload
    def evaluate(self, data: DataLoader[Any] | Iterable[Any], metrics: Measure | None = None) -> dict[str, float]: ...

    @overload
    def evaluate(self, data: DataLoader[Any] | Iterable[Batch | None], metrics: list[Metric]) -> dict[str, float]: ...

    def evaluate(self, data: Any, metrics: Any = None) -> dict[str, float]:
        """Measure the model on a validation set; every rank calls it.

        Each result is the mean over all samples, and does not depend on the number of ranks. The model runs in eval
        mode, without gradients, and in the precision of `setup`. If replicas take local steps, their last synchronized
        parameters are measured. Batch-norm statistics are averaged over the ranks.

        Args:
            data: a `DataLoader` as in a script for one process, or another iterable of batches. The ranks take the
                batches in turn. With a list of metrics, an iterable must yield only this rank's batches.
            metrics: a function `measure(batch)` that returns a dict of values, or a list of `paceline.Metric`. A value
                is the mean over the batch's samples, a 1-D tensor with one value per sample, or a pair (sum, count).
                A `paceline.Metric` gets the model's output and the target. None measures the loss of `setup`.

        Returns:
            The results by name, the same on every rank.
        """
        self._check_newest()
        if isinstance(metrics, list):
            return super().evaluate(own_batches(data, self) if isinstance(data, DataLoader) else data, metrics)
        return mean_loss(self, data) if metrics is None else evaluate(self, data, metrics)

    def save(self, folder: str | Path, *, keep: int = 2, **objects: Any) -> Path:
        """Write a checkpoint into `folder`; every rank calls it.

        Any plan can load the checkpoint.

        The checkpoint has the models, the optimizers, the position in the data, and the random states. It consists of
        safetensors and JSON files, without pickled objects.

        Args:
            folder: folder on storage that all ranks share; the same for every rank.
            keep: number of newest checkpoints to keep in the folder.
            objects: further state to save, by name: objects with a `state_dict`, such as schedulers, and plain values.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        self._check_newest()
        return own_state.save(self, Path(folder), objects, keep)

    def load(self, folder: str | Path, **objects: Any) -> dict[str, Any] | None:
        """Resume from the newest complete checkpoint in `folder`, if there is one.

        Every rank calls this method, before the first step. The loaders continue after the checkpoint's last batch.

        Args:
            folder: the folder that was given to `save`.
            objects: objects to restore with `load_state_dict`, by the names given to `save`.

        Returns:
            The saved plain values by name; None if there is no checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
            DataError: the data set's number of samples, or its first, middle or last sample, has changed.
        """
        self._check_newest()
        return own_state.load(self, Path(folder), objects)

    def export(self, path: str | Path) -> None:
        """Write the model that `evaluate` measures to a safetensors file; every rank calls it.

        Read the file in one process with `model.load_state_dict(safetensors.torch.load_file(path))`.
        """
        self._check_newest()
        own_state.export(self, Path(path))

    def clear(self) -> None:
        """Discard all gradients that no optimizer has used yet."""
        self._clear_gradients()
        self.steps.gradients.clear()
        self._not_stepped_since = None
        self.shares.forget()

    def close(self) -> None:
        """Remove paceline's hooks from the model and the optimizers.

        Raises:
            NonFiniteError: on accelerators, the loss or gradient of the last step is not finite, and the policy is
                `stop`.
        """
        _OPEN.discard(self)
        with ExitStack() as held:
            held.callback(super().close)
            held.callback(self.refusals.close)
            held.callback(self._compiled)
            held.callback(self.steps.close)
            self._check_newest()

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
                "engine.backward(loss) has computed gradients for a whole epoch, but no optimizer has used them. "
                "Call engine.update() after each batch, or engine.clear() to drop the gradients.",
            )

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        self.on_phase("compute", self.step_count + 1)
        yield
        self.on_phase("data", self.step_count + 1)

    # Steps that the loop takes with `optimizer.step()`

    def _before_own_step(self) -> None:
        if self.runs_ahead:
            step = self.step_count + 1
            self._check_before(step)
            sent = UnreadStep(None, [self._newest_loss], norms=0)
            sent.step, sent.total, sent.batch, sent.samples = step, 0, None, []
            sent.send()
            self._late(sent)
        elif not math.isfinite(loss := float(self._newest_loss)):
            raise stop(explain(self.group, None, [], step=self.step_count + 1, loss=loss, norm=0.0))
        self._prepare_update(self.step_count + 1)

    def _end_own_step(self, stepped: int = 1, *, updated: bool = True) -> None:
        if self.local_steps:
            check_all_step(self.plan, stepped, len(self.optimizers))
            self._follow_changes()
        # even after a skipped update, a replica takes part in the average, because other replicas wait for it
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
        # rules with hooks refuse `loss.backward()` themselves
        refuses = self.group.size > 1 and not self.local_steps and not getattr(self.rule, "hooks", None)
        divided = self._parameters if self.split is None else self.split.divided.values()
        self.refusals.refuse_backward(divided if refuses else (), self.replica)


def check_at_exit() -> None:
    """Check the newest step of each engine, unless an error has ended the script.

    If the check fails, the process ends with exit code 1, because Python ignores exceptions at exit.
    """
    if getattr(sys, "last_value", None) is not None:
        return
    for engine in list(_UNCHECKED):
        try:
            engine._check_newest()
        except Exception as error:  # noqa: BLE001 - any error of the last step
            with suppress(OSError):
                sys.stdout.flush()
            fail(error)


def refuse_model_of_another_engine(model: nn.Module, group: Group) -> None:
    """Raise JobError if an open engine trains a parameter of `model`.

    On several ranks, both engines would reduce the gradients of this parameter.
    """
    own = {id(p) for p in model.parameters() if p.requires_grad}
    if any(id(p) in own for engine in _OPEN if group.size > 1 for p in engine.named_parameters().values()):
        raise JobError(
            "setup.twice",
            "an engine of an earlier paceline.setup still trains this model. Call engine.close() before the second "
            "setup, or call setup only once, outside of the loop.",
        )
