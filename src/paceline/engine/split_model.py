"""Forward and backward passes of a rank that holds a part of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm import Group
from paceline.data.loader import Loader, Position
from paceline.engine.calls import prepared
from paceline.engine.chunked_loss import Head, refuse_unless_auto
from paceline.engine.compute import Compute, LocalLoss, head_in
from paceline.engine.loss_normalization import NoGradient, graph_nodes
from paceline.errors import BatchError, PlanError
from paceline.job.batch import Batch, place, split, target_of
from paceline.job.loss import Loss, Metric
from paceline.job.loss_items import call, refused_batch
from paceline.planning.model.recorder import has_max_norm, restored, tensors_in
from paceline.planning.plan import DATA_AXES, Plan
from paceline.split.apply import Split
from paceline.split.cross_entropy import ParallelLoss, divides_classes
from paceline.split.deferred_init import DeferredModel, deferred_from
from paceline.split.mesh import Mesh
from paceline.sync.batchnorm import is_synchronised

if TYPE_CHECKING:
    from paceline.engine.guard import Settings


def divide(
    model: nn.Module | DeferredModel,
    plan: Plan,
    mesh: Mesh,
    loader: Loader,
    loss: Loss,
    settings: Settings,
    *,
    loaded: Collection[str] = (),
    inseparable: Mapping[str, str] | None = None,
) -> Split:
    """Return this rank's part of a model, for the batches that `loader` yields.

    If the model has weights, the weights are moved into the parts. The parameters of a `DeferredModel` that `loaded`
    names stay unset.

    Args:
        inseparable: `Split.inseparable` of an earlier division of this model. The undivided model is then not tried
            again, and its blocks are not searched again.
    """
    recorded = deferred_from(model) if isinstance(model, nn.Module) else model
    split = without_memory(recorded, plan, mesh, loader, loss, settings, inseparable)
    split.allocate(recorded, loaded=loaded)
    return split


def without_memory(
    recorded: DeferredModel,
    plan: Plan,
    mesh: Mesh,
    loader: Loader,
    loss: Loss,
    settings: Settings,
    inseparable: Mapping[str, str] | None = None,
) -> Split:
    """Return this rank's part of a model without memory; `Split.allocate` allocates it later."""
    precision = plan.precision or settings.precision
    recorded.model = prepared(recorded.model, settings.batch_norm, precision, mesh.group(*DATA_AXES))
    example = loader.example(max(1, loader.smallest_share() // plan.microbatches))
    wide = torch.float64 if precision == "fp64" else None
    example = place(example, torch.device("cpu"), dtype=wide, channels_last=False)
    if limited := next((n for n, m in recorded.model.named_modules() if has_max_norm(m)), None):
        raise PlanError(
            "plan.max_norm_divided",
            'plan {plan} divides the model, but "{name}" has max_norm, which changes weights during lookups. '
            "Divide only the batch (dp).",
            plan=plan,
            name=limited,
        )
    refused = _refused_by_undivided(recorded.model, example, loss) if inseparable is None else None
    head = None if refused is not None else head_in(recorded.model, loader, loss, plan, precision, example)
    remarks: list[str] = []
    if precision == "fp8":
        from paceline.split import float8  # imports torchao

        remarks.append(float8.mark(recorded.model, mesh.world.device))
    try:
        compute = partial(call, loss=loss)
        made = Split(recorded, plan, mesh, example, compute, precision=precision, inseparable=inseparable)
    except Exception as error:
        if refused is not None:
            raise refused from error
        raise
    made.refused, made.head, made.remarks = refused, head, remarks
    made.report += remarks
    if made.pipeline is not None and made.pipeline.by_export and is_synchronised(recorded.model):
        raise PlanError(
            "plan.sync_batch_norm_traced",
            "plan {plan}: torch.export traces the stages of this model without the communication between replicas, "
            "so batch_norm: sync would not use the global batch. Use pp=1, or batch_norm: local",
            plan=plan,
        )
    return made


class SplitModel(Compute):
    """A replica over several ranks, each with a part of the layers, matrices or tokens.

    Ranks that wait for each other compute the same number of microbatches. A rank without samples left in a step
    computes an example sample with weight 0.
    """

    split: Split
    reads: ShardReads

    def __init__(self, split: Split, loss: Loss, loader: Loader, plan: Plan, group: Group, precision: str) -> None:
        super().__init__(split.model, loss, loader, plan, group, split.mesh.group(*DATA_AXES), precision, split)
        self.casts = split.fully is not None and split.fully.casts
        self.normalization.remarks += split.remarks
        self.reads = ShardReads(split)
        # computed if no sample is left
        self._sample = _first(split.example)
        self._head = split.tensors.vocabulary_head if split.tensors is not None and divides_classes(loss) else None
        self.divides_logits = self._head is not None
        if self._head is not None and divides_classes(loss):
            # the loss needs only the sums over the vocabulary
            self._head.gather = False
            self.step_loss = ParallelLoss(loss, split.mesh.group("tp"))
        self._chunk(split.head)

    def forward_backward(self, batch: Batch | None, position: Position, step: int) -> LocalLoss:
        """See `Compute.forward_backward`."""
        local, count = LocalLoss(), self.split.microbatches(self.loader.partition.shares(position.step, position.epoch))
        if batch is None and not self.split.all_must_compute:
            return local
        if self.trims:
            whole = _repeated(self._sample, count) if batch is None else batch
            parts = self.place_parts(split(whole, count), position)
        else:
            placed = self.placed(batch, count)
            parts = list(split(placed, count))
        against = self.against_reference(parts)
        if (chunks := self.chunks) is not None and batch is not None:
            chunks.check(target_of(batch), self.here(step), self.loader.indices)
        if self.split.pipeline is not None:
            weigh = self.experts.weigh_each(parts if batch is not None else [None] * count, position)

            def begin(number: int) -> None:
                weigh(number)
                if chunks is not None:
                    chunks.target = self.normalization.target(parts[number])

            with nullcontext() if chunks is None else chunks.training():
                self.split.pipeline.forward_backward(
                    placed,
                    count,
                    lambda output, part, i: self._addend(local, output, part, batch, position, step, against[i]),
                    self.autocast,
                    begin,
                )
            return local
        for i, part in enumerate(parts):
            self.replica.backward.last = i == len(parts) - 1
            self.split.begin_microbatch(last=self.replica.backward.last)
            self.experts.weigh(part if batch is not None else None, position)
            with self.autocast():
                with nullcontext() if chunks is None else chunks.training(self.normalization.target(part)):
                    output = self.call(part)
                loss = self._addend(local, output, part, batch, position, step, against[i])
            if not step & (step - 1):
                self.reads.check(loss, everywhere=True)
            loss.backward()
        return local

    def output(self, batch: Batch | None, metrics: Sequence[Metric] = ()) -> tuple[Any, Batch] | None:
        """See `Compute.output`."""
        if batch is None and not self.split.all_must_compute:
            return None
        placed = self.placed(batch)
        if self._head is not None:
            self._head.gather = True
        with self.measuring(placed, metrics):
            output = self.forward_alone(placed)
        if self._head is not None:
            self._head.gather = False
        return (output, placed) if batch is not None and self.split.owns_loss else None

    def forward_alone(self, placed: Batch) -> Any:
        """See `Compute.forward_alone`."""
        pipeline = self.split.pipeline
        return self.call(placed) if pipeline is None else pipeline.forward(placed)

    def _addend(
        self,
        local: LocalLoss,
        output: Any,
        part: Batch,
        batch: Batch | None,
        position: Position,
        step: int,
        against: AbstractContextManager[None],
    ) -> Tensor:
        with self.reads, against:
            if batch is None:
                return NoGradient(self.step_loss(output, self.normalization.target(part))).loss
            loss, items = self.normalized_loss(output, part, batch, position, step)
        context, share = self.split.context, 1.0
        if context is not None and not context.whole and not self.normalization.counts:
            # Each sample counts once, although each rank has some of its tokens.
            items = items / context.group.size
            # If the ranks' losses already add up to the mean:
            share = context.group.size if context.own_loss or self.normalization.adds_up else 1.0
        scaled = loss * (items * share)
        if self.split.owns_loss:
            local.add(scaled.detach(), items)
        return scaled

    def _chunk(self, head: Head | None) -> None:
        """Let the head compute the loss in chunks, if the plan allows it."""
        split_, pipeline, tp = self.split, self.split.pipeline, None
        if head is not None and head.path is not None:
            name, reason = f"{head.path}.weight", ""
            if split_.context is not None and split_.context.whole:
                reason = "cp divides the rows of whole modules"
            elif pipeline is not None and pipeline.by_export:
                reason = "torch.export traces the pipeline stages"
            elif self._head is not None:
                tp = split_.mesh.group("tp")
            elif name in split_.parts and "tp" in split_.parts[name].sharded | split_.parts[name].summed:
                reason = f"tp divides {head.path} inside a region"
            if reason:
                refuse_unless_auto(self.loss, reason)
                head = Head(None, reason, f"the loss is computed from whole logits: {reason}")
        if pipeline is None or pipeline.has_last_stage:
            self.chunked(head, split_.modules[-1], tp)

    def placed(self, batch: Batch | None, count: int = 1) -> Batch:
        """See `Compute.placed`."""
        whole = _repeated(self._sample, count) if batch is None else batch
        if self.trims:
            return self.place_trimmed(whole)
        placed = self.place(whole)
        return self.split.context.shard(placed) if self.split.context is not None else placed


def _refused_by_undivided(model: nn.Module, example: Batch, loss: Loss) -> BatchError | None:
    """Return an error that explains why the undivided model cannot compute this batch.

    The result is None if the model can compute the batch, or if a run on meta tensors does not show the mistake.
    """
    try:
        with restored(model), torch.no_grad(), _KernelTypes():
            call(model, place(example, torch.device("meta"), dtype=None, channels_last=False), loss=loss)
    except (TypeError, RuntimeError) as error:
        return refused_batch(model, example, error, loss=loss)
    except Exception:  # noqa: BLE001 - whatever the user's model raises without weights
        return None
    return None


class _KernelTypes(TorchDispatchMode):
    """Refusal of products of two dtypes, which kernels reject but meta tensors accept."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.dtype for x in args if isinstance(x, Tensor)}
        if function.overloadpacket in _PRODUCTS and len(given) > 1:
            raise RuntimeError(f"a product needs one dtype, but got {' and '.join(sorted(map(str, given)))}")
        return function(*args, **kwargs or {})


_PRODUCTS = {getattr(torch.ops.aten, name) for name in ("linear", "mm", "addmm", "bmm", "baddbmm", "convolution")}


def _first(batch: Batch) -> Batch:
    return {k: v[:1] for k, v in batch.items()} if isinstance(batch, Mapping) else tuple(t[:1] for t in batch)


def _repeated(sample: Batch, count: int) -> Batch:
    if isinstance(sample, Mapping):
        return {k: v.repeat_interleave(count, dim=0) for k, v in sample.items()}
    return tuple(t.repeat_interleave(count, dim=0) for t in sample)


class ShardReads(TorchFunctionMode):
    """Check that refuses reads of parameter shards outside of the model.

    As a context, the check covers every operation that runs inside. `check` checks the autograd graph of a loss.
    """

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split
        self._names: dict[Tensor, str] = {p: name for name, p in split.divided.items()}
        self._depth = 0
        self._started = 0
        # intervals of autograd's sequence numbers, which count the nodes that a thread creates
        self._forwards: deque[tuple[int, int]] = deque(maxlen=10_000)
        self._differentiated = False
        # a pipeline stage has its own parameters, and calls the loss within its forward pass
        for module in self._modules() if split.pipeline is None else ():
            split.on_close(module.register_forward_pre_hook(self._enter, prepend=True).remove)
            split.on_close(module.register_forward_hook(self._leave, always_call=True).remove)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Refuse an operation outside of the model that computes a tensor from a shard."""
        kwargs = kwargs or {}
        read = None if self._depth else next(filter(None, map(self._shard, _parameters(args, kwargs))), None)
        if read is None:
            return func(*args, **kwargs)
        try:
            made = func(*args, **kwargs)
        except RuntimeError as error:  # for instance, a shard and a whole copy have different shapes
            raise self._refusal(read) from error
        if tensors_in(made):
            raise self._refusal(read)
        return made

    def check(self, loss: Tensor, *, everywhere: bool) -> None:
        """Refuse a loss whose graph reads shards outside of the model's forward pass.

        Args:
            everywhere: True also checks the nodes of the model's forward passes for reads of FSDP shards, and the nodes
                that computed the model's inputs. This takes longer.

        Raises:
            PlanError: the loss reads a shard; the message names the parameter.
        """
        for node in graph_nodes(loss, (lambda n: True) if everywhere else lambda n: not self._by_model(n)):
            for below, _ in node.next_functions:
                parameter = getattr(below, "variable", None)
                if parameter is None or (read := self._shard(parameter)) is None:
                    continue
                # a gradient of the model's output is also computed from shards
                if isinstance(parameter, DTensor) or not (self._differentiated or self._by_model(node)):
                    raise self._refusal(read)

    def _modules(self) -> Iterator[nn.Module]:
        """Yield the model and its layers with shards, which a loop may call directly."""
        for module in self._split.modules:
            yield module
            # hooks on layers would break the graph of a compiled block
            for layer in module.modules() if self._split.plan.compile == "off" else ():
                if layer is not module and any(map(self._is_part, layer.parameters(recurse=False))):
                    yield layer

    def _shard(self, parameter: Tensor) -> str | None:
        """Describe a parameter that this rank holds only in part; None if it is whole."""
        split = self._split
        if split.pipeline is not None:
            # the undivided model has no memory; the stages have parameters of their own
            return "parameters of the model" if parameter.is_meta else None
        if parameter not in self._names and split.fully is not None:
            # while fsdp holds gathered parameters, the modules' parameters are other objects
            self._names |= {p: name for module in split.modules for name, p in module.named_parameters()}
        divided = isinstance(parameter, DTensor) or self._is_part(parameter)
        return f"the parameter {self._names[parameter]}" if divided and parameter in self._names else None

    def _is_part(self, parameter: Tensor) -> bool:
        """Return True if tp or ep divides a parameter or its gradient over ranks."""
        if parameter not in self._names:
            return False
        part = self._split.parts[self._names[parameter]]
        return "tp" in part.sharded | part.summed or "ep" in part.sharded

    def _by_model(self, node: Any) -> bool:
        number = node._sequence_nr()
        newest = next((interval for interval in reversed(self._forwards) if interval[0] <= number), None)
        return newest is not None and number < newest[1]

    def _enter(self, *_: Any) -> None:
        if not self._depth:
            self._started = _next_number()
        self._depth += 1

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        stop = _next_number()
        if self._depth or stop == self._started:
            return
        self._forwards.append((self._started, stop))
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._differentiate)

    def _differentiate(self, _: Any) -> None:
        # gradients are only enabled in a backward pass with create_graph
        self._differentiated |= torch.is_grad_enabled()

    def _refusal(self, read: str) -> PlanError:
        plan, ranks = self._split.plan, self._split.mesh.world.size
        within = "" if plan.ep > 1 else ", or compute this in the model's forward pass and return it with the output"
        only_fsdp = plan.fsdp > 1 and plan.zero == 3 and {plan.tp, plan.ep, plan.pp} == {1}
        whole = replace(plan, zero=2) if only_fsdp else f"dp={ranks} or fsdp={ranks} zero=2"
        return PlanError(
            "plan.parameter_read_outside",
            "plan {plan}: the loss reads {name} outside of the model's forward pass. There, this rank holds only a "
            "part, so the loss or its gradient would be wrong. Use {whole}{within}. For an L2 penalty you can also "
            "set the optimizer's weight_decay.",
            plan=plan,
            name=read,
            whole=whole,
            within=within,
        )


def _next_number() -> int:
    """Return the sequence number of the next node that this thread adds to a graph."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _parameters(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[nn.Parameter]:
    for value in chain(args, kwargs.values()):
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(leaf, nn.Parameter):
                yield leaf
