"""Local training of many clients side by side, by `torch.func.vmap` on stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import Dataset

from paceline.data.samples import RequestedSamples
from paceline.errors import DataError, PacelineError
from paceline.job.batch import Batch, target_of
from paceline.job.loss_items import IGNORED, call, classes_on_dim_1, logits_of
from paceline.job.loss_items import same_shape as in_one_shape
from paceline.job.optimizer import OptimizerSpec
from paceline.job.samples import Selection, TensorSamples
from paceline.job.zoo.losses import CrossEntropy, Elementwise
from paceline.own_random import kept_random
from paceline_federated.client import Ints, LocalTraining, Work, drawing_from, keys, one_key, tensors_of
from paceline_federated.rules import Local, Task
from paceline_federated.server import Cohort
from paceline_federated.simulated_clients import Deal, Kept

_AT_ONCE_BYTES = 2**28  # maximum bytes of the stacked parameters of clients that train together
_READ_BYTES = 2**24  # maximum bytes of samples that are read together
_MOST_GRAPHS, _MOST_TIMETABLES = 256, 4
_NARROW = 16  # number of classes, below which torch's softmax on CPUs is slow along the last dimension
_TOGETHER = 2  # purpose of random numbers: training of clients side by side
_COUPLED = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class CannotBatch(Exception):
    """The model cannot train in a batch of clients. The message gives the reason."""


class Batched:
    """Local training of several clients side by side.

    Raises:
        CannotBatch: padding or stacking would change the results of the job's model, loss or optimizer, because it
            combines samples or layers.
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
        """Train clients with samples, in groups that fit into memory, and return their updates."""
        numbers = np.asarray(clients, np.int64)
        totals = self.training.work.step_counts(self.deal.samples[numbers])
        numbers = numbers[np.argsort(-totals, kind="stable")]
        row_bytes = 8 * self.training.layout.numel * self.training.layout.dtype.itemsize
        together = max(1, _AT_ONCE_BYTES // row_bytes)
        parts = [numbers[start : start + together] for start in range(0, len(numbers), together)]
        with drawing_from(one_key(self.training.job.seed, _TOGETHER, task.round)), torch.no_grad():
            return [self._train(task, part, kept) for part in parts]

    def _checked(self) -> bool:
        """Return True if every label is known to be valid and no label is ignored.

        Raises:
            DataError: a label is out of range. The message names the label.
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
        if parameters < training.layout.numel:  # buffers that clients do not change
            deltas = torch.nn.functional.pad(deltas, (0, training.layout.numel - parameters))
        samples = self.deal.samples[clients]
        taken = training.work.step_counts(samples)
        each = torch.from_numpy(taken).to(training.layout.dtype).unsqueeze(1)
        returned = training.rule.finish(deltas[:, :parameters], each, local)
        kept.keep(clients, local.state, dict(zip(self.names, final, strict=True)))
        means = (losses / each[:, 0]).tolist()
        return Cohort(clients.tolist(), deltas, returned, samples.tolist(), taken.tolist(), means)

    def _stacks(self, task: Task, clients: Ints, kept: Kept) -> list[Tensor]:
        """Stack the initial parameters of k clients, each of shape (k, …)."""
        shared = self.training.layout.named(task.weights)
        stacks = [shared[name].expand(len(clients), *shared[name].shape).clone() for name in self.shared]
        return [*stacks, *kept.personal(clients)]

    @staticmethod
    def _keep(stacks: list[Tensor], final: list[Tensor], first: int, end: int) -> None:
        """Store the parameters of clients that have taken their last step."""
        for stack, place in zip(stacks, final, strict=True):
            place[first:end] = stack[first:end]

    def _steps(self, clients: Ints, round: int) -> Iterator[tuple[Step, list[Tensor]]]:
        """Iterate over local steps with their samples' parts, each of shape (rows, width, …)."""
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
        """Compute the gradients and losses of a step, of shapes (k, …) and (k,)."""
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
        """Trace the gradients of one step to plain operations on stacks of these shapes."""
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
    """Return a known reason why a job's clients must train one by one, or None."""
    for name, module in training.model.named_modules():
        if isinstance(module, _COUPLED):
            return f"{name or 'the model'} is a {type(module).__name__}, which mixes the samples of a batch"
    if not isinstance(training.loss, CrossEntropy | Elementwise):
        return f"the loss {training.job.loss.name} is not known to be a mean over samples"
    if training.job.optimizer.name in ("lars", "lamb"):
        return f"{training.job.optimizer.name} scales steps by norms of whole layers"
    return None


def shared_loss(loss: Any, output: Any, batch: Any, shares: Tensor, *, all_counted: bool) -> Tensor:
    """Compute the loss of a batch, weighted by each sample's share, of shape (b,).

    Args:
        all_counted: True if no label is ignored, so all samples have the same number of labels.
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
    """Return the log-probability of each label. Dim 1 of the logits has the classes."""
    if logits.dim() == 2 and logits.shape[1] < _NARROW:
        by_class = F.log_softmax(logits.t().contiguous(), dim=0)
        return by_class.gather(0, labels.unsqueeze(0))
    return F.log_softmax(logits, dim=1).gather(1, labels.unsqueeze(1))


_TABLE = 2**23  # maximum number of entries in a table of orders; larger tables are made client by client


@dataclass(frozen=True)
class Step:
    """One local step of several clients.

    Attributes:
        clients: number of leading clients that take this step.
        rows: number of clients including padding; samples of padding do not count.
        width: number of samples per client, including padding.
        shares: share of each sample in its client's mean loss, of shape (rows, width); 0 for padding.
    """

    clients: int
    rows: int
    width: int
    shares: Tensor


@dataclass(frozen=True)
class Block:
    """Consecutive steps whose samples are read together.

    Attributes:
        positions: position of each sample in the order of its epoch, step by step, row by row.
        starts: for each sample, the offset of its client in the deal.
        epochs: epochs of the clients. If there are several, each epoch has the positions of its samples.
    """

    steps: list[Step]
    positions: Ints
    starts: Ints
    epochs: list[tuple[int, Ints | None]]

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each step."""
        return [step.rows * step.width for step in self.steps]


class Timetable:
    """Steps of clients in a round, without the order of their samples.

    Args:
        clients: the clients, sorted by descending number of steps.
        together: maximum number of samples of a block; a single step may have more.
    """

    def __init__(self, work: Work, deal: Deal, clients: Ints, together: int, dtype: torch.dtype) -> None:
        self.deal, self._orders = deal, _Orders(work.seed, clients, deal.samples[clients])
        self.blocks = list(self._blocks(work, clients, together, dtype))

    def samples(self, block: Block, round: int) -> Ints:
        """Return a block's indices in the training set, in the order of `Work.batches`."""
        if len(block.epochs) == 1:
            taken = self._orders.of(round, block.epochs[0][0])[block.positions]
        else:
            taken = np.empty_like(block.positions)
            for epoch, mine in block.epochs:
                taken[mine] = self._orders.of(round, epoch)[block.positions[mine]]
        found: Ints = self.deal.indices[block.starts + taken]
        return found

    def _blocks(self, work: Work, clients: Ints, together: int, dtype: torch.dtype) -> Iterator[Block]:
        held: list[tuple[Step, Ints, Ints, Ints]] = []
        for entry in self._steps(work, clients, dtype):
            if held and sum(positions.size for _, positions, _, _ in held) + entry[1].size > together:
                yield _joined(held)
                held = []
            held.append(entry)
        if held:
            yield _joined(held)

    def _steps(self, work: Work, clients: Ints, dtype: torch.dtype) -> Iterator[tuple[Step, Ints, Ints, Ints]]:
        """Iterate over steps with their samples' positions, starts and epochs."""
        samples, starts = self.deal.samples[clients], self.deal.ends[clients]
        per_epoch, totals = -(-samples // work.batch), work.step_counts(samples)
        for number in range(int(totals[0])):
            active = int(np.searchsorted(-totals, -number, side="left"))
            rows = min(padded(active), len(clients))
            who = np.where(np.arange(rows) < active, np.arange(rows), 0)
            epoch, within = np.divmod(number, per_epoch[who])
            begin = within * work.batch
            counts = np.where(np.arange(rows) < active, np.minimum(samples[who] - begin, work.batch), 0)
            width = padded(int(counts.max()))
            places = np.minimum(begin[:, None] + np.arange(width), samples[who, None] - 1)
            mean = np.where(np.arange(width) < counts[:, None], 1.0 / np.maximum(counts, 1)[:, None], 0.0)
            step = Step(active, rows, width, torch.from_numpy(mean).to(dtype))
            of_client = np.broadcast_to(starts[who, None], places.shape)
            yield step, self._orders.base[who, None] + places, of_client, np.broadcast_to(epoch[:, None], places.shape)


def padded(number: int) -> int:
    """Round `number` up by at most an eighth, so that few distinct values occur."""
    unit = 1 << max(number.bit_length() - 4, 0)
    return -(-number // unit) * unit


def _joined(held: list[tuple[Step, Ints, Ints, Ints]]) -> Block:
    steps, *columns = zip(*held, strict=True)
    positions, starts, epochs = (np.concatenate([array.ravel() for array in column]) for column in columns)
    several = np.unique(epochs)
    chosen = [(int(epoch), None if len(several) == 1 else np.flatnonzero(epochs == epoch)) for epoch in several]
    return Block(list(steps), positions, starts, chosen)


class _Orders:
    """Sample orders of several clients, concatenated in a flat array.

    Attributes:
        base: offset of each client's order in the array.
    """

    def __init__(self, seed: int, clients: Ints, samples: Ints) -> None:
        self.seed, self.clients, self.samples = seed, clients, samples
        self._longest = int(samples.max())
        self._ragged = len(samples) * self._longest > _TABLE
        self.base = (
            np.concatenate([[0], np.cumsum(samples)[:-1]])
            if self._ragged
            else np.arange(len(samples), dtype=np.int64) * self._longest
        )
        self._made: dict[tuple[int, int], Ints] = {}

    def of(self, round: int, epoch: int) -> Ints:
        """Return the clients' sample orders in one epoch of a round."""
        if (found := self._made.get((round, epoch))) is None:
            if len(self._made) >= 4:
                self._made.clear()
            found = self._made[round, epoch] = self._ordered(round, epoch)
        return found

    def _ordered(self, round: int, epoch: int) -> Ints:
        if self._ragged:
            each = zip(self.clients.tolist(), self.samples.tolist(), strict=True)
            drawn = [keys(self.seed, round, epoch, client, np.arange(count)) for client, count in each]
            return np.concatenate([np.argsort(one, kind="stable") for one in drawn])
        table = keys(self.seed, round, epoch, self.clients[:, None], np.arange(self._longest))
        table[np.arange(self._longest) >= self.samples[:, None]] = np.iinfo(np.uint64).max
        return np.argsort(table, axis=1, kind="stable").ravel()


class StackedOptimizer:
    """New optimizer of the job for stacked parameters of shape (k, …).

    Attributes:
        stacks: the stacked parameters, which `narrow` replaces.
    """

    def __init__(self, spec: OptimizerSpec, lr: float, stacks: list[Tensor]) -> None:
        self.spec, self.lr, self.stacks = spec, lr, stacks
        self._velocity: list[Tensor] = []
        self._adam: torch.optim.Optimizer | None = None
        if spec.name != "sgd":
            self._parameters = [nn.Parameter(stack) for stack in stacks]
            self._adam = spec.model_copy(update={"lr": lr}).build(self._parameters)

    def step(self, gradients: list[Tensor]) -> None:
        """Take one step with gradients of the same shapes as the stacks."""
        if self._adam is not None:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._adam.step()
            return
        if self.spec.weight_decay:
            gradients = list(torch._foreach_add(gradients, self.stacks, alpha=self.spec.weight_decay))
        if self.spec.momentum:
            gradients = self._with_momentum(gradients)
        torch._foreach_add_(self.stacks, gradients, alpha=-self.lr)

    def narrow(self, rows: int) -> None:
        """Keep only the first rows of each stack."""
        if rows >= len(self.stacks[0]):
            return
        self.stacks = [stack[:rows] for stack in self.stacks]
        self._velocity = [velocity[:rows] for velocity in self._velocity]
        if self._adam is not None:
            for parameter, stack in zip(self._parameters, self.stacks, strict=True):
                state = self._adam.state[parameter]
                shape = parameter.shape
                parameter.grad = None
                parameter.data = stack
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == shape:
                        state[key] = value[:rows]

    def _with_momentum(self, gradients: list[Tensor]) -> list[Tensor]:
        if not self._velocity:
            self._velocity = [gradient.clone() for gradient in gradients]
        else:
            torch._foreach_mul_(self._velocity, self.spec.momentum)
            torch._foreach_add_(self._velocity, gradients)
        if not self.spec.nesterov:
            return self._velocity
        return list(torch._foreach_add(gradients, self._velocity, alpha=self.spec.momentum))


def clip(gradients: list[Tensor], most: float) -> list[Tensor]:
    """Clip each client's gradients, of shape (k, …), to an L2 norm of at most `most`."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    return [gradient * factors.view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]


_KEPT_BYTES = 2**30  # maximum bytes of a training set that stays in memory in the model's format


class Samples:
    """Batches of a training set as lists of tensors, samples on dim 0.

    Args:
        dtype: dtype of floating-point parts; None leaves them unchanged.

    Attributes:
        names: names of the parts if samples are mappings; otherwise None.
        sample_bytes: bytes of one sample's parts.
        whole: parts of all samples if they stay in memory; otherwise None.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, dtype: torch.dtype | None) -> None:
        self._reader, self.dtype = RequestedSamples(dataset, None, 0, seed), dtype
        first = self._read(np.zeros(1, np.int64))
        self.names = tuple(first) if isinstance(first, Mapping) else None
        self.whole: list[Tensor] | None = None
        self.sample_bytes = max(1, sum(part.nbytes for part in self.parts(first)))
        samples = len(dataset)  # type: ignore[arg-type]
        if _never_changes(dataset) and self.sample_bytes * samples <= _KEPT_BYTES:
            self.whole = self.parts(self._read(np.arange(samples)))

    def at(self, indices: Ints) -> list[Tensor]:
        """Return the parts of a batch of samples."""
        if self.whole is None:
            return self.parts(self._read(indices))
        rows = torch.from_numpy(indices)
        return [part.index_select(0, rows) for part in self.whole]

    def batch(self, parts: Sequence[Tensor]) -> Batch:
        """Convert parts to a batch for the model and the loss."""
        return tuple(parts) if self.names is None else dict(zip(self.names, parts, strict=True))

    def parts(self, batch: Any) -> list[Tensor]:
        """Return the tensors of a batch.

        Raises:
            DataError: the parts of this batch differ from the parts of other batches.
        """
        held = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
        if not all(isinstance(part, Tensor) for part in held):
            raise DataError(
                "federate.samples_not_tensors",
                "samples of simulated clients must be tensors, in a tuple or a dict. Change collate so that it "
                "returns them.",
            )
        return [part.to(self.dtype) if self.dtype and part.is_floating_point() else part for part in held]

    def _read(self, indices: Ints) -> Any:
        return self._reader.read(indices.tolist())


def _never_changes(dataset: Any) -> bool:
    """Return True if a sample is the same each time it is read."""
    if isinstance(dataset, Selection):
        return _never_changes(dataset.dataset)
    return isinstance(dataset, TensorSamples)


_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_SHAPED = (_aten.expand.default, _aten.view.default, _aten._unsafe_view.default)
# Functions and methods that parse their arguments faster than the traced operators.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.bmm.default: torch.bmm,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.neg.default: torch.neg,
    _aten.relu.default: torch.relu,
    _aten.tanh.default: torch.tanh,
    _aten.exp.default: torch.exp,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.gather.default: torch.gather,
    _aten.scatter_add.default: torch.scatter_add,
    _aten.mean.dim: torch.mean,
    _aten.sum.dim_IntList: torch.sum,
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
}
_METHODS = {_aten.view.default: "view", _aten.expand.default: "expand", _aten.new_zeros.default: "new_zeros"}
_SCALED = (_aten.mul.Scalar, _aten.mul.Tensor, _aten.div.Scalar)


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Trace a function for inputs of these shapes to a sequence of operations.

    Calls of the traced function are several times faster than calls of a function that `torch.func` transformed.
    """
    with kept_random():
        graph = make_fx(function)(*inputs)
    for node in list(graph.graph.nodes):
        if (same := _unchanged(node)) is not None:
            node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()
    _keep_constants(graph)
    for node in graph.graph.nodes:
        if node.op == "call_function" and not node.kwargs:
            if node.target in _METHODS:
                node.op, node.target = "call_method", _METHODS[node.target]
            else:
                node.target = _FUNCTIONS.get(node.target, node.target)
    graph.recompile()
    forward: Callable[..., Any] = graph.forward
    return forward


def _unchanged(node: Node) -> Node | None:
    """Return the argument that a node returns unchanged, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    first = node.args[0]
    if node.target in _SAME:
        return first
    if node.target in _SHAPED:
        before, after = first.meta.get("tensor_meta"), node.meta.get("tensor_meta")
        return first if before is not None and after is not None and before.shape == after.shape else None
    if node.target in _SCALED and len(node.args) == 2 and type(node.args[1]) is int and node.args[1] == 1:
        before, after = first.meta.get("tensor_meta"), node.meta.get("tensor_meta")
        return first if before is not None and after is not None and before.dtype == after.dtype else None
    if node.target is _aten.transpose.int and first.target is _aten.transpose.int and first.args[1:] == node.args[1:]:
        return first.args[0] if isinstance(first.args[0], Node) else None
    return None


def _keep_constants(graph: GraphModule) -> None:
    """Create one-element tensors only once, instead of in every call."""
    for number, node in enumerate(list(graph.graph.nodes)):
        if node.op == "call_function" and node.target is _aten.scalar_tensor.default:
            name = f"_constant{number}"
            graph.register_buffer(name, _aten.scalar_tensor.default(*node.args, **node.kwargs))
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))
            graph.graph.erase_node(node)
