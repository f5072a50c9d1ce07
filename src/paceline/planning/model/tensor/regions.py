"""Regions of a trace that begin with column-parallel layers and end with row-parallel layers.

A region grows from one linear layer until the rules in `rules.py` imply no further tensors. For example, the query
layer implies the key and value layers, the relative position bias and the output layer. A region that reaches an
indivisible operation is dropped, so the remaining regions are correct by construction. The result is the division of
Shoeybi et al. (2019, arXiv:1909.08053), found by a search instead of by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd, prod

import torch
from torch import nn

from paceline.planning.model.recorder import UNSEEN_GRADIENT, Entry, Graph, Node, Unfollowable
from paceline.planning.model.tensor.rules import Label, bound, implied, is_row

# operations that `sequence` adds to a graph; they reduce or split gradients themselves
EXCHANGES = ("enter", "scatter", "collect")
_ATTENTION = {"scaled_dot_product_attention", "bmm", "matmul", "baddbmm", "einsum", "softmax", "_softmax"}


@dataclass
class Region:
    """Set of tensors that are divided together.

    Attributes:
        columns, rows: paths of the column-parallel and row-parallel linear layers in the region.
        heads: sizes of the dimensions that attention divides, without those in `shared`.
        sizes: sizes of all divided dimensions, without those in `shared`.
        shared: tensors of keys and values, which can be divided over fewer ranks than other tensors.
    """

    labels: dict[int, Label]
    columns: list[str]
    rows: list[str]
    attention: bool
    heads: set[int]
    sizes: set[int]
    shared: list[SharedHeads] = field(default_factory=list)

    def divides(self, ranks: int) -> bool:
        """True if `ranks` ranks can divide all sizes and all shared heads."""
        return all(size % ranks == 0 for size in self.sizes) and all(heads.fits(ranks) for heads in self.shared)

    @property
    def degrees(self) -> list[int]:
        """Numbers of ranks over which the region can be divided."""
        return [n for n in range(1, gcd(*self.sizes) + 1) if self.divides(n)]

    def labels_over(self, ranks: int) -> dict[int, Label]:
        """Return the labels for a division over `ranks` ranks. Several ranks may hold the same shared heads."""
        found = dict(self.labels)
        for heads in self.shared:
            found |= heads.labels(self.labels, ranks)
        return found


@dataclass
class TensorRegions:
    """All regions of a model.

    Attributes:
        regions: the regions, in the order of the computation.
        why_whole: maps the path of a linear layer outside of all regions to the reason.
    """

    regions: list[Region] = field(default_factory=list)
    why_whole: dict[str, str] = field(default_factory=dict)


def find_regions(graph: Graph, hints: dict[str, str] | None = None) -> TensorRegions:
    """Find every region of a graph, in the order of the computation.

    `hints` maps the paths of layers to parallel styles. No region begins with a layer of the style `rowwise`.
    """
    found, taken = TensorRegions(), set[int]()
    for node in graph.nodes:
        if node.name != "linear" or isinstance(node.op, str) is False:
            continue
        weight, out = node.inputs[1], node.outputs[0]
        if weight in taken or (hints or {}).get(node.path) == "rowwise":
            continue
        for sections in _sections(graph, out):
            label = Label.of(len(graph.values[out].shape) - 1, sections)
            try:
                region = _grown(graph, out, label)
                if taken & region.labels.keys():
                    raise Unfollowable("the divided region would extend into the region of another pair of layers")
            except Unfollowable as error:
                found.why_whole.setdefault(node.path, str(error))
                continue
            found.why_whole.pop(node.path, None)
            taken |= region.labels.keys()
            found.regions.append(region)
            break
    for region in found.regions:
        for path in (*region.columns, *region.rows):
            found.why_whole.pop(path, None)
    return found


def _sections(graph: Graph, value: int) -> Iterator[tuple[int, ...]]:
    """Yield ways to divide a linear layer's output into sections.

    The output may be one section, or have the sections into which later operations split it.
    """
    size = graph.values[value].shape[-1]
    yield (size,)
    for number, _ in graph.values[value].uses:
        node = graph.nodes[number]
        if node.name in {"split", "chunk", "split_with_sizes"}:
            yield tuple(graph.values[v].shape[-1] for v in node.outputs)
        elif node.name in {"view", "reshape", "unflatten"}:
            into = graph.values[node.outputs[0]].shape
            start = next((d for d in range(len(into)) if prod(into[d:]) == size), len(into))
            yield from ((size // prod(into[start:d]),) * prod(into[start:d]) for d in range(start + 1, len(into)))
        elif node.name == "contiguous":
            yield from _sections(graph, node.outputs[0])
    slices = [graph.nodes[n] for n, _ in graph.values[value].uses if graph.nodes[n].name == "slice"]
    edges = {0, size}
    for node in slices:
        given = bound(node)
        if int(given["dim"]) % len(graph.values[value].shape) == len(graph.values[value].shape) - 1:
            edges |= {n % size if n < 0 else min(n, size) for n in (given.get("start") or 0, given.get("end") or size)}
    ordered = sorted(edges)
    if len(ordered) > 2:
        yield tuple(b - a for a, b in pairwise(ordered))


def _grown(graph: Graph, value: int, label: Label) -> Region:
    labels, queue = {value: label}, [value]
    touched: set[int] = set()
    while queue:
        for number in _around(graph, queue.pop()):
            touched.add(number)
            for other, wanted in implied(graph, graph.nodes[number], labels).items():
                if other not in labels:
                    if graph.values[other].kind in {"input", "constant"}:
                        raise Unfollowable("a tensor that is not a parameter would be divided")
                    labels[other] = wanted
                    queue.append(other)
                elif labels[other] != wanted:
                    raise Unfollowable(
                        f"{graph.nodes[number].name} in {graph.nodes[number].path} would need "
                        "the same tensor divided in two different ways"
                    )
    if labels.keys() & set(graph.outputs):
        raise Unfollowable("the model's output would be divided")
    nodes = [graph.nodes[n] for n in sorted(touched)]
    rows = [node.path for node in nodes if is_row(node, labels)]
    if not rows:
        raise Unfollowable("no linear layer reads the tensor that would be divided")
    columns = [
        node.path for node in nodes if node.name == "linear" and node.inputs[1] in labels and not is_row(node, labels)
    ]
    attention = any(node.name in _ATTENTION and len(graph.values[node.outputs[0]].shape) > 3 for node in nodes)
    shared = find_shared_heads(graph, nodes, labels)
    own = labels.keys() - {v for heads in shared for v in heads.values}
    sizes = {size for v in own for size in labels[v].sizes}
    heads = {
        size
        for node in nodes
        if node.name in {"view", "reshape", "unflatten"}
        for v in node.outputs
        if v in own
        for size in labels[v].sizes
    }
    merged = {
        size for node in nodes if node.name == "linear" for v in node.inputs if v in own for size in labels[v].sizes
    }
    return Region(
        labels, list(dict.fromkeys(columns)), list(dict.fromkeys(rows)), attention, heads - merged, sizes, shared
    )


def _around(graph: Graph, value: int) -> set[int]:
    entry = graph.values[value]
    return {number for number, _ in entry.uses} | ({entry.producer} if entry.producer >= 0 else set())


@dataclass
class Boundaries:
    """Places where gradients are partial sums that must be reduced over ranks.

    Attributes:
        copies: pairs (entry, value) of a module call and an argument that only divided layers read.
        parameters: names of replicated parameters used in divided operations; their gradients are partial sums.
        results: paths of row-parallel layers whose reduced output is read only by divided operations.
    """

    copies: list[tuple[Entry, int]] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)
    results: set[str] = field(default_factory=set)


def find_boundaries(graph: Graph, labels: dict[int, Label]) -> Boundaries:
    """Find the places where replicated tensors enter divided computations.

    The search goes backwards from the divided operations. An activation whose gradient is a partial sum is reduced at
    the outermost module call that takes it as an argument and in which no other operation reads it. If there is no such
    call, it is reduced at the row-parallel layer that computes it. Otherwise, the inputs of the operation that computes
    it also have partial sums, down to its parameters. So every path from a parameter or an input to a divided operation
    has exactly one reduction.

    Raises:
        Unfollowable: divided and undivided operations of the same module read a tensor, so there is no place for a
            reduction.
    """
    result, learns = Boundaries(), _learned(graph)
    # maps a value to the nodes whose gradient for it is a partial sum
    partial: dict[int, set[int]] = {}
    for number, node in enumerate(graph.nodes):
        if node.op not in EXCHANGES and any(v in labels for v in (*node.inputs, *node.outputs)):
            joined_whole = is_row(node, labels) and node.outputs[0] not in labels
            bias = node.inputs[2] if joined_whole and len(node.inputs) > 2 else None
            for v in node.inputs:
                if v not in labels and v != bias and learns[v]:
                    partial.setdefault(v, set()).add(number)
    for value in range(len(graph.values) - 1, -1, -1):
        producer = graph.values[value].producer
        if value not in partial or (producer >= 0 and graph.nodes[producer].op in EXCHANGES):
            continue
        entry = graph.values[value]
        uses = {number for number, _ in entry.uses if number in partial[value] or not _is_unread(graph, number)}
        open_uses = set(partial[value])
        if entry.kind != "parameter":
            for boundary in _boundaries(graph, value, uses, open_uses):
                result.copies.append((boundary, value))
                open_uses -= set(range(boundary.start, boundary.stop))
        if not open_uses:
            continue
        if open_uses != uses or value in graph.outputs:
            raise Unfollowable(
                f"{graph.nodes[min(open_uses)].path or 'the model'}: both divided and undivided "
                "operations read the same tensor"
            )
        if entry.kind == "parameter":
            result.parameters.add(entry.name)
        elif entry.producer < 0:
            raise Unfollowable("divided operations outside of any module read an input of the model")
        elif is_row(graph.nodes[entry.producer], labels):
            result.results.add(graph.nodes[entry.producer].path)
        else:
            _walk_back(graph.nodes[entry.producer], entry.producer, labels, learns, partial)
    result.copies = _once_a_module(graph, result.copies, learns)
    for node in graph.nodes:
        if node.path in result.results and node.outputs[0] not in partial:
            raise Unfollowable(
                f"{node.path} is called several times, for both divided and undivided operations", node.path
            )
    return result


def _is_unread(graph: Graph, number: int) -> bool:
    """True for a slice that no operation reads, such as a sliding window's cache."""
    node = graph.nodes[number]
    return node.name == "slice" and not any(graph.values[v].uses or v in graph.outputs for v in node.outputs)


