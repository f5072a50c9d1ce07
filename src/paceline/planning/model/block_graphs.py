"""Builder of a trace: blocks, assembled from the kernels of a forward pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from paceline.planning.model.graph import BlockTrace, Divided, Gemm, Kernel, ModelTrace, Product, Seen, SparseTable
from paceline.planning.model.tensor.degrees import DividedWeights

if TYPE_CHECKING:
    from paceline.planning.model.model_info import ModelInfo, ParameterShape

# results that remat=selective keeps
_CHOSEN = {"mm", "addmm", "convolution", "_grouped_mm", "attention"}
_Owned = dict[int, list["ParameterShape"]]


def assembled(seen: Seen, model_info: ModelInfo, loss: str, weights: DividedWeights) -> ModelTrace:
    """Assemble a trace from the observations of a forward pass.

    Blocks are in the order of the pass. Parts outside of the repeated blocks are left out if they are empty.

    Args:
        weights: names of the parameters that tensor parallelism divides.
    """
    owned, tied = _owned(seen, model_info)
    builder = _Builder(seen, model_info, loss, weights)
    blocks, names = [], []
    first: dict[BlockTrace, BlockTrace] = {}
    for part, name in enumerate(seen.parts):
        if name or builder.kernels[part] or owned[part]:
            block = builder.block(part, owned[part])
            blocks.append(first.setdefault(replace(block, name=""), block))
            names.append(name)
    sparse = tuple(SparseTable(*table) for table in seen.ids.values())
    notes = _notes(seen)
    return ModelTrace(tuple(_kinds(blocks)), seen.tokens, tied, names=tuple(names), notes=notes, sparse=sparse)


def estimated(model_info: ModelInfo, tokens: int, why: str) -> ModelTrace:
    """Estimate a trace from the shapes of the parameters alone.

    The estimate assumes that every matrix is multiplied with every token once. Token embeddings are excluded, except
    for the head.
    """
    names = ("", *model_info.blocks, "") if model_info.blocks else ("",)
    shapes: dict[int, list[ParameterShape]] = defaultdict(list)
    place = 0
    # parameters that are registered after the first block are assumed to be used after all blocks
    for shape in model_info.parameters:
        place = names.index(shape.block) if shape.block else (len(names) - 1 if place else 0)
        shapes[place].append(shape)
    tables = [
        shape.name for shape in model_info.parameters if not shape.block and shape.sizes[0] in model_info.vocabulary
    ]
    blocks = [
        _estimated(_kind(place, names), name, shapes[place], tokens, tables[:-1]) for place, name in enumerate(names)
    ]
    first: dict[BlockTrace, BlockTrace] = {}
    alike = [first.setdefault(replace(block, name=""), block) for block in blocks]
    note = (
        f"{why}: FLOPs are estimated as 2 · parameters · tokens, and activations from the widths of matrices. Measured "
        "blocks replace these estimates"
    )
    return ModelTrace(tuple(_kinds(alike)), tokens=tokens, names=names, notes=(note,), plain_head=False, estimated=True)


def _estimated(kind: str, name: str, shapes: list[ParameterShape], tokens: int, tables: Sequence[str]) -> BlockTrace:
    matrices = [shape for shape in shapes if len(shape.sizes) > 1 and shape.name not in tables]
    gemms: Counter[Gemm] = Counter()
    for shape in matrices:
        experts, *sizes = shape.sizes if shape.expert and len(shape.sizes) > 2 else (0, *shape.sizes)
        gemms[Gemm(tokens, sizes[0], prod(sizes[1:]), experts=experts, frozen=not shape.trainable)] += 1
    wide = float(tokens * sum(gemm.n * often for gemm, often in gemms.items()))
    of_experts = sum(shape.numel for shape in shapes if shape.expert)
    return BlockTrace(
        kind=kind,
        name=name,
        gemms=tuple(replace(gemm, times=often) for gemm, often in gemms.items()),
        outside=2 * wide,
        kept_outside=wide,
        kernels=4 * len(matrices),
        vectors=sum(shape.numel for shape in shapes) - of_experts,
        experts=of_experts,
        boundary=float(tokens * max((min(shape.sizes) for shape in matrices), default=1)),
    )


class _Builder:
    """Builder of blocks from the kernels of each part of a model.

    Attributes:
        kernels: kernels of each part, each with its index in the whole pass.
    """

    def __init__(self, seen: Seen, model_info: ModelInfo, loss: str, weights: DividedWeights) -> None:
        # True if any part so far has trainable parameters; all later parts then need gradients
        self.trained = False
        self.seen, self.samples, self.weights = seen, seen.samples, weights
        self.shapes = {shape.name: shape for shape in model_info.parameters}
        self.kernels: dict[int, list[tuple[int, Kernel]]] = defaultdict(list)
        for index, kernel in enumerate(seen.kernels):
            self.kernels[kernel.part].append((index, kernel))
        self.kept = _kept(seen)
        self.split = divided_kernels(seen, weights, keeps_logits=loss == "cross_entropy")

    def block(self, part: int, shapes: list[ParameterShape]) -> BlockTrace:
        """Build the block of a part.

        Elements that tensor parallelism divides are counted separately.
        """
        kernels, each = self.kernels[part], 1 / self.samples
        split, of_samples = self.split, self.seen.of_samples
        numbers = _sums(
            ("fixed" if kernel.fixed else "inside" if index in split.inside else "outside", kernel.numbers)
            for index, kernel in kernels
        )
        kept = _sums(
            ("fixed" if storage not in of_samples else "inside" if storage in split.storages else "outside", kept)
            for storage, kept in self.kept[part].items()
        )
        # attention scores that are materialized are not kept
        chosen = _sums(
            ("inside" if split.storages.issuperset(kernel.writes) else "outside", kernel.made)
            for _, kernel in kernels
            if kernel.name in _CHOSEN
        )
        expert = sum(shape.numel for shape in shapes if shape.expert)
        matrices = sum(shape.numel for shape in shapes if shape.name in self.weights.matrices and len(shape.sizes) > 1)
        self.trained = self.trained or any(shape.trainable for shape in shapes)
        return BlockTrace(
            kind=_kind(part, self.seen.parts),
            name=self.seen.parts[part],
            gemms=self._gemms(kernels),
            inside=numbers["inside"] * each,
            outside=numbers["outside"] * each,
            scores=sum(kernel.scores for _, kernel in kernels) * each,
            kept_inside=kept["inside"] * each,
            kept_outside=kept["outside"] * each,
            kept_scores=sum(kernel.kept_scores for _, kernel in kernels) * each,
            fixed=numbers["fixed"],
            kept_fixed=kept["fixed"],
            selective_inside=chosen["inside"] * each,
            selective_outside=chosen["outside"] * each,
            kernels=len(kernels),
            matrices=matrices,
            vectors=sum(shape.numel for shape in shapes) - matrices - expert,
            experts=expert,
            boundary=self._boundary(part) * each,
            reductions=self.split.reductions[part],
            keys=sum(kernel.keys for _, kernel in kernels) * each,
            routed=self.seen.routed.get(part, 0.0) * each,
            trained=self.trained,
        )

    def _boundary(self, part: int) -> float:
        """Count the elements that a part passes to the next part.

        The last part passes one element for each sample.
        """
        return self.seen.left.get(part) or self.seen.entered.get(part + 1) or float(self.samples)

    def _gemms(self, kernels: list[tuple[int, Kernel]]) -> tuple[Gemm, ...]:
        """Return the matrix products of one sample. Products of several experts are merged into one entry."""
        found: Counter[Gemm] = Counter()
        of_experts: dict[tuple[int, int], list[Product]] = defaultdict(list)
        for index, kernel in kernels:
            for product in kernel.products:
                if product.weight and self.shapes[product.weight].expert:
                    of_experts[product.n, product.k].append(product)
                else:
                    found[self._gemm(product, self.split.how.get(index, "none"))] += 1
        gemms = [replace(gemm, times=often) for gemm, often in found.items()]
        for (n, k), products in of_experts.items():
            weights = {product.weight for product in products}
            sizes = [self.shapes[weight].sizes for weight in weights]
            experts = max((size[0] for size in sizes if len(size) > 2), default=len(weights))
            times = len(weights) if len(sizes[0]) > 2 else 1
            rows = sum(product.flops for product in products) / (2 * n * k * self.samples * times)
            frozen = not any(self.shapes[weight].trainable for weight in weights)
            gemms.append(Gemm(rows, n, k, times=times, experts=experts, frozen=frozen))
        return tuple(gemms)

    def _gemm(self, product: Product, how: Divided) -> Gemm:
        batch = round(product.batch / self.samples) if product.batch else 0
        batch = max(batch, 1) if product.batch else 0
        rows = product.flops / (2.0 * product.n * product.k * max(batch, 1) * self.samples)
        return Gemm(
            rows,
            product.n,
            product.k,
            batch,
            how,
            causal=product.causal,
            read=product.read / self.samples,
            taps=product.taps,
            data=product.data,
            frozen=bool(product.weight) and not self.shapes[product.weight].trainable,
        )


def _sums(numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum element counts for each of the keys `inside`, `outside` and `fixed`."""
    found = dict.fromkeys(("inside", "outside", "fixed"), 0.0)
    for by, number in numbers:
        found[by] += number
    return found


