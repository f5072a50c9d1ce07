"""Operations of a forward pass: every kernel with its reads and writes, every saved tensor.

The tensors may be on the meta device, which has shapes alone. Tensors are identified by their storages, so views are
one and the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from paceline.planning.model.graph import Kernel, Product, Seen
from paceline.planning.model.recording.record import OperationMode
from paceline.planning.model.recording.recorder import map_tensors, tensors_in

_aten = torch.ops.aten
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_ROOTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
_CONVOLUTIONS = (_aten.convolution, _aten._convolution, _aten.cudnn_convolution)
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense", "resize_"}
# assumed results of value queries
_EXPECTED = {"all": True, "isfinite": True, "any": False, "isnan": False, "isinf": False}
_LOOK_UPS = {"embedding", "_embedding_bag", "index", "index_select", "gather"}


class Watcher:
    """Watcher of a forward pass; `part` is set from outside.

    Args:
        model: the model, whose parameters are told from activations.
        unit: bytes of one element in counts; None: those of the model's own.
    """

    def __init__(self, model: nn.Module, unit: int | None = None) -> None:
        self.seen = Seen()
        self.operations = OperationMode(self.note, self._answer, _on_one_device)
        self.part = 0
        self._parameters = {_storage(p) for p in model.parameters()}
        self.seen.names.update({_storage(p): name for name, p in model.named_parameters()})
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._buffers = set(map(_storage, model.buffers()))
        # storages that parameters had a part in
        self._learned = set(self._parameters)
        # keeps storages alive, so that no address is used twice
        self._all: list[Tensor] = []
        self.unit = unit or next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)

    @contextmanager
    def watching(self, batch: Any) -> Iterator[None]:
        """Watch the operations on a batch in this context, and the tensors saved of it."""
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
        """Stored elements, in units of the model's parameter size; broadcast dimensions count once."""
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
        """Record attention as one kernel: its products, and the traffic of unfused scores."""
        query, key, value, *_ = given
        *lead, rows, width = query.shape
        heads, columns, out = prod(lead), key.shape[-2], value.shape[-1]
        scored = Product(rows, columns, width, heads, causal=causal, flops=2.0 * heads * rows * columns * width)
        mixed = Product(rows, out, columns, heads, causal=causal, flops=2.0 * heads * rows * columns * out)
        squares = float(heads * rows * columns)
        reads, writes = tuple(dict.fromkeys(map(_storage, given))), tuple(map(_storage, made))
        self._all += made
        self._follow(reads, writes)
        # dropout reads, writes and keeps a mask of a byte
        more = (3.0, 1.25) if dropout else (0.0, 0.0)
        seen = Kernel("attention", self.part, reads, writes, products=(scored, mixed), made=self.numbers(made[0]))
        seen.keys = self.numbers(key) + self.numbers(value)
        seen.scores, seen.kept_scores = squares * (2 + more[0]), squares * (1 + more[1])
        self.seen.kernels.append(seen)

    def _follow(self, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """Propagate the parameters and the samples that results are made of."""
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
            # with more than one a weight for each: of experts, or of heads
            return Product(rows * max(batch, 1), n, k, weight=second, flops=flops, data=self._is_data(left))
        return Product(rows, n, k, batch or 1, flops=flops)

    def _of_images(self, image: Tensor, weight: Tensor, result: Tensor, flops: float) -> Product:
        """A convolution as a matrix product of all positions of the result with the kernel."""
        k, name = prod(weight.shape[1:]), self.seen.name_of(_storage(weight))
        rows = result.numel() / max(result.shape[1], 1)
        n = max(1, round(flops / (2.0 * max(rows * k, 1))))
        read, taps = float(image.numel()), prod(weight.shape[2:])
        return Product(rows, n, k, weight=name, flops=flops, read=read, taps=taps, data=self._is_data(image))

    def _is_data(self, tensor: Tensor) -> bool:
        """True of a tensor that no parameter had a part in."""
        return _storage(tensor) not in self._learned

    def _touched(self, name: str, given: list[Tensor], results: list[Tensor]) -> float:
        """Elements read and written; for a look-up, the looked-up rows."""
        written = sum(map(self.numbers, results))
        return written + (written if name in _LOOK_UPS else sum(map(self.numbers, given)))

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._buffers and storage not in self._parameters:
            self._all.append(tensor)
            self.seen.kept.setdefault(storage, (tensor.untyped_storage().nbytes() / self.unit, set()))[1].add(self.part)
        return tensor

    def _answer(self, dtype: torch.dtype) -> bool | int | float:
        """Answer of a tensor without a value: the usual one (`all` is True, `any` is False), else 1."""
        last = self.seen.kernels[-1].name if self.seen.kernels else ""
        if dtype == torch.bool and last in _EXPECTED:
            return _EXPECTED[last]
        frame: Any = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
            frame = frame.f_back
        self.seen.asked.add(type(frame.f_locals["self"]).__name__ if frame is not None else "the model")
        return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


class _Attention(TorchFunctionMode):
    """Function mode that keeps attention whole, which torch would decompose on the meta device."""

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
    """Replace attention for torch's own modules, which call it past the function mode."""
    torch.nn.functional.scaled_dot_product_attention = partial(_fused, watcher)
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = _ATTENTION


@contextmanager
def _autocast_without_memory() -> Iterator[None]:
    """Let code leave autocast on the meta device, for which torch has none."""
    autocast = torch.autocast.__init__

    def of_any_device(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = of_any_device  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = autocast  # type: ignore[method-assign]


def _fused(watcher: Watcher, query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Tensor:
    """`scaled_dot_product_attention` in autocast's precision, as one fused kernel."""
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), more, strict=False)) | named
    mask, causal, dropout = given.get("attn_mask"), given.get("is_causal", False), given.get("dropout_p", 0.0) > 0
    result: Tensor = _Fused.apply(query, key, value, mask, watcher, causal, dropout)
    return result


class _Fused(Function):
    """Attention without stored scores (Dao et al., 2022, arXiv:2205.14135).

    It saves its operands, its result and one element for each row.
    """

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
        # heads behind the tokens in memory, as kernels leave them
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
    """Move real arguments, such as token indices, to meta if others are there."""
    if len({tensor.is_meta for tensor in tensors_in((args, kwargs))}) < 2:
        return args, kwargs
    moved: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
        lambda t: t if t.is_meta else t.to("meta"), (args, kwargs)
    )
    return moved


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