def _walk_back(
    node: Node, number: int, labels: dict[int, Label], learns: list[bool], partial: dict[int, set[int]]
) -> None:
    """Propagate partial sums of gradients from a node's outputs to its inputs.

    Partial sums can be propagated because the gradients of inputs are linear in the gradients of outputs.

    Raises:
        Unfollowable: the operation's gradient is unknown, or an input is divided.
    """
    if node.name in UNSEEN_GRADIENT:
        raise Unfollowable(
            f"{node.name} in {node.path or 'the model'} would receive only a part of a gradient", node.path
        )
    for v in node.inputs:
        if learns[v] and v in labels:
            raise Unfollowable(
                f"{node.name} in {node.path or 'the model'} turns a divided tensor into an undivided one", node.path
            )
        if learns[v]:
            partial.setdefault(v, set()).add(number)


def _once_a_module(graph: Graph, copies: list[tuple[Entry, int]], learns: list[bool]) -> list[tuple[Entry, int]]:
    """Keep only the first call of each module that is called repeatedly.

    A reduction that is added to a module applies to all calls of the module.

    Raises:
        Unfollowable: only some calls of a module need the reduction.
    """
    wanted = {
        (entry.path, place, value) for entry, value in copies for place, v in entry.arguments.items() if v == value
    }
    for path, place in {(path, place) for path, place, _ in wanted}:
        for entry in graph.entries:
            value = entry.arguments.get(place)
            if entry.path == path and value is not None and learns[value] and (path, place, value) not in wanted:
                raise Unfollowable(f"{path} is called several times, with both divided and undivided tensors", path)
    first: dict[tuple[str, tuple[int | str, ...]], tuple[Entry, int]] = {}
    for entry, value in copies:
        first.setdefault(
            (entry.path, tuple(place for place, v in entry.arguments.items() if v == value)), (entry, value)
        )
    return list(first.values())


