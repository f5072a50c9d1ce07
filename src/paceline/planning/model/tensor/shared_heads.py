"""Shared heads: keys and values of grouped attention that several ranks use.

There are fewer of them than ranks. With 4 query heads and 2 heads of keys and values, 4 ranks have one query head each,
and two of them use the same keys and values. Both compute them, from the rows of a projection that every rank holds
whole, and whose gradient is summed over ranks. They are found where attention, or a repeat of heads, joins the smaller
number to the larger one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from paceline.planning.model.recording.graph import Graph, Node
from paceline.planning.model.tensor.rules import Label, is_row

_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten"}
# between an `expand` and the reshape that makes one dimension of two
_SAME_ELEMENTS = {"clone", "contiguous", "alias", "to", "_to_copy"}


@dataclass(frozen=True)
class Joint:
    """A place where few heads meet the many that share them.

    Attributes:
        few, many: a tensor with the few heads, and one with the many.
        times: how many share one.
        path: the module whose code it is.
        repeated: the result in which heads are repeated, if they are, before dimensions are merged.
        dim: the dimension of it in which they are.
    """

    few: int
    many: int
    times: int
    path: str
    repeated: int | None = None
    dim: int = 0


@dataclass(frozen=True)
class SharedHeads:
    """Tensors between the projection to keys or values and the joints.

    Attributes:
        values: the tensors, and the projection's weight and bias.
        heads: number of heads.
    """

    values: frozenset[int]
    heads: int

    def fits(self, ranks: int) -> bool:
        """True if a rank has whole heads, or several ranks have one."""
        return self.heads % ranks == 0 or ranks % self.heads == 0

    def labels(self, labels: dict[int, Label], ranks: int) -> dict[int, Label]:
        """The labels of `values` over a number of ranks that fits."""
        copies = 1 if self.heads % ranks == 0 else ranks // self.heads
        return {v: replace(labels[v], copies=copies) for v in self.values}


def find_shared_heads(graph: Graph, nodes: Collection[Node], labels: dict[int, Label]) -> list[SharedHeads]:
    """All shared heads among the divided tensors of a region with these nodes."""
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
    """Joints of one operation whose tensors are divided along their heads."""
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
    """Number of `many` that share one of `few`; 1 if they are no such heads."""
    if few is None or many is None or few.outer != many.outer or len(few.sizes) > 1 or len(many.sizes) > 1:
        return 1
    return many.sizes[0] // few.sizes[0] if many.sizes[0] % few.sizes[0] == 0 else 1


def _expanded(graph: Graph, value: int, dim: int, times: int) -> int | None:
    """The result of the `expand` that made a value's dimension `times` large, or None."""
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
    """True if only linear layers read the values' parameters, and nothing draws random numbers.

    Ranks with the same head would draw other numbers for it.
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
    """A place at which heads are repeated less often on a rank.

    Attributes:
        path: the module whose code it is.
        times: how often the whole model repeats them.
        by: what a rank divides that by.
        repeated, dim: as of `Joint`; None where attention itself repeats.
        merged: the result that has repeated heads in one dimension.
    """

    path: str
    times: int
    by: int
    repeated: int | None
    dim: int
    merged: int | None


def repeats_of(graph: Graph, labels: dict[int, Label], ranks: int) -> list[Repeat]:
    """Places where heads are repeated that several ranks share."""
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
    """Places where a single head, which is not divided, is repeated for all queries."""
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
    """Attributes in which a module keeps the number of query heads that share a head.

    They are read by functions that are not its own, such as `repeat_kv` of Hugging Face models.
    """
    return [
        name
        for name, value in vars(module).items()
        if type(value) is int and value == times and ("group" in name or "rep" in name)
    ]


class _Connected:
    """Sets of values that have to be divided in the same way."""

    def __init__(self, values: Collection[int]) -> None:
        self._up = {v: v for v in values}

    def of(self, value: int) -> int:
        """The value that stands for a set."""
        while self._up[value] != value:
            self._up[value] = value = self._up[self._up[value]]
        return value

    def join(self, values: Iterator[int]) -> None:
        """Make one set of those of the values."""
        first: int | None = None
        for v in values:
            if first is None:
                first = v
            self._up[self.of(v)] = self.of(first)


def rows_of_heads(graph: Graph, labels: dict[int, Label]) -> dict[str, Label]:
    """Labels of the projections' parameters of which each rank uses its heads' rows, by name."""
    return {
        graph.values[v].name: label
        for v, label in labels.items()
        if label.copies > 1 and graph.values[v].kind == "parameter"
    }
