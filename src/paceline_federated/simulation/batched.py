"""Local training of many clients side by side, by `torch.func.vmap` on stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.job.batch import target_of
from paceline.job.zoo.losses import IGNORED, CrossEntropy, Elementwise, call, classes_on_dim_1, logits_of
from paceline.job.zoo.losses import same_shape as in_one_shape
from paceline_federated.aggregate import Cohort
from paceline_federated.client import LocalTraining
from paceline_federated.layout import tensors_of
from paceline_federated.order import drawing_from, one_key
from paceline_federated.rule import Local, Task
from paceline_federated.simulation.deal import Deal
from paceline_federated.simulation.graph import traced
from paceline_federated.simulation.kept import Kept
from paceline_federated.simulation.samples import Samples
from paceline_federated.simulation.stacked import StackedOptimizer, clip
from paceline_federated.simulation.timetable import Step, Timetable

Ints = NDArray[np.int64]
_AT_ONCE_BYTES = 2**28  # of the stacked parameters of clients that train together
_READ_BYTES = 2**24  # of samples that are read together
_MOST_GRAPHS, _MOST_TIMETABLES = 256, 4
_NARROW = 16  # classes; for fewer, torch's softmax on CPUs is slow along the last dimension
_TOGETHER = 2  # what random numbers are for: those of clients that train together
_COUPLED = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class CannotBatch(Exception):
    """The model does not train in a batch of clients; the text says why."""


class Batched:
    """Trains clients side by side.

    Raises:
        CannotBatch: the job's model, loss or optimizer treats samples or layers together in a way that padding or
            stacking would change.
    """

    def __init__(self, training: LocalTraining, samples: Samples, deal: Deal) -> None:
        self.training, self.samples, self.deal = training, samples, deal
        if reason := why_not(training):
            raise CannotBatch(reason)
        self.shared = training.layout.names[: training.layout.trainable]
        self.names = (*self.shared, *training.layout.personal)
        self._graphs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._timetables: dict[bytes, Timetable] = {}
        self._all_counted = self._checked()

    def train(self, task: Task, clients: Sequence[int], kept: Kept) -> list[Cohort]:
        """Updates of clients that have samples, as many together as memory allows."""
        numbers = np.asarray(clients, np.int64)
        totals = self.training.work.step_counts(self.deal.samples[numbers])
        numbers = numbers[np.argsort(-totals, kind="stable")]
        row_bytes = 8 * self.training.layout.numel * self.training.layout.dtype.itemsize
        together = max(1, _AT_ONCE_BYTES // row_bytes)
        parts = [numbers[start : start + together] for start in range(0, len(numbers), together)]
        with drawing_from(one_key(self.training.job.seed, _TOGETHER, task.round)), torch.no_grad():
            return [self._train(task, part, kept) for part in parts]

    def _checked(self) -> bool:
        """True if every label is known to be a class of the model, and counts.

        Raises:
            DataError: one is out of range; names it.
        """
        loss, whole = self.training.loss, self.samples.whole
        if not isinstance(loss, CrossEntropy) or whole is None:
            return False
        labels, first = target_of(self.samples.batch(whole)), self.samples.batch([part[:1] for part in whole])
        model = self.training.model.eval()
        with torch.no_grad():
            loss.check(call(model, first, loss=loss), labels, "in the training set")
        return not bool((labels == IGNORED).any())

    def _train(self, task: Task, clients: Ints, kept: Kept) -> Cohort:
        training, count = self.training, len(clients)
        stacks = self._stacks(task, clients, kept)
        final = [torch.empty_like(stack) for stack in stacks]
        parameters = training.layout.parameters
        local = Local(task.weights[:parameters], task.sent, task.lr, kept.rule(clients))
        optimizer = StackedOptimizer(training.job.optimizer, task.lr, stacks)
        losses = torch.zeros(count, dtype=torch.float64)
        active = count
        for step, parts in self._steps(clients, task.round):
            if step.clients < active:
                self._keep(optimizer.stacks, final, step.clients, active)
                active = step.clients
                optimizer.narrow(step.rows)
            gradients, loss = self._gradients([*optimizer.stacks, *parts, step.shares])
            losses[:active] += loss[:active] if len(loss) > active else loss
            if training.job.clip_norm is not None:
                gradients = clip(gradients, training.job.clip_norm)
            if training.adjusts:
                gradients = self._adjusted(gradients, optimizer.stacks, local)
            optimizer.step(gradients)
        self._keep(optimizer.stacks, final, 0, active)
        return self._cohort(task, clients, final, losses, local, kept)

    def _cohort(
        self, task: Task, clients: Ints, final: list[Tensor], losses: Tensor, local: Local, kept: Kept
    ) -> Cohort:
        training, parameters = self.training, self.training.layout.parameters
        flat = torch.cat([stack.flatten(1) for stack in final[: len(self.shared)]], dim=1)
        deltas = flat - task.weights[:parameters]
        if parameters < training.layout.numel:  # buffers, which no client has changed
            deltas = torch.nn.functional.pad(deltas, (0, training.layout.numel - parameters))
        samples = self.deal.samples[clients]
        taken = training.work.step_counts(samples)
        each = torch.from_numpy(taken).to(training.layout.dtype).unsqueeze(1)
        returned = training.rule.finish(deltas[:, :parameters], each, local)
        kept.keep(clients, local.state, dict(zip(self.names, final, strict=True)))
        means = (losses / each[:, 0]).tolist()
        return Cohort(clients.tolist(), deltas, returned, samples.tolist(), taken.tolist(), means)

    def _stacks(self, task: Task, clients: Ints, kept: Kept) -> list[Tensor]:
        """Parameters of every client at the start, (k, …) each."""
        shared = self.training.layout.named(task.weights)
        stacks = [shared[name].expand(len(clients), *shared[name].shape).clone() for name in self.shared]
        return [*stacks, *kept.personal(clients)]

    @staticmethod
    def _keep(stacks: list[Tensor], final: list[Tensor], first: int, end: int) -> None:
        """Keep the parameters of clients that have taken their last step."""
        for stack, place in zip(stacks, final, strict=True):
            place[first:end] = stack[first:end]

    def _steps(self, clients: Ints, round: int) -> Iterator[tuple[Step, list[Tensor]]]:
        """Each local step with the parts of its samples, (rows, width, …) each."""
        known, layout = clients.tobytes(), self.training.layout
        table = self._timetables.get(known)
        if table is None:
            if len(self._timetables) >= _MOST_TIMETABLES:
                self._timetables.clear()
            together = _READ_BYTES // self.samples.sample_bytes
            table = Timetable(self.training.work, self.deal, clients, together, layout.dtype)
            self._timetables[known] = table
        for block in table.blocks:
            parts = [part.split(block.sizes) for part in self.samples.at(table.samples(block, round))]
            for number, step in enumerate(block.steps):
                yield step, [part[number].unflatten(0, (step.rows, step.width)) for part in parts]

    def _gradients(self, inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Gradients (k, …) and losses (k,) of a step, from stacks, parts of samples, and shares."""
        key = tuple([tensor.shape for tensor in inputs])
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.clear()
            graph = self._graphs[key] = self._traced(inputs)
        *gradients, losses = graph(*inputs)
        return gradients, losses

    def _adjusted(self, gradients: list[Tensor], stacks: list[Tensor], local: Local) -> list[Tensor]:
        k, shared = len(stacks[0]), len(self.shared)
        flat = torch.cat([gradient.flatten(1) for gradient in gradients[:shared]], dim=1)
        parameters = torch.cat([stack.flatten(1) for stack in stacks[:shared]], dim=1)
        state = {name: tensor[:k] for name, tensor in local.state.items()}
        self.training.rule.adjust(flat, parameters, Local(local.start, local.sent, local.lr, state))
        parts = flat.split(self.training.layout.sizes[:shared], dim=1)
        return [part.view_as(old) for part, old in zip(parts, gradients, strict=False)] + gradients[shared:]

    def _traced(self, inputs: list[Tensor]) -> Callable[..., Any]:
        """One step's gradients as plain operations on stacks of these shapes."""
        model, count = self.training.model.train(), len(self.names)
        held = tensors_of(model)
        constants = {name: held[name].detach() for name in held if name not in self.names}
        versions = {name: tensor._version for name, tensor in constants.items()}

        def loss_of(parameters: list[Tensor], parts: list[Tensor], shares: Tensor) -> Tensor:
            batch, named = self.samples.batch(parts), dict(zip(self.names, parameters, strict=True))

            def forward(*args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(model, {**constants, **named}, args, kwargs)

            output = call(forward, batch, loss=self.training.loss)
            return shared_loss(self.training.loss, output, batch, shares, all_counted=self._all_counted)

        def step(*tensors: Tensor) -> list[Tensor]:
            vectorised = torch.func.vmap(torch.func.grad_and_value(loss_of), randomness="different")
            gradients, loss = vectorised(list(tensors[:count]), list(tensors[count:-1]), tensors[-1])
            return [*gradients, loss]

        try:
            graph = traced(step, inputs)
        except PacelineError:
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise CannotBatch(f"torch.func.vmap refuses it ({type(error).__name__}: {first[:200]})") from error
        written = [name for name, tensor in constants.items() if tensor._version != versions[name]]
        if written:
            raise CannotBatch(f"its forward pass writes the buffer {written[0]}")
        return graph


def why_not(training: LocalTraining) -> str | None:
    """Reason for clients of a job to train in turn; None without a known one."""
    for name, module in training.model.named_modules():
        if isinstance(module, _COUPLED):
            return f"{name or 'the model'} is a {type(module).__name__}, which mixes the samples of a batch"
    if not isinstance(training.loss, CrossEntropy | Elementwise):
        return f"the loss {training.job.loss.name} is not known to be a mean over samples"
    if training.job.optimizer.name in ("lars", "lamb"):
        return f"{training.job.optimizer.name} scales steps by norms of whole layers"
    return None


def shared_loss(loss: Any, output: Any, batch: Any, shares: Tensor, *, all_counted: bool) -> Tensor:
    """Loss of a batch (b, …) by each sample's share (b,), 0 for padded ones.

    Args:
        all_counted: no label is left out, so that all samples have equally many.
    """
    target = target_of(batch)
    if isinstance(loss, Elementwise):
        values, wanted = in_one_shape(loss.name, output, target)
        each = loss.mean(values, wanted, reduction="none")  # type: ignore[call-arg]
        each = each.flatten(1).mean(dim=1) if each.dim() > 1 else each
        return (each * shares).sum()
    if all_counted and loss.weight is None and not loss.label_smoothing:
        picked = _picked(*classes_on_dim_1(logits_of(output), target))
        if picked.numel() == len(shares):
            return -(picked.reshape(len(shares)) * shares).sum()
        return -(picked.reshape(len(shares), -1).mean(dim=1) * shares).sum()
    padding = (shares == 0).view(-1, *[1] * (target.dim() - 1))
    counted = torch.where(padding, IGNORED, target)
    logits, labels = classes_on_dim_1(logits_of(output), counted)
    weight = None if loss.weight is None else loss.weight.to(logits.dtype)
    total = F.cross_entropy(
        logits, labels, weight=weight, ignore_index=IGNORED, label_smoothing=loss.label_smoothing, reduction="sum"
    )
    items = loss.items(counted)
    return total / torch.where(items > 0, items, 1)


def _picked(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label; logits have the classes on dimension 1."""
    if logits.dim() == 2 and logits.shape[1] < _NARROW:
        by_class = F.log_softmax(logits.t().contiguous(), dim=0)
        return by_class.gather(0, labels.unsqueeze(0))
    return F.log_softmax(logits, dim=1).gather(1, labels.unsqueeze(1))