def _boundaries(graph: Graph, value: int, uses: set[int], wanted: set[int]) -> list[Entry]:
    """Return the outermost module calls in which only the nodes `wanted` read the argument `value`."""
    found: list[Entry] = []
    # longest first
    for entry in sorted(graph.entries, key=lambda e: e.start - e.stop):
        inside = {n for n in uses if entry.start <= n < entry.stop}
        covered = any(outer.start <= entry.start and entry.stop <= outer.stop for outer in found)
        if value in entry.arguments.values() and inside and inside <= wanted and not covered:
            found.append(entry)
    return found


def _learned(graph: Graph) -> list[bool]:
    """Return for each value whether it may have a gradient.

    These are inputs, parameters, and values computed from them.
    """
    learns = [value.kind in {"parameter", "input"} and value.floating for value in graph.values]
    for node in graph.nodes:
        if any(learns[v] for v in node.inputs):
            for v in node.outputs:
                learns[v] = graph.values[v].floating
    return learns


_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten"}
# between an `expand` and the reshape that merges two dimensions into one
_SAME_ELEMENTS = {"clone", "contiguous", "alias", "to", "_to_copy"}


@dataclass(frozen=True)
class Joint:
    """Operation that combines a few key-value heads with the many heads that share them.

    Attributes:
        few, many: tensor with the few heads, and tensor with the many heads.
        times: number of heads in `many` that share one head in `few`.
        path: path of the module whose code performs the operation.
        repeated: result of repeating heads, before dimensions are merged; None if the operation does not repeat heads.
        dim: dimension of the repeated heads in `repeated`.
    """

    few: int
    many: int
    times: int
    path: str
    repeated: int | None = None
    dim: int = 0


