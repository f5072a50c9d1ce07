"""Sharding rules, which state for every operation the dimensions that are divided together.

The method is sharding propagation (Xu et al., 2021, arXiv:2105.04663). An operation has a set of indices, and each
index runs over one dimension of some of the tensors. Division along an index divides all these tensors. An index over
which an operation sums or normalises cannot be divided. The only exception is a linear layer with divided inputs, whose
outputs are partial sums for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from paceline.planning.model.recorder import Graph, Node, Unfollowable

# (tensor, dimension); tensors are counted over a node's inputs, then its outputs
Slot = tuple[int, int]
Tie = list[Slot]


@dataclass(frozen=True)
class Label:
    """Division of a tensor along `dim`. Each rank holds an equal part of every section.

    The dimension consists of `outer` repeats of sections with the sizes `sizes`. If there are fewer parts than ranks,
    `copies` consecutive ranks hold the same part.
    """

    dim: int
    outer: int
    sizes: tuple[int, ...]
    copies: int = 1

    @classmethod
    def of(cls, dim: int, sections: Sequence[int]) -> Label:
        """Create the label for these sections, in canonical form."""
        first = sections[0]
        return cls(dim, len(sections), (first,)) if all(s == first for s in sections) else cls(dim, 1, tuple(sections))

    @property
    def sections(self) -> tuple[int, ...]:
        """Sizes of all sections, in order."""
        return self.sizes * self.outer

    def along(self, dim: int) -> Label:
        """Return an equal division along another dimension."""
        return Label(dim, self.outer, self.sizes)

    def local(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the shape of the part of a tensor that one rank holds."""
        return tuple(n // self.parts(ranks) if d == self.dim else n for d, n in enumerate(shape))

    def parts(self, ranks: int) -> int:
        """Return the number of distinct parts over `ranks` ranks."""
        return ranks // self.copies


def implied(graph: Graph, node: Node, labels: dict[int, Label]) -> dict[int, Label]:
    """Return the labels of a node's tensors that follow from the known labels.

    Raises:
        Unfollowable: the operation does not support divided tensors, or there is no rule for the operation.
    """
    tensors = [*node.inputs, *node.outputs]
    shapes = [graph.values[v].shape for v in tensors]
    known = {slot: labels[v] for slot, v in enumerate(tensors) if v in labels}
    special = _SPECIAL.get(node.name)
    if special is not None:
        found = special(node, shapes, known)
    else:
        found = _run_together(_ties(node, shapes), known, node)
    result: dict[int, Label] = {}
    for slot, label in [*known.items(), *found.items()]:
        if result.setdefault(tensors[slot], label) != label:
            raise Unfollowable(f"{_where(node)} would need the same tensor divided in two different ways")
    divided = any(v in result for v in node.outputs) or not node.outputs
    if known and not divided and not is_row(node, labels | result) and node.name not in CREATIONS:
        raise Unfollowable(f"{_where(node)} sums over the dimension that would be divided")
    return result


def is_row(node: Node, labels: dict[int, Label]) -> bool:
    """True for a row-parallel linear layer, whose outputs are partial sums."""
    if node.op != "linear":
        return False
    x, weight = labels.get(node.inputs[0]), labels.get(node.inputs[1])
    return (weight is not None and weight.dim == (0 if node.kwargs["transposed"] else 1)) or (
        x is not None and x.dim == node.kwargs["dims"] - 1
    )


def _run_together(ties: list[Tie], known: dict[int, Label], node: Node) -> dict[int, Label]:
    found: dict[int, Label] = {}
    for slot, label in known.items():
        touched = [tie for tie in ties if (slot, label.dim) in tie]
        if not touched:
            raise Unfollowable(f"{_where(node)} needs dimension {label.dim} undivided")
        for tie in touched:
            for other, dim in tie:
                if found.setdefault(other, label.along(dim)) != label.along(dim):
                    raise Unfollowable(f"{_where(node)} would need the same tensor divided in two different ways")
    return found


def _ties(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    rule = _TIES.get(node.name)
    if rule is not None:
        return rule(node, shapes)
    if (
        not isinstance(node.op, str)
        and torch.Tag.nondeterministic_seeded in node.op.tags
        and "dropout" not in node.name
    ):
        raise Unfollowable(f"{_where(node)} would draw different random numbers on a part of the tensor")
    if not isinstance(node.op, str) and (torch.Tag.pointwise in node.op.tags or node.name in _POINTWISE):
        return _broadcast(shapes, len(node.inputs))
    if node.name in CREATIONS:
        return [[(len(node.inputs), d)] for d in range(len(shapes[-1]))]
    raise Unfollowable(f"{_where(node)} is not supported")


def _where(node: Node) -> str:
    return f"{node.name} in {node.path or 'the model'}"


def bound(node: Node) -> dict[str, Any]:
    """Bind a node's arguments to names, with the defaults of its schema."""
    schema = node.op._schema.arguments
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    return values | {a.name: value for a, value in zip(schema, node.args, strict=False)} | node.kwargs


def _broadcast(shapes: list[tuple[int, ...]], inputs: int) -> list[Tie]:
    """Return the dimensions that an element-wise operation with broadcasting divides together.

    Dimensions count from the right; dimensions of size 1 stay whole.
    """
    out = shapes[inputs] if len(shapes) > inputs else shapes[0]
    ties: list[Tie] = []
    for back in range(1, len(out) + 1):
        size = out[-back]
        ties.append(
            [(s, len(shape) - back) for s, shape in enumerate(shapes) if len(shape) >= back and shape[-back] == size]
        )
    return ties


def _permuted(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    dims, given = list(range(len(shapes[0]))), bound(node)
    if "dims" in given:
        dims = [d % len(dims) for d in given["dims"]]
    else:
        first, second = (given.get("dim0", 0), given.get("dim1", 1)) if len(dims) > 1 else (0, 0)
        dims[first], dims[second] = dims[second], dims[first]
    return [[(0, source), (1, target)] for target, source in enumerate(dims)]


def _all_but(name: str) -> Callable[[Node, list[tuple[int, ...]]], list[Tie]]:
    """Return the rule for operations that are element-wise except along some dimensions.

    The operation's argument `name` contains these dimensions.
    """

    def rule(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
        return [
            [(s, d) for s in range(len(shapes)) if len(shapes[s]) == len(shapes[0])]
            for d in _others(bound(node)[name], shapes[0])
        ]

    return rule


def _others(dims: Any, shape: tuple[int, ...]) -> list[int]:
    rank = len(shape)
    if dims is None or dims == []:
        return []
    taken = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    return [d for d in range(rank) if d not in taken]


def _reduced(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    given = bound(node)
    kept = _others(given.get("dim"), shapes[0])
    return [
        [(0, d), *((s, d if given.get("keepdim") else position) for s in range(1, len(shapes)))]
        for position, d in enumerate(kept)
    ]


def _normalised(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    outs = range(len(node.inputs), len(shapes))
    free = len(shapes[0]) - len(bound(node)["normalized_shape"])
    return [[(0, d), *((s, d) for s in outs)] for d in range(free)]


def _matmul(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    (a, b, out) = shapes[-3:] if node.name != "baddbmm" else (shapes[1], shapes[2], shapes[3])
    offset = len(shapes) - 3
    if len(a) < 2 or len(b) < 2:
        raise Unfollowable(f"{_where(node)} of vectors is not supported")
    ties: list[Tie] = [
        [(offset, len(a) - 2), (offset + 2, len(out) - 2)],
        [(offset + 1, len(b) - 1), (offset + 2, len(out) - 1)],
    ]
    for tie in _broadcast([a[:-2], b[:-2], out[:-2]], 2):
        ties.append([(offset + s, d) for s, d in tie])
    # baddbmm: the added tensor is divided like the output
    if offset:
        ties = [[*tie, *((0, d) for s, d in tie if s == 3 and shapes[0][d] == out[d])] for tie in ties]
    return ties


def _einsum(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    equation = str(node.args[0]).replace(" ", "")
    if "..." in equation or "->" not in equation:
        raise Unfollowable(f"{_where(node)} with the equation {equation} is not supported")
    sides = equation.replace("->", ",").split(",")
    kept = set(sides[-1])
    return [[(s, d) for s, side in enumerate(sides) for d, c in enumerate(side) if c == letter] for letter in kept]


def _raw_linear(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    out = len(shapes) - 1
    rows: list[Tie] = [[(0, d), (out, d)] for d in range(len(shapes[0]) - 1)]
    return [*rows, [*((s, 0) for s in range(1, out)), (out, len(shapes[out]) - 1)]]


def _lookup(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    return [*([(0, d), (2, d)] for d in range(len(shapes[0]))), [(1, 1), (2, len(shapes[2]) - 1)]]


def _stacked(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    at = bound(node)["dim"] % len(shapes[-1])
    return [
        [*((s, d) for s in range(len(shapes) - 1)), (len(shapes) - 1, d + (d >= at))] for d in range(len(shapes[0]))
    ]


def _concatenated(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    rank = len(shapes[-1])
    # there may be an empty vector among the inputs
    full = [s for s, shape in enumerate(shapes) if len(shape) == rank]
    return [[(s, d) for s in full] for d in _others(bound(node)["dim"], shapes[-1])]


def _without_dim(node: Node, shapes: list[tuple[int, ...]]) -> list[Tie]:
    kept = _others(bound(node)["dim"], shapes[0])
    return [[(0, d), *((s, position) for s in range(1, len(shapes)))] for position, d in enumerate(kept)]


def _linear(node: Node, shapes: list[tuple[int, ...]], known: dict[int, Label]) -> dict[int, Label]:
    out, last = len(shapes) - 1, len(shapes[0]) - 1
    gives, takes = (1, 0) if node.kwargs["transposed"] else (0, 1)
    if (0 in known and known[0].dim == last) or (1 in known and known[1].dim == takes):
        label = known.get(0) or known[1]
        if label.dim not in (last, takes) or (out in known and known[out].dim == last):
            raise Unfollowable(f"{_where(node)} would be divided along both its inputs and its outputs")
        return {0: label.along(last), 1: label.along(takes)}
    ties: list[Tie] = [[(0, d), (out, d)] for d in range(last)]
    ties.append([(1, gives), (out, last), *([(2, 0)] if out == 3 else [])])
    return _run_together(ties, known, node)


def _reshaped(node: Node, shapes: list[tuple[int, ...]], known: dict[int, Label]) -> dict[int, Label]:
    """Propagate labels through a reshape.

    A division into equal sections is kept if the sections stay within one dimension.
    """
    found = {}
    for slot, label in known.items():
        if slot not in (0, 1):
            raise Unfollowable(f"{_where(node)} takes its shape from a divided tensor")
        found[1 - slot] = _through_reshape(node, shapes[slot], shapes[1 - slot], label)
    return found


def _through_reshape(node: Node, shape: tuple[int, ...], into: tuple[int, ...], label: Label) -> Label:
    before = prod(shape[: label.dim])
    # number of repeats of divided sections, in row-major order
    lead = before * (label.outer if len(label.sizes) == 1 else 1)
    passed = 1
    for dim, size in enumerate(into):
        if passed * size > lead:
            if len(label.sizes) > 1 and passed == lead and size == shape[label.dim]:
                return label.along(dim)
            if len(label.sizes) == 1 and lead % passed == 0 and size % (lead // passed) == 0:
                return Label(dim, lead // passed, (size // (lead // passed),))
            break
        passed *= size
    raise Unfollowable(f"{_where(node)} from shape {shape} to shape {into} mixes the parts of different ranks")


def _cut(node: Node, shapes: list[tuple[int, ...]], known: dict[int, Label]) -> dict[int, Label]:
    """Propagate labels through split, chunk, slice and narrow.

    Other dimensions keep their division. Along the split dimension, the input has the sections of all outputs.
    """
    given = bound(node)
    dim = int(given["dim"]) % len(shapes[0])
    if any(label.dim != dim for label in known.values()):
        return _run_together(
            [[(s, d) for s in range(len(shapes))] for d in range(len(shapes[0])) if d != dim], known, node
        )
    start = int(given.get("start") or 0) % max(1, shapes[0][dim]) if node.name in {"slice", "narrow"} else 0
    if given.get("step", 1) != 1:
        raise Unfollowable(f"{_where(node)} has a step of {given['step']} along the dimension that would be divided")
    sizes = [shape[dim] for shape in shapes[1:]]
    if 0 in known:
        return {s + 1: Label.of(dim, part) for s, part in enumerate(_deal(node, known[0].sections, start, sizes))}
    if sum(sizes) != shapes[0][dim]:
        raise Unfollowable(f"{_where(node)} takes only a part of the dimension that would be divided")
    like = next(iter(known.values()))
    parts = [
        known[s + 1] if s + 1 in known else like if size == sum(like.sections) else Label(dim, 1, (size,))
        for s, size in enumerate(sizes)
    ]
    return {
        0: Label.of(dim, [n for part in parts for n in part.sections]),
        **{s + 1: part for s, part in enumerate(parts)},
    }


def _deal(node: Node, sections: tuple[int, ...], start: int, sizes: list[int]) -> list[list[int]]:
    """Return the sections in each of the consecutive ranges of `sizes` from `start` on."""
    ends, passed = [0], 0
    for size in sections:
        passed += size
        ends.append(passed)
    dealt = []
    for size in sizes:
        if start not in ends or start + size not in ends:
            raise Unfollowable(f"{_where(node)} cuts through the part of a rank")
        dealt.append(list(sections[ends.index(start) : ends.index(start + size)]))
        start += size
    return dealt


def _repeated(node: Node, shapes: list[tuple[int, ...]], known: dict[int, Label]) -> dict[int, Label]:
    """Propagate labels through repeat_interleave with an integer number of repeats."""
    given = bound(node)
    if not isinstance(given.get("repeats"), int) or given.get("dim") is None:
        raise Unfollowable(f"{_where(node)} is not supported")
    dim = given["dim"] % len(shapes[0])
    if any(label.dim != dim for label in known.values()):
        return _run_together([[(0, d), (1, d)] for d in range(len(shapes[0])) if d != dim], known, node)
    times = given["repeats"]
    if 0 in known:
        return {1: Label(dim, known[0].outer, tuple(n * times for n in known[0].sizes))}
    # each rank repeats the only row fewer times
    if shapes[0][dim] == 1:
        return {}
    if any(n % times for n in known[1].sizes):
        raise Unfollowable(f"{_where(node)} cuts through the part of a rank")
    return {0: Label(dim, known[1].outer, tuple(n // times for n in known[1].sizes))}


def _attention(node: Node, shapes: list[tuple[int, ...]], known: dict[int, Label]) -> dict[int, Label]:
    """Propagate labels through attention, along the batch or the heads.

    Query heads and grouped key-value heads are divided together.
    """
    out = len(shapes) - 1
    found: dict[int, Label] = {}
    for known_slot, label in known.items():
        back = len(shapes[known_slot]) - label.dim
        if back <= 2 or len(label.sizes) > 1:
            raise Unfollowable(f"{_where(node)} needs undivided sequences and heads")
        for slot, shape in enumerate(shapes):
            # a single head of keys and values serves all queries, like a mask of size 1
            if len(shape) < back or (slot not in (0, out) and shape[-back] == 1):
                continue
            if shape[-back] % label.outer:
                raise Unfollowable(f"{_where(node)} has a number of heads that cannot be divided in the same way")
            found[slot] = Label(len(shape) - back, label.outer, (shape[-back] // label.outer,))
    return found


_POINTWISE = {
    *(
        "dropout",
        "dropout_",
        "native_dropout",
        "alpha_dropout",
        "to",
        "_to_copy",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "detach_",
    ),
    *("type_as", "lift_fresh", "zeros_like", "ones_like", "full_like", "empty_like", "expand", "expand_as"),
    *("where", "masked_fill", "masked_fill_", "square", "clip", "clamp", "float_power", "silu_", "relu6"),
}
CREATIONS = {"zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"}
_TIES: dict[str, Callable[[Node, list[tuple[int, ...]]], list[Tie]]] = {
    **dict.fromkeys(("transpose", "permute", "t", "swapaxes", "swapdims"), _permuted),
    **dict.fromkeys(
        ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "cumsum", "flip", "normalize"),
        _all_but("dim"),
    ),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "prod", "argmax", "argmin"), _reduced),
    **dict.fromkeys(("any", "all", "linalg_vector_norm"), _reduced),
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"), _normalised),
    **dict.fromkeys(("matmul", "bmm", "mm", "baddbmm", "__matmul__"), _matmul),
    **dict.fromkeys(("tril", "triu"), lambda _, shapes: [[(0, d), (1, d)] for d in range(len(shapes[0]) - 2)]),
    **dict.fromkeys(("select", "unbind"), _without_dim),
    "einsum": _einsum,
    "embedding": _lookup,
    "stack": _stacked,
    "cat": _concatenated,
    "concat": _concatenated,
}
_SPECIAL: dict[str, Callable[[Node, list[tuple[int, ...]], dict[int, Label]], dict[int, Label]]] = {
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped
    ),
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "slice", "narrow"), _cut),
    "repeat_interleave": _repeated,
    "scaled_dot_product_attention": _attention,
}


def _leaf_or_raw_linear(node: Node, shapes: list[tuple[int, ...]], known: dict[int, Label]) -> dict[int, Label]:
    if isinstance(node.op, str):
        return _linear(node, shapes, known)
    return _run_together(_raw_linear(node, shapes), known, node)


def _leaf_or_raw_lookup(node: Node, shapes: list[tuple[int, ...]], known: dict[int, Label]) -> dict[int, Label]:
    if isinstance(node.op, str):
        return _run_together(_lookup(node, shapes), known, node)
    raise Unfollowable(f"{_where(node)} is not supported")


_SPECIAL |= {"linear": _leaf_or_raw_linear, "embedding": _leaf_or_raw_lookup}
