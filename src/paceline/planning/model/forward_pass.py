"""Observation of a forward pass of a model and its loss, part by part.

A part is a repeated block, or all modules before, between or after repeated blocks.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from paceline.errors import DataError, PacelineError
from paceline.job.batch import Batch, target_of
from paceline.job.data import Cifar10, Digits, Images, Synthetic, Text
from paceline.job.job import Job
from paceline.job.loss_items import call, loss_before_training
from paceline.planning.model.graph import Kernel, Product, Seen
from paceline.planning.model.record import OperationMode
from paceline.planning.model.recorder import map_tensors, tensors_in


@dataclass
class Pass:
    """A forward pass, and what the watcher observes during it.

    Attributes:
        samples: number of samples in the batch.
        autocast: True for a pass under bf16 autocast.
        error: exception raised by the model's code; None if the pass succeeded.
    """

    model: nn.Module
    batch: Batch
    samples: int
    autocast: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.watcher = Watcher(self.model, 2 if self.autocast else None)
        self.seen = self.watcher.seen
        self.seen.samples, self.seen.tokens = self.samples, tokens_of(self.batch)

    def module_of(self, error: Exception) -> str:
        """Return the name and class of the innermost module in a traceback."""
        names, found = {id(module): name for name, module in self.model.named_modules()}, "the model"
        frames = error.__traceback__
        while frames is not None:
            asking = frames.tb_frame.f_locals.get("self")
            if names.get(id(asking)):
                found = f"{names[id(asking)]} ({type(asking).__name__})"
            frames = frames.tb_next
        return found

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> bool:
        """Store and suppress exceptions of the user's code. Paceline's own exceptions propagate."""
        if not isinstance(error, Exception) or isinstance(error, PacelineError):
            return False
        self.error = error
        return True


def go_forward(forward: Pass, job: Job) -> Pass:
    """Run the forward pass of a model and its loss as the engine does.

    Raises:
        JobError, DataError: the loss detects an error in the job or its data.
    """
    model, batch = forward.model.train(), forward.batch
    loss = job.loss.build()
    _route_evenly(forward)
    with forward, ExitStack() as stack:
        stack.enter_context(_following(forward))
        stack.enter_context(forward.watcher.watching(batch))
        if forward.autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        loss_before_training(loss, call(model, batch, loss=loss), target_of(batch))
    return forward


@contextmanager
def _following(forward: Pass) -> Iterator[None]:
    """Set the watcher's `part` whenever a repeated block begins or ends."""
    hooks = []
    for name in find_blocks(forward.model):
        module = forward.model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(partial(_enter, forward, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(_leave, forward)))
    for name, module in forward.model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            hooks.append(module.register_forward_pre_hook(partial(_look_up, forward, name), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _enter(forward: Pass, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    forward.seen.parts.append(name)
    forward.watcher.part = len(forward.seen.parts) - 1
    forward.seen.entered[forward.watcher.part] = _numbers(forward, (args, kwargs))


def _leave(forward: Pass, module: nn.Module, args: Any, output: Any) -> None:
    forward.seen.left[forward.watcher.part] = _numbers(forward, output)
    forward.seen.parts.append("")
    forward.watcher.part = len(forward.seen.parts) - 1


def _look_up(
    forward: Pass, name: str, module: nn.Embedding | nn.EmbeddingBag, args: Any, kwargs: dict[str, Any]
) -> None:
    index = args[0] if args else kwargs["input"]
    _, _, before = forward.seen.ids.get(name, (0, 0, 0.0))
    ids = before + index.numel() / forward.samples
    forward.seen.ids[name] = module.num_embeddings, module.embedding_dim, ids


def _numbers(forward: Pass, tree: Any) -> float:
    """Count the elements of the first floating-point tensor in `tree`.

    This tensor is assumed to be the one that is passed from block to block.
    """
    passed = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return next((forward.watcher.numbers(tensor) for tensor in passed), 0.0)


def _route_evenly(forward: Pass) -> None:
    """Route tokens to all experts evenly, because the real routing is unknown."""
    if hasattr(forward.model, "set_experts_implementation"):
        # the faster implementation has a kernel that reads values
        forward.model.set_experts_implementation("eager")  # type: ignore[operator]
    for _, module in mixtures(forward.model):
        module.forward = partial(_in_turn, forward, module.forward, module.num_experts)


def _in_turn(
    watched: Pass, forward: Callable[..., Tensor], total: int, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Run a mixture's experts with evenly distributed indices.

    The indices are tensors with values, because the model's code may read them.
    """
    # the argument order differs from that of transformers and the zoo
    if index.is_floating_point():
        return forward(hidden, index, weights)
    routed, part = watched.seen.routed, watched.watcher.part
    routed[part] = routed.get(part, 0.0) + index.numel() * hidden.shape[-1]
    with _disable_current_modes():
        even = (torch.arange(index.numel(), device="cpu") % total).view(index.shape)
        with watched.watcher.operations:
            return forward(hidden, even, weights)


_NUMBERED = re.compile(r"(.*?)\d+")
_EXPERTS = re.compile("expert", re.IGNORECASE)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_Found = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's repeated blocks in registration order. Blocks are never nested.

    Blocks are two or more modules of the same class in lists, each with at least two weight matrices. Examples are the
    layers of a transformer and the residual layers in the stages of a ResNet. A list is a `ModuleList`, a `Sequential`,
    or children such as `layer1`, `layer2`. If the items of a list contain only lists of blocks, the items are stages,
    and the blocks inside them are returned. Experts of a mixture belong to their block. They are recognised by the word
    "expert" in the name of their list.

    If a model has no such blocks, single layers with a weight matrix are returned, as in `Sequential(Linear, Tanh,
    Linear)`. This requires that layers in lists contain at least half of the model's parameters. A pipeline can be cut
    at such layers.

    The function runs no forward pass and reads no weights, so it works on the meta device. The result is [] if no
    module is repeated.
    """
    blocks = _repeated(list(_in_lists(model, "", matrices=2)))
    if not blocks:
        blocks = _repeated(list(_in_lists(model, "", matrices=1)))
        if 2 * _parameters(blocks) < sum(p.numel() for p in model.parameters()):
            return []
    return [name for name, _ in blocks]


def mixtures(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that hold all experts of a mixture in one tensor.

    Such a module has an attribute `num_experts` of at least two. Dim 0 of each of its own parameters has the size
    `num_experts`, and at least one parameter has three dimensions. The module is called with tokens, expert indices and
    weights.
    """
    return ((name, module) for name, module in model.named_modules() if _is_experts(module))


def _is_experts(module: nn.Module) -> bool:
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(count, int) or count < 2 or not any(p.dim() == 3 for p in own):
        return False
    if any(p.shape[:1] != (count,) for p in own):
        return False
    wanted = inspect.signature(module.forward).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in wanted) == 3


def submodules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules with these names.

    Raises:
        AttributeError: the model has no module of that name.
    """
    return [model.get_submodule(name) for name in names]


def _in_lists(module: nn.Module, prefix: str, *, matrices: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost list items that have at least `matrices` weight matrices.

    If an item is a stage, the blocks inside it are yielded instead.
    """
    listed = _listed(module)
    # a module that is registered twice is yielded once
    for name, child in module.named_children():
        if _EXPERTS.search(name):
            continue
        if name not in listed or isinstance(child, _WITHOUT_FORWARD) or (matrices > 1 and _is_stage(child)):
            yield from _in_lists(child, f"{prefix}{name}.", matrices=matrices)
        elif _matrices(child) >= matrices:
            yield prefix + name, child


def _listed(module: nn.Module) -> set[str]:
    """Return the names of the children that form a list, such as `layer1`, `layer2`."""
    stems = {name: found[1] for name in _with_parameters(module) if (found := _NUMBERED.fullmatch(name))}
    often = Counter(stems.values())
    return {name for name, stem in stems.items() if not stem or often[stem] > 1}


def _is_stage(item: nn.Module) -> bool:
    """True if a list item is a stage of several blocks rather than a block.

    A stage has one list of blocks, and otherwise only modules that connect stages. Blocks differ from stages: a
    transformer's block has its own norms or gates, the list in a residual layer contains single layers, and the list in
    a block of T5 contains modules of different classes.
    """
    if _is_list_of_blocks(item):
        return True
    children = _with_parameters(item)
    lists = [name for name, child in children.items() if not _EXPERTS.search(name) and _is_list_of_blocks(child)]
    own = any(True for _ in item.parameters(recurse=False)) or any(
        not any(True for _ in child.children()) for child in children.values()
    )
    return len(lists) == 1 and not own


def _is_list_of_blocks(module: nn.Module) -> bool:
    items = _with_parameters(module)
    all_listed = len(_listed(module)) == len(items) > 0
    return (
        all_listed
        and len({type(item) for item in items.values()}) == 1
        and all(_matrices(item) > 1 for item in items.values())
    )


def _with_parameters(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}


def _repeated(found: _Found) -> _Found:
    often = Counter(type(module) for _, module in found)
    return [(name, module) for name, module in found if often[type(module)] > 1]


def _matrices(module: nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def _parameters(found: _Found) -> int:
    return sum(parameter.numel() for _, module in found for parameter in module.parameters())


def batch_of(job: Job, samples: int, device: str = "meta") -> Batch:
    """Return a batch with the shapes of the job's data, but without values.

    Raises:
        DataError, JobError: the shapes are known only from a sample, and no sample can be read.
    """
    sample = _collated_sample(job) if job.data.collate is not None else _sample(job)
    if isinstance(sample, Mapping):
        return {name: _batched(part, samples, device) for name, part in sample.items()}
    return tuple(_batched(part, samples, device) for part in sample)


def with_values(batch: Batch) -> Batch:
    """Return a copy of a batch with values.

    Integers are 0, masks are 1, and floating-point values are random numbers in [0, 1).
    """

    def real(part: Tensor, name: str = "") -> Tensor:
        if part.is_floating_point():
            return torch.rand(part.shape, dtype=part.dtype)
        return torch.full(part.shape, int("mask" in name), dtype=part.dtype)

    if isinstance(batch, Mapping):
        return {name: real(part, name) for name, part in batch.items()}
    return tuple(map(real, batch))


def tokens_of(batch: Batch) -> int:
    """Return the length of the sequences in a batch; 1 without sequences of tokens."""
    first = (
        next((part for name, part in batch.items() if name == "input_ids"), None)
        if isinstance(batch, Mapping)
        else batch[0]
    )
    return first.shape[1] if first is not None and first.dim() == 2 and not first.is_floating_point() else 1


def _sample(job: Job) -> Any:
    data, wanted = job.data, job.model.input_shape()
    whole = torch.int64
    if isinstance(data, Text):
        return _made((data.context,), whole), _made((data.context,), whole)
    if isinstance(data, Synthetic) and data.vocab and data.shape:
        return _made(data.shape, whole), _made(data.shape, whole)
    shape = wanted if isinstance(data, Cifar10) else getattr(data, "shape", None) or wanted
    if isinstance(data, Digits):
        shape = shape or (1, 8, 8)
    if isinstance(data, Cifar10):
        shape = shape or (3, 32, 32)
    if shape and isinstance(data, (Digits, Cifar10, Images, Synthetic)):
        return _made(shape, torch.float32), _made((), whole)
    from paceline.job.streams import with_few

    return with_few(job.data.build(input_shape=wanted, seed=job.seed), 1).train[0]


def _collated_sample(job: Job) -> Any:
    """Return one sample, collated with the job's own function, without the batch dimension."""
    from paceline.job.streams import with_few

    data: Any = with_few(job.data.build(input_shape=job.model.input_shape(), seed=job.seed), 1).train
    try:
        batch = data.collate_fn(data.__getitems__([0]))
        return {k: v[0] for k, v in batch.items()} if isinstance(batch, Mapping) else tuple(part[0] for part in batch)
    except Exception as error:
        raise DataError(
            "data.collate_raised_on_first",
            "data.collate: {collate} raised {kind} on the first sample: {error}",
            collate=job.data.collate,
            kind=type(error).__name__,
            error=error,
        ) from error


def _made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _batched(part: Any, samples: int, device: str) -> Tensor:
    part = part if isinstance(part, Tensor) else torch.as_tensor(part)
    return torch.empty((samples, *part.shape), dtype=part.dtype, device=device)


_aten = torch.ops.aten
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_ROOTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
_CONVOLUTIONS = (_aten.convolution, _aten._convolution, _aten.cudnn_convolution)
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense", "resize_"}
# assumed results of operations on which the model's code branches
_EXPECTED = {"all": True, "isfinite": True, "any": False, "isnan": False, "isinf": False}
_LOOK_UPS = {"embedding", "_embedding_bag", "index", "index_select", "gather"}


class Watcher:
    """Watcher of the operations in a forward pass. The caller sets `part`.

    Args:
        model: model whose parameters are distinguished from activations.
        unit: size of one counted element in bytes; None uses the element size of the model's parameters.
    """

    def __init__(self, model: nn.Module, unit: int | None = None) -> None:
        self.seen = Seen()
        self.operations = OperationMode(self.note, self._answer, _on_one_device)
        self.part = 0
        self._parameters = {_storage(p) for p in model.parameters()}
        self.seen.names.update({_storage(p): name for name, p in model.named_parameters()})
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._buffers = set(map(_storage, model.buffers()))
        # storages whose content depends on parameters
        self._learned = set(self._parameters)
        # keeps storages alive, so that no address is reused
        self._all: list[Tensor] = []
        self.unit = unit or next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)

    @contextmanager
    def watching(self, batch: Any) -> Iterator[None]:
        """Watch all operations and the tensors that they save for the backward pass."""
        for tensor in tensors_in(batch):
            self.seen.of_samples.add(_storage(tensor))
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            stack.enter_context(_Attention(self))
            stack.enter_context(_attention_of_torch(self))
            stack.enter_context(_autocast_without_memory())
            stack.enter_context(self.operations)
            yield

    def numbers(self, tensor: Tensor) -> float:
        """Count the stored elements of a tensor, in units of `unit` bytes.

        A broadcast dimension counts as one element.
        """
        return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) / self.unit

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        """Record one operation."""
        given, results = tensors_in((args, kwargs)), tensors_in(made)
        self._all += results
        reads, writes = tuple(dict.fromkeys(map(_storage, given))), tuple(dict.fromkeys(map(_storage, results)))
        name = func.overloadpacket.__name__
        self._follow(reads, writes)
        if name in _FREE or not results or (set(writes) <= set(reads) and not func._schema.is_mutable):
            return
        products = tuple(self._products(func, args, kwargs, made))
        numbers = 0.0 if products else self._touched(name, given, results)
        fixed = self.seen.of_samples.isdisjoint(writes)
        written = sum(map(self.numbers, results))
        self.seen.kernels.append(Kernel(name, self.part, reads, writes, numbers, fixed, products, written))

    def note_attention(
        self, given: tuple[Tensor, ...], made: tuple[Tensor, ...], *, causal: bool, dropout: bool
    ) -> None:
        """Record attention as one kernel with two matrix products.

        The kernel also has the memory traffic that attention scores would cause without fusion.
        """
        query, key, value, *_ = given
        *lead, rows, width = query.shape
        heads, columns, out = prod(lead), key.shape[-2], value.shape[-1]
        scored = Product(rows, columns, width, heads, causal=causal, flops=2.0 * heads * rows * columns * width)
        mixed = Product(rows, out, columns, heads, causal=causal, flops=2.0 * heads * rows * columns * out)
        squares = float(heads * rows * columns)
        reads, writes = tuple(dict.fromkeys(map(_storage, given))), tuple(map(_storage, made))
        self._all += made
        self._follow(reads, writes)
        # dropout reads, writes and keeps a one-byte mask
        more = (3.0, 1.25) if dropout else (0.0, 0.0)
        seen = Kernel("attention", self.part, reads, writes, products=(scored, mixed), made=self.numbers(made[0]))
        seen.keys = self.numbers(key) + self.numbers(value)
        seen.scores, seen.kept_scores = squares * (2 + more[0]), squares * (1 + more[1])
        self.seen.kernels.append(seen)

    def _follow(self, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """Propagate dependencies on parameters and samples from the inputs to the results."""
        if not self._learned.isdisjoint(reads):
            self._learned.update(writes)
        named = [name for storage in reads if (name := self.seen.name_of(storage))]
        for name in named:
            self.seen.used.setdefault(name, set()).add(self.part)
        if not self.seen.of_samples.isdisjoint(reads):
            self.seen.of_samples.update(writes)
        elif named:
            largest = max(named, key=lambda name: prod(self.shapes[name]))
            self.seen.names.update(dict.fromkeys((w for w in writes if w not in self._parameters), largest))

    def _products(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> Iterator[Product]:
        count = flop_registry.get(func.overloadpacket)
        if count is None:
            return
        flops = float(count(*args, **kwargs, out_val=made))
        if func.overloadpacket in _ROOTS:
            left, right = [a for a in args if isinstance(a, Tensor)][-2:]
            yield self._of_matrices(left, right, flops)
        elif func.overloadpacket in _CONVOLUTIONS:
            yield self._of_images(args[0], args[1], made, flops)
        else:
            result = tensors_in(made)[0]
            n, rows = result.shape[-1], result.numel() / max(result.shape[-1], 1)
            yield Product(rows, n, max(1, round(flops / (2.0 * max(rows * n, 1)))), flops=flops)

    def _of_matrices(self, left: Tensor, right: Tensor, flops: float) -> Product:
        first, second = self.seen.name_of(_storage(left)), self.seen.name_of(_storage(right))
        rows, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        batch = left.shape[0] if left.dim() == 3 else 0
        if first and not second:  # W · x
            left, rows, n, second = right, n, rows, first
        if second:
            # several products have one weight each: of experts, or of heads
            return Product(rows * max(batch, 1), n, k, weight=second, flops=flops, data=self._is_data(left))
        return Product(rows, n, k, batch or 1, flops=flops)

    def _of_images(self, image: Tensor, weight: Tensor, result: Tensor, flops: float) -> Product:
        """Return a convolution as a matrix product, whose rows are the positions of the result."""
        k, name = prod(weight.shape[1:]), self.seen.name_of(_storage(weight))
        rows = result.numel() / max(result.shape[1], 1)
        n = max(1, round(flops / (2.0 * max(rows * k, 1))))
        read, taps = float(image.numel()), prod(weight.shape[2:])
        return Product(rows, n, k, weight=name, flops=flops, read=read, taps=taps, data=self._is_data(image))

    def _is_data(self, tensor: Tensor) -> bool:
        """True if a tensor does not depend on parameters."""
        return _storage(tensor) not in self._learned

    def _touched(self, name: str, given: list[Tensor], results: list[Tensor]) -> float:
        """Count the elements that an operation reads and writes. A look-up reads only the looked-up rows."""
        written = sum(map(self.numbers, results))
        return written + (written if name in _LOOK_UPS else sum(map(self.numbers, given)))

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._buffers and storage not in self._parameters:
            self._all.append(tensor)
            self.seen.kept.setdefault(storage, (tensor.untyped_storage().nbytes() / self.unit, set()))[1].add(self.part)
        return tensor

    def _answer(self, dtype: torch.dtype) -> bool | int | float:
        """Return an assumed value for a tensor without data whose value the model's code reads.

        The value is the usual result of the last operation if one is known, such as True for `all` and False for `any`.
        Otherwise it is False for Booleans and 1 for numbers.
        """
        last = self.seen.kernels[-1].name if self.seen.kernels else ""
        if dtype == torch.bool and last in _EXPECTED:
            return _EXPECTED[last]
        frame: Any = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
            frame = frame.f_back
        self.seen.asked.add(type(frame.f_locals["self"]).__name__ if frame is not None else "the model")
        return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


class _Attention(TorchFunctionMode):
    """Function mode that records attention as one operation. Torch would decompose it on the meta device."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _ATTENTION:
            return func(*args, **(kwargs or {}))
        return _fused(self.watcher, *args, **(kwargs or {}))


@contextmanager
def _attention_of_torch(watcher: Watcher) -> Iterator[None]:
    """Replace torch's attention function, because calls by torch's own modules bypass the function mode."""
    torch.nn.functional.scaled_dot_product_attention = partial(_fused, watcher)
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = _ATTENTION


@contextmanager
def _autocast_without_memory() -> Iterator[None]:
    """Allow code to disable autocast on the meta device, which has no autocast."""
    autocast = torch.autocast.__init__

    def of_any_device(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = of_any_device  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = autocast  # type: ignore[method-assign]


def _fused(watcher: Watcher, query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Tensor:
    """Run `scaled_dot_product_attention` as one fused kernel, in the precision of autocast."""
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), more, strict=False)) | named
    mask, causal, dropout = given.get("attn_mask"), given.get("is_causal", False), given.get("dropout_p", 0.0) > 0
    result: Tensor = _Fused.apply(query, key, value, mask, watcher, causal, dropout)
    return result


class _Fused(Function):
    """Attention that does not store its scores (Dao et al., 2022, arXiv:2205.14135)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        watcher: Watcher,
        causal: bool,
        dropout: bool,
    ) -> Tensor:
        *lead, rows, _ = query.shape
        # heads after the tokens in memory, as kernels return them
        if len(lead) > 1:
            result = query.new_empty((*lead[:-1], rows, lead[-1], value.shape[-1])).transpose(-3, -2)
        else:
            result = query.new_empty((*lead, rows, value.shape[-1]))
        sums = query.new_empty(query.shape[:-1])
        if not query.is_meta and not isinstance(query, FakeTensor):
            with _disable_current_modes():
                result = _ATTENTION(query, key, value, is_causal=causal, enable_gqa=True)
        given = (query, key, value) if mask is None else (query, key, value, mask)
        watcher.note_attention(given, (result, sums), causal=causal, dropout=dropout)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("a trace has no backward pass")


def _on_one_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move all arguments to meta if some of them are on meta."""
    if len({tensor.is_meta for tensor in tensors_in((args, kwargs))}) < 2:
        return args, kwargs
    moved: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
        lambda t: t if t.is_meta else t.to("meta"), (args, kwargs)
    )
    return moved


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