@dataclass(frozen=True)
class SharedHeads:
    """Tensors between a key or value projection and the joints.

    Attributes:
        values: these tensors, and the weight and bias of the projection.
        heads: number of heads.
    """

    values: frozenset[int]
    heads: int

    def fits(self, ranks: int) -> bool:
        """True if every rank holds whole heads, or several ranks share one head."""
        return self.heads % ranks == 0 or ranks % self.heads == 0

    def labels(self, labels: dict[int, Label], ranks: int) -> dict[int, Label]:
        """Return the labels of `values` for a division over `ranks` ranks."""
        copies = 1 if self.heads % ranks == 0 else ranks // self.heads
        return {v: replace(labels[v], copies=copies) for v in self.values}


def find_shared_heads(graph: Graph, nodes: Collection[Node], labels: dict[int, Label]) -> list[SharedHeads]:
    """Return all shared heads among the divided tensors of a region with these nodes."""
    connected = _Connected(labels)
    joints: list[Joint] = []
    for node in nodes:
        here = list(joints_of(graph, node, labels))
        few = {joint.few for joint in here}
        connected.join(v for v in (*node.inputs, *node.outputs) if v in labels and v not in few)
        joints += here
    shared = []
    fews = {connected.of(joint.few) for joint in joints}
    for root in fews:
        here = [joint for joint in joints if connected.of(joint.few) == root]
        values = frozenset(v for v in labels if connected.of(v) == root)
        heads = {size for joint in here for size in labels[joint.few].sizes}
        if (
            len(heads) == 1
            and all(connected.of(joint.many) not in fews for joint in here)
            and all(size % max(heads) == 0 for v in values for size in labels[v].sizes)
            and _may_be_copied(graph, values, labels)
        ):
            shared.append(SharedHeads(values, max(heads)))
    return shared


def joints_of(graph: Graph, node: Node, labels: dict[int, Label]) -> Iterator[Joint]:
    """Yield joints of one operation whose tensors are divided along their heads."""
    if node.name == "scaled_dot_product_attention":
        pairs = [(v, node.inputs[0]) for v in dict.fromkeys(node.inputs[1:3])]
    elif node.name == "repeat_interleave" or node.name in _RESHAPES:
        pairs = [(node.inputs[0], node.outputs[0])]
    else:
        return
    for few, many in pairs:
        times = _times(labels.get(few), labels.get(many))
        if times == 1:
            continue
        if node.name not in _RESHAPES:
            repeated = many if node.name == "repeat_interleave" else None
            yield Joint(few, many, times, node.path, repeated)
        elif (expand := _expanded(graph, few, labels[few].dim + 1, times)) is not None:
            yield Joint(few, many, times, node.path, expand, labels[few].dim + 1)


def _times(few: Label | None, many: Label | None) -> int:
    """Return how many heads of `many` share one head of `few`; else 1."""
    if few is None or many is None or few.outer != many.outer or len(few.sizes) > 1 or len(many.sizes) > 1:
        return 1
    return many.sizes[0] // few.sizes[0] if many.sizes[0] % few.sizes[0] == 0 else 1


def _expanded(graph: Graph, value: int, dim: int, times: int) -> int | None:
    """Return the result of the `expand` that gave a dimension the size `times`, or None."""
    shape = graph.values[value].shape
    while graph.values[value].producer >= 0 and dim < len(shape) and shape[dim] == times:
        node = graph.nodes[graph.values[value].producer]
        before = graph.values[node.inputs[0]].shape if node.inputs else ()
        if node.name == "expand":
            return value if len(before) == len(shape) and before[dim] == 1 else None
        if node.name not in _SAME_ELEMENTS:
            return None
        value = node.inputs[0]
    return None