def _kept(seen: Seen) -> dict[int, dict[int, float]]:
    """Return the storages that each part saves for the backward pass, with their sizes.

    If several parts save the same storage, it counts for the part that creates it.
    """
    makers: dict[int, int] = {}
    for kernel in seen.kernels:
        for storage in kernel.writes:
            makers.setdefault(storage, kernel.part)
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for storage, (numbers, parts) in seen.kept.items():
        part = next(iter(parts)) if len(parts) == 1 else makers.get(storage, min(parts))
        found[part][storage] = numbers
    return found


def _owned(seen: Seen, model_info: ModelInfo) -> tuple[_Owned, int]:
    """Return the parameters of each part, and the number of shared elements.

    Unused parameters count for the first part.
    """
    owned: _Owned = defaultdict(list)
    begins = {name: part for part, name in reversed(list(enumerate(seen.parts))) if name}
    tied = 0
    for shape in model_info.parameters:
        if shape.block in begins:
            owned[begins[shape.block]].append(shape)
            continue
        reading = sorted(part for part in seen.used.get(shape.name, ()) if not seen.parts[part]) or [0]
        tied += shape.numel * (len(reading) - 1)
        for part in reading:
            owned[part].append(shape)
    return owned, tied


def _kind(part: int, parts: Sequence[str]) -> str:
    if parts[part]:
        return "layer"
    if len(parts) == 1:
        return "model"
    return "embedding" if part == 0 else "head" if part == len(parts) - 1 else "between"


