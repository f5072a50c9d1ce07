"""Quantized weights of a rank: which bytes the rank holds, and how they are read.

The weights are quantized as they are read, one after the other. A model is divided as if its weights were ordinary;
then the bytes of a quantized weight replace its shard. FSDP2 divides the rows of these bytes like the rows of other
frozen parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.job.quantize import QUANTIZED_TOGETHER, quantized_row_bytes
from paceline.job.zoo.quantized import QuantizedLinear, RowFormat, marked
from paceline.split.layout import Parts, ShardLayout, WeightSource, local, whole_parts

if TYPE_CHECKING:
    from paceline.job.optimizer import OptimizerSpec
    from paceline.planning.plan import Plan
    from paceline.split.deferred_init import DeferredModel

Formats = dict[str, RowFormat]


def formats_of(model: nn.Module) -> Formats:
    """Return the formats of the marked weights of an undivided model, by name."""
    return {f"{name}.weight": RowFormat(kind, layer.in_features) for name, layer, kind in marked(model)}


def formats_held(model: nn.Module) -> Formats:
    """Return the formats of the quantized weights of an undivided model, by parameter name."""
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear))
    return {f"{name}.weight": layer.format for name, layer in layers}


def quantize(modules: Iterable[nn.Module], formats: Formats, parts: Parts, plan: Plan | str) -> None:
    """Replace the marked weights of a divided model by bytes, and update `parts`.

    The model has no memory yet, and neither do the bytes.

    Raises:
        PlanError: the plan cuts a block of columns that shares a scale, or replaced a marked layer by other code.
    """
    layers = {f"{name}.weight": (layer, kind) for module in modules for name, layer, kind in marked(module)}
    for name, format in formats.items():
        if name not in parts:
            continue
        layout = parts[name].layout
        if name not in layers:
            raise PlanError(
                "plan.quantized_layer_replaced",
                "plan {plan}: quantize cannot hold {name} in few bits, because this plan traces the model and replaces "
                "its layers by a graph. Use pp=1, or remove the key quantize.",
                plan=plan,
                name=name,
            )
        try:
            kept = format.intervals(layout.kept[1])
        except ValueError:
            raise PlanError(
                "plan.quantized_block_cut",
                "plan {plan}: quantize stores blocks of {block} columns, but tp cuts the {columns} columns of {name} "
                "within a block, so the model would differ from an undivided one. Use a smaller tp, or fsdp instead.",
                plan=plan,
                block=QUANTIZED_TOGETHER,
                columns=format.columns,
                name=name,
            ) from None
        layer, kind = layers[name]
        QuantizedLinear.convert(layer, kind)
        parts[name].layout = ShardLayout((layout.full[0], format.row_bytes), (layout.kept[0], kept))


def refuse_cut_moments(optimizer: OptimizerSpec, parts: Parts, like: Mapping[str, Tensor], plan: Plan) -> None:
    """Raise an error if a plan cuts rows of 8-bit moments within a block.

    Raises:
        PlanError: the moments of a shard would differ from those of the undivided parameter.
    """
    for name, parameter in like.items() if optimizer.state == "int8" else ():
        layout = parts[name].layout
        if not parameter.requires_grad or len(layout.full) < 2:
            continue
        try:
            RowFormat("int8", layout.full[-1]).intervals(layout.kept[-1])
        except ValueError:
            raise PlanError(
                "plan.moments_block_cut",
                "plan {plan}: optimizer.state: int8 stores blocks of {block} columns, but tp cuts the {columns} "
                "columns of {name} within a block, so the updates would differ from those of an undivided model. Use "
                "a smaller tp, state: bf16, or fsdp instead.",
                plan=plan,
                block=QUANTIZED_TOGETHER,
                columns=layout.full[-1],
                name=name,
            ) from None


def packed_layout(shape: Sequence[int], dtype: torch.dtype, layout: ShardLayout, *, whole: bool) -> ShardLayout | None:
    """Return the part of 8-bit moments that belongs to a part of a parameter.

    Args:
        shape: shape of the moments of the rank, or of all ranks if `whole`.
        dtype: type of the moments.
        layout: the rank's part of the parameter.

    Returns:
        None if a tensor of this shape and type does not hold 8-bit moments of the parameter.
    """
    own = layout.full if whole else layout.shape
    if dtype != torch.uint8 or len(own) < 2 or tuple(shape) != (*own[:-1], quantized_row_bytes("int8", own[-1])):
        return None
    format = RowFormat("int8", layout.full[-1])
    full = (*layout.full[:-1], format.row_bytes)
    return ShardLayout(full, (*layout.kept[:-1], format.intervals(layout.kept[-1])))


class QuantizingSource:
    """Source that quantizes some tensors of another source as they are read."""

    def __init__(self, source: WeightSource, formats: Formats) -> None:
        self._source, self._formats = source, formats

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    @torch.no_grad()
    def fill(self, name: str, own: Tensor, layout: ShardLayout | None = None) -> None:
        """Read a rank's part of a tensor into `own`, quantized if it has a format."""
        format = self._formats.get(name)
        if format is None:
            return self._source.fill(name, own, layout)
        layout = layout or ShardLayout.whole((len(own), format.row_bytes))
        kept = format.columns_of(layout.kept[1])
        shard = ShardLayout((layout.full[0], format.columns), (layout.kept[0], kept))
        weight = torch.empty(shard.shape, dtype=torch.float32, device=own.device)
        self._source.fill(name, weight, shard)
        own.copy_(RowFormat(format.kind, shard.shape[1]).pack(weight))
        return None


def quantized_whole(deferred: DeferredModel) -> nn.Module:
    """Allocate an undivided model on the CPU with its marked weights quantized.

    The model is filled one tensor at a time.
    """
    model = deferred.model
    formats, parts = formats_of(model), whole_parts(model)
    quantize([model], formats, parts, "dp")
    from paceline.split.deferred_init import allocate  # imports FSDP2, which plans without a split do not need

    allocate(model, torch.device("cpu"))
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    @torch.no_grad()
    def take(name: str, full: Tensor) -> None:
        fill_from(full, name, held[name], formats, parts[name].layout if name in parts else None)

    deferred.replay(take)
    return model


def fill_from(full: Tensor, name: str, own: Tensor, formats: Formats, layout: ShardLayout | None = None) -> None:
    """Copy a rank's part of a full tensor, quantized if it has a format."""
    QuantizingSource(_OneTensor(full), formats).fill(name, local(own).detach(), layout)


class _OneTensor:
    def __init__(self, full: Tensor) -> None:
        self._full = full

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def fill(self, name: str, own: Tensor, layout: ShardLayout | None = None) -> None:
        own.copy_(self._full if layout is None else layout.take(self._full))