def _may_be_copied(graph: Graph, values: frozenset[int], labels: dict[int, Label]) -> bool:
    """True if several ranks may compute the same values without differences.

    Only linear layers may read the parameters, and no operation may draw random numbers, which would differ between
    ranks.
    """
    for v in values:
        numbers = {number for number, _ in graph.values[v].uses} | {graph.values[v].producer}
        for node in (graph.nodes[number] for number in numbers if number >= 0):
            if graph.values[v].kind == "parameter" and (
                node.op != "linear" or v not in node.inputs[1:] or is_row(node, labels)
            ):
                return False
            if v in node.outputs and not isinstance(node.op, str) and torch.Tag.nondeterministic_seeded in node.op.tags:
                return False
    return True


@dataclass(frozen=True)
class Repeat:
    """Operation that repeats heads fewer times on a rank than in the whole model.

    Attributes:
        path: path of the module whose code performs the operation.
        times: number of times that the whole model repeats the heads.
        by: number by which `times` is divided on a rank.
        repeated, dim: as in `Joint`; `repeated` is None if attention itself repeats heads.
        merged: result in which the repeated heads are merged into one dimension.
    """

    path: str
    times: int
    by: int
    repeated: int | None
    dim: int
    merged: int | None


def repeats_of(graph: Graph, labels: dict[int, Label], ranks: int) -> list[Repeat]:
    """Return the operations that repeat heads which several ranks share."""
    found = []
    for node in graph.nodes:
        for joint in joints_of(graph, node, labels):
            if labels[joint.few].copies > 1:
                merged = joint.many if joint.repeated is not None else None
                by = labels[joint.few].copies
                found.append(Repeat(joint.path, joint.times, by, joint.repeated, joint.dim, merged))
        found += _repeats_of_one(graph, node, labels, ranks)
    return found


def _repeats_of_one(graph: Graph, node: Node, labels: dict[int, Label], ranks: int) -> Iterator[Repeat]:
    """Yield the operations that repeat a single, undivided key-value head for all query heads."""
    if node.name == "scaled_dot_product_attention":
        query = labels.get(node.inputs[0])
        back = len(graph.values[node.inputs[0]].shape) - query.dim if query is not None else 0
        key = graph.values[node.inputs[1]].shape
        if query is not None and len(query.sizes) == 1 and len(key) >= back and key[-back] == 1:
            yield Repeat(node.path, query.sizes[0], query.parts(ranks), None, 0, None)
    elif node.name == "repeat_interleave":
        many = labels.get(node.outputs[0])
        if many is not None and node.inputs[0] not in labels:
            yield Repeat(node.path, many.sizes[0], many.parts(ranks), node.outputs[0], many.dim, node.outputs[0])
    elif node.name in _RESHAPES:
        few, many = labels.get(node.inputs[0]), labels.get(node.outputs[0])
        if few is None or many is None or len(few.sizes) > 1 or few.sizes != many.sizes:
            return
        if (expand := _expanded(graph, node.inputs[0], few.dim, few.sizes[0])) is not None:
            yield Repeat(node.path, few.sizes[0], few.parts(ranks), expand, few.dim, node.outputs[0])


def counts_of(module: nn.Module, times: int) -> list[str]:
    """Return the attributes that contain the number of query heads per key-value head.

    Functions outside of the module read these attributes, such as `repeat_kv` of Hugging Face models.
    """
    return [
        name
        for name, value in vars(module).items()
        if type(value) is int and value == times and ("group" in name or "rep" in name)
    ]


class _Connected:
    """Sets of values that must be divided in the same way."""

    def __init__(self, values: Collection[int]) -> None:
        self._up = {v: v for v in values}

    def of(self, value: int) -> int:
        """Return the value that represents the set of a value."""
        while self._up[value] != value:
            self._up[value] = value = self._up[self._up[value]]
        return value

    def join(self, values: Iterator[int]) -> None:
        """Merge the sets of the values."""
        first: int | None = None
        for v in values:
            if first is None:
                first = v
            self._up[self.of(v)] = self.of(first)


def rows_of_heads(graph: Graph, labels: dict[int, Label]) -> dict[str, Label]:
    """Return the labels of projection parameters of which a rank uses only some rows.

    The result maps the names of the parameters to labels.
    """
    return {
        graph.values[v].name: label
        for v, label in labels.items()
        if label.copies > 1 and graph.values[v].kind == "parameter"
    }