def _kinds(blocks: Sequence[BlockTrace]) -> list[BlockTrace]:
    """Number blocks of the same kind that differ, such as `layer` and `layer 2`."""
    named: dict[int, BlockTrace] = {}
    often: Counter[str] = Counter()
    for block in blocks:
        if id(block) not in named:
            often[block.kind] += 1
            kind = block.kind if often[block.kind] == 1 else f"{block.kind} {often[block.kind]}"
            named[id(block)] = replace(block, kind=kind)
    return [named[id(block)] for block in blocks]


def _notes(seen: Seen) -> tuple[str, ...]:
    asked = sorted(seen.asked)
    if not asked:
        return ()
    return (
        f"{', '.join(asked)}: reads values of tensors during the forward pass, so the trace shows one possible path",
    )


@dataclass
class DividedKernels:
    """Tensor parallelism of a forward pass. Kernels are identified by their index.

    Attributes:
        how: dimension along which each kernel's matrix product is divided.
        inside: kernels of which each rank processes only its own part of the elements.
        storages: storages of which each rank holds only its own part.
        reductions: number of collectives in each part of the model.
    """

    how: dict[int, Divided] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    storages: set[int] = field(default_factory=set)
    reductions: Counter[int] = field(default_factory=Counter)


def divided_kernels(seen: Seen, weights: DividedWeights, *, keeps_logits: bool) -> DividedKernels:
    """Divide the kernels between the column-parallel and the row-parallel layers of each region.

    Args:
        keeps_logits: True if the loss can use each rank's own part of the logits without gathering them.
    """
    found = DividedKernels()
    joined = weights.gathered - weights.logits if keeps_logits else weights.gathered
    for index, kernel in enumerate(seen.kernels):
        weight = kernel.products[0].weight if kernel.products else ""
        if weight in weights.rows:
            found.how[index] = "k"
        elif weight in weights.columns or weight in weights.gathered:
            found.how[index] = "n"
        elif found.storages.intersection(kernel.reads):
            found.inside.add(index)
            if kernel.products:
                found.how[index] = "batch"
        found.reductions[kernel.part] += (
            weight in weights.rows or weight in weights.gathered or _looks_up(seen, kernel) in weights.tables
        )
        if index in found.inside or (found.how.get(index) == "n" and weight not in joined):
            found.storages.update(kernel.writes)
    return found


def _looks_up(seen: Seen, kernel: Kernel) -> str:
    if kernel.name != "embedding":
        return ""
    return next((name for read in kernel.reads if (name := seen.name_of(read))), "")
