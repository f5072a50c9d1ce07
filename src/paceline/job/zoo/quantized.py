"""Linear layers whose frozen weights are held in 8 or 4 bits (`quantize` in a job).

Blocks of 64 elements of a row share a scale: int8 by torchao, nf4 by bitsandbytes (QLoRA, arXiv:2305.14314). A
quantized shard of rows, or of whole blocks of columns, is therefore equal to the shard of the quantized weight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from paceline.errors import JobError
from paceline.job.quantize import QUANTIZED_TOGETHER as BLOCK
from paceline.job.quantize import Quantize, quantized_row_bytes

_GROUP, _INT8 = (1, BLOCK), (torch.int8, -127, 127)
_MODULES = {"int8": "torchao.quantization.quant_primitives", "nf4": "bitsandbytes"}
_SCALE = 4  # bytes of a scale, which is a float32
_AT_ONCE = 2**20  # elements that are quantized at a time, because the libraries need many times their memory


@dataclass(frozen=True)
class RowFormat:
    """Layout of the bytes of a quantized row.

    The codes of the elements come first, then one scale per block. Rows are padded with zeros to whole blocks.
    """

    kind: Quantize
    columns: int

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return quantized_row_bytes(self.kind, self.columns)

    def pack(self, weight: Tensor) -> Tensor:
        """Quantize rows (n, columns) to bytes (n, row_bytes)."""
        each = max(1, _AT_ONCE // max(self.columns, 1))
        chunks = [self._pack(rows.float().contiguous()) for rows in weight.detach().split(each)]
        return torch.cat(chunks) if len(chunks) != 1 else chunks[0]

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantize bytes (n, row_bytes) to rows (n, columns)."""
        shape = [len(packed), self._blocks * BLOCK]
        if packed.is_meta or not len(packed):
            return packed.new_empty((len(packed), self.columns), dtype=dtype)
        operations = _operations(self.kind)
        codes, scales = packed.split([self._code_bytes, self._blocks * _SCALE], dim=1)
        scales = scales.contiguous().view(torch.float32)
        # the kernels of bitsandbytes do not support float64
        narrow = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
        if self.kind == "int8":
            found = operations.dequantize_affine(
                codes.view(torch.int8), _GROUP, scales, None, *_INT8, output_dtype=narrow
            )
        else:
            found = operations.dequantize_4bit(
                codes.contiguous().view(-1, 1), scales.view(-1), BLOCK, "nf4", shape, narrow
            )
        weight: Tensor = found[:, : self.columns].to(dtype)
        return weight

    def intervals(self, columns: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return the bytes of a row that hold some of its columns.

        Raises:
            ValueError: an interval does not consist of whole blocks.
        """
        if tuple(columns) == ((0, self.columns),):
            return ((0, self.row_bytes),)
        if any(start % BLOCK or stop % BLOCK for start, stop in columns):
            raise ValueError(f"columns {columns} are not whole blocks of {BLOCK}")
        blocks = [(start // BLOCK, stop // BLOCK) for start, stop in columns]
        of_block = self._code_bytes // self._blocks
        codes = [(start * of_block, stop * of_block) for start, stop in blocks]
        scales = [(self._code_bytes + start * _SCALE, self._code_bytes + stop * _SCALE) for start, stop in blocks]
        return (*codes, *scales)

    def columns_of(self, intervals: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return the columns of the bytes that `intervals` returned."""
        if tuple(intervals) == ((0, self.row_bytes),):
            return ((0, self.columns),)
        of_block = self._code_bytes // self._blocks
        codes = intervals[: len(intervals) // 2]
        return tuple((start // of_block * BLOCK, stop // of_block * BLOCK) for start, stop in codes)

    def _pack(self, rows: Tensor) -> Tensor:
        operations = _operations(self.kind)
        rows = F.pad(rows, (0, self._blocks * BLOCK - self.columns))
        if self.kind == "int8":
            scales, zeros = operations.choose_qparams_affine(rows, operations.MappingType.SYMMETRIC, _GROUP, *_INT8)
            codes = operations.quantize_affine(rows, _GROUP, scales, zeros, *_INT8).view(torch.uint8)
        else:
            codes, scales = operations.quantize_4bit(rows, BLOCK, "nf4", torch.uint8)
        return torch.cat([codes.view(len(rows), -1), scales.view(len(rows), -1).view(torch.uint8)], 1)

    @property
    def _blocks(self) -> int:
        return -(-self.columns // BLOCK)

    @property
    def _code_bytes(self) -> int:
        return self._blocks * (BLOCK if self.kind == "int8" else BLOCK // 2)


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized weight.

    The parameter `weight` holds the bytes. The attribute `weight` acts as the dequantized tensor.

    Attributes:
        format: the format of the bytes.
        dtype: the type of the weight before quantization; code that reads the weight gets this type.
    """

    format: RowFormat
    dtype: torch.dtype

    @classmethod
    def convert(cls, linear: nn.Linear, kind: Quantize) -> None:
        """Turn a layer into a quantized layer in place; the bytes have no memory yet."""
        rows, columns = linear.weight.shape
        dtype, made = linear.weight.dtype, RowFormat(kind, columns)
        empty = torch.empty((rows, made.row_bytes), dtype=torch.uint8, device="meta")
        linear._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        linear.__class__ = cls
        linear.format, linear.dtype = made, dtype  # type: ignore[assignment]

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The dequantized weight, which is computed when it is used.

        Between steps, FSDP2 looks up its shard of the bytes here.
        """
        held: Any = self._parameters["weight"]
        return held if hasattr(held, "placements") else QuantizedWeight(held, self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)


class QuantizedWeight:
    """Stand-in for the weight of a quantized layer.

    `F.linear` keeps only the bytes for the backward pass. All other functions get the dequantized weight.
    """

    requires_grad = False

    def __init__(self, packed: Tensor, layer: QuantizedLinear) -> None:
        self._packed, self._format = packed, layer.format
        self.dtype, self.device = layer.dtype, packed.device
        self.shape = torch.Size([len(packed), layer.format.columns])

    def dequantized(self) -> Tensor:
        """Return the weight as an ordinary tensor."""
        return self._format.unpack(self._packed, self.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dequantized(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and isinstance(args[1], cls):
            return args[1]._linear(args[0], *args[2:], **kwargs)
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
            bias = bias if bias is None else bias.to(input.dtype)
        found: Tensor = _Product.apply(input, self._packed, self._format)
        return found if bias is None else found + bias


class _Product(torch.autograd.Function):
    """Product with the dequantized weight, which both passes dequantize again."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, packed: Tensor, format: RowFormat) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.format = format
        return F.linear(input, format.unpack(packed, input.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return grad @ ctx.format.unpack(packed, grad.dtype), None, None


def mark(model: nn.Module, kind: Quantize) -> None:
    """Mark the layers of a model whose weights are to be quantized.

    These are the frozen linear layers of the repeated blocks, so the output head keeps its type, as in QLoRA. If the
    model has no blocks, these are all frozen linear layers.

    Raises:
        JobError: a library is missing, or the model has no such layer.
    """
    _operations(kind)
    owners: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[parameter] = owners.get(parameter, 0) + 1
    frozen = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not module.weight.requires_grad and owners[module.weight] == 1
    }
    chosen = [module for name, module in frozen.items() if _in_block(name)] or list(frozen.values())
    if not chosen:
        raise JobError(
            "model.nothing_to_quantize",
            "quantize: {kind} holds frozen linear layers in few bits, but no linear layer of the model is frozen. "
            "Add an adapter, such as adapter: {{lora: {{r: 16}}}}, or freeze layers with model.freeze.",
            kind=kind,
        )
    for module in chosen:
        module.quantize = kind  # type: ignore[assignment]


def marked(model: nn.Module) -> Iterator[tuple[str, nn.Linear, Quantize]]:
    """Yield the name, layer and format of each marked layer with an ordinary weight."""
    for name, module in model.named_modules():
        kind = vars(module).get("quantize")
        if kind is not None and isinstance(module, nn.Linear) and not isinstance(module, QuantizedLinear):
            yield name, module, kind


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Set the weights of marked layers to their dequantized values, in place.

    The model then computes what the quantized model computes, and remains an ordinary model.
    """
    for _, module, kind in marked(model):
        made = RowFormat(kind, module.in_features)
        module.weight.copy_(made.unpack(made.pack(module.weight), module.weight.dtype))


def packed_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the codes and scales of the weights of marked layers, by parameter name."""
    return {
        f"{name}.weight": RowFormat(kind, module.in_features).pack(module.weight.detach())
        for name, module, kind in marked(model)
    }


def plain_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shapes that the weights of quantized layers have in files, by parameter name."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, QuantizedLinear))
    return {f"{name}.weight": list(module.weight.shape) for name, module in layers}


def _in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


@cache
def library(module: str) -> Any:
    """Import a module of torchao or bitsandbytes, without their messages about kernels for absent devices.

    Raises:
        JobError: the library is missing.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return import_module(module)
    except ImportError as error:
        raise JobError(
            "job.low_precision_library_missing",
            "quantize, optimizer.state and precision=fp8 need the library {library}. Run: pip install "
            "'paceline[quantize]' ({error})",
            library=module.partition(".")[0],
            error=error,
        ) from None
    finally:
        logging.disable(before)


def _operations(kind: Quantize) -> Any:
    found = library(_MODULES[kind])
    return found if kind == "int8" else torch.ops.bitsandbytes
