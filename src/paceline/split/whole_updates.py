"""Optimizer steps that need whole parameters, on ranks that hold parts of the parameters.

Muon needs each matrix whole, and LARS and LAMB need the norm of each parameter. `share_updates` connects such an
optimizer to the other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.device import uploaded, widest_float
from paceline.job.parameters import matrix_shape
from paceline.job.zoo.muon import Muon, Orthogonalize
from paceline.job.zoo.optimizers import Layerwise
from paceline.planning.plan import REPLICA
from paceline.split.layout import Box, Interval, Parts, ShardLayout
from paceline.split.mesh import Mesh


def share_updates(
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    parameters: Mapping[str, Tensor],
    parts: Parts | None,
    *,
    identical_replicas: bool,
) -> None:
    """Let an optimizer take its steps together with the ranks that hold the same parameters.

    Every rank calls this function. Optimizers with elementwise updates do not change.

    Args:
        parameters: this rank's parameters, by name in the undivided model.
        parts: the part of each parameter that this rank holds; None if this rank holds whole parameters.
        identical_replicas: True if all replicas take the same steps, so that they can divide the work of Muon.
    """
    stage = tuple(axis for axis in REPLICA if axis != "pp")
    if isinstance(optimizer, Muon):
        group = mesh.group_over("dp", *stage) if identical_replicas else mesh.group_over(*stage)
        matrices = muon_matrices(optimizer)
        named = {name: p for name, p in parameters.items() if p in matrices}
        layouts = {
            name: ShardLayout.whole(p.shape) if parts is None else parts[name].layout for name, p in named.items()
        }
        optimizer.ranks = SharedMatrices(group, named, layouts) if group.size > 1 else None
    elif isinstance(optimizer, Layerwise):
        group = mesh.group_over(*stage)
        divided = parts is not None and group.size > 1
        optimizer.ranks = SharedNorms(group, _holders(parameters, parts or {}, mesh)) if divided else None


def muon_matrices(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Return the parameters that Muon updates; none if the optimizer is not Muon."""
    groups = optimizer.param_groups if isinstance(optimizer, Muon) else []
    return {p for group in groups if group["matrices"] for p in group["params"]}


def takes_steps_together(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step of the optimizer needs other ranks."""
    return isinstance(optimizer, (Muon, Layerwise)) and optimizer.ranks is not None


def _holders(parameters: Mapping[str, Tensor], parts: Parts, mesh: Mesh) -> dict[Tensor, int]:
    """Return how many ranks of a pipeline stage hold the same part of each parameter."""
    return {
        p: prod(mesh.sizes[axis] for axis in REPLICA if axis != "pp" and axis not in parts[name].sharded)
        for name, p in parameters.items()
    }


class SharedNorms:
    """Norms of whole parameters, from one sum over the ranks of a pipeline stage.

    Args:
        holders: for each parameter, the number of ranks in the group that hold the same part.
    """

    def __init__(self, group: Group, holders: Mapping[Tensor, int]) -> None:
        self._group, self._place = group, {p: number for number, p in enumerate(holders)}
        self._share = uploaded([1 / n for n in holders.values()], widest_float(group.device), group.device)

    def norms(self, parameters: Sequence[Tensor], tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the L2 norms of whole tensors, as one vector for each entry of `tensors`.

        Args:
            tensors: sequences of tensors of which this rank holds the same parts as of the parameters.
        """
        place = [self._place[p] for p in parameters]
        squares = self._share.new_zeros(len(tensors), len(self._share))
        for row, own in zip(squares, tensors, strict=True):
            if own:
                row[place] = torch.stack(list(torch._foreach_norm(list(own)))).to(row).square() * self._share[place]
        self._group.all_reduce(squares)
        return [row[place].sqrt().to(own[0]) if own else row[:0] for row, own in zip(squares, tensors, strict=True)]


class _Route(NamedTuple):
    """Movement of one matrix between the ranks and its owner.

    Attributes:
        parameter: number of the parameter.
        shape: shape of the whole matrix, as a tensor with the dimensions of the parameter.
        owner: rank that orthogonalizes the matrix.
        boxes: for each rank, the blocks of the matrix that the rank holds.
        sources: the ranks whose blocks together form the matrix.
    """

    parameter: int
    shape: tuple[int, ...]
    owner: int
    boxes: list[tuple[Box, ...]]
    sources: tuple[int, ...]


class SharedMatrices:
    """Matrices that the ranks of a pipeline stage orthogonalize together, each matrix on one rank.

    The owner of a matrix is a rank with the largest part of the matrix. Among these ranks, the matrices are assigned
    from the most expensive to the cheapest, each to the rank with the least work so far. One all-to-all sends the parts
    to the owners, and a second all-to-all sends the results to all ranks that hold a part. Replicas that hold whole
    matrices need only the second. A result has the same bits on all ranks.

    Args:
        group: all ranks that hold parts of the matrices; each constructs this object.
        parameters: this rank's parts of the matrices, by name; the names are the same on all ranks.
        layouts: layouts of these parts.
    """

    def __init__(self, group: Group, parameters: Mapping[str, Tensor], layouts: Mapping[str, ShardLayout]) -> None:
        self._group, self._names = group, list(parameters)
        self._number = {p: number for number, p in enumerate(parameters.values())}
        self._full = [layouts[name].full for name in self._names]
        divided = any(group.gather_json(not all(layouts[name].is_whole for name in self._names)))
        kept = group.gather_json([layouts[name].kept for name in self._names]) if divided else None
        self._routes = self._assigned(
            [
                [ShardLayout(full, _kept(of_rank[number])) for of_rank in kept]
                if kept is not None
                else [ShardLayout.whole(full)] * group.size
                for number, full in enumerate(self._full)
            ]
        )

    def full_shape(self, parameter: Tensor) -> Sequence[int]:
        """Return the shape of the whole parameter."""
        return self._full[self._number[parameter]]

    def orthogonalized(
        self, parameters: Sequence[Tensor], updates: Sequence[Tensor], orthogonalize: Sequence[Orthogonalize]
    ) -> list[Tensor]:
        """See `paceline.job.zoo.muon.Matrices`."""
        place = {self._number[p]: i for i, p in enumerate(parameters)}
        routes = [route for route in self._routes if route.parameter in place]
        me, device = self._group.rank, self._group.device
        parts = [updates[place[route.parameter]] for route in routes]
        to_owner = self._exchange(
            [(route, source, route.owner) for route in routes for source in route.sources],
            {id(route): part for route, part in zip(routes, parts, strict=True)},
            whole=False,
        )
        results: dict[int, Tensor] = {}
        for route, part in zip(routes, parts, strict=True):
            if route.owner == me:
                matrix = torch.empty(route.shape, dtype=part.dtype, device=device)
                for source in route.sources:
                    blocks = to_owner[id(route), source] if source != me else [box.of(part) for box in route.boxes[me]]
                    for box, block in zip(route.boxes[source], blocks, strict=True):
                        box.within(matrix).copy_(block)
                flat = matrix.view(matrix_shape(route.shape))
                results[id(route)] = orthogonalize[place[route.parameter]](flat).reshape(route.shape)
        from_owner = self._exchange(
            [
                (route, route.owner, rank)
                for route in routes
                for rank, boxes in enumerate(route.boxes)
                if boxes and rank != route.owner
            ],
            results,
            whole=True,
        )
        found = [torch.empty_like(update) for update in updates]
        for route in routes:
            own = found[place[route.parameter]]
            if route.owner == me:
                blocks = [box.within(results[id(route)]) for box in route.boxes[me]]
            else:
                blocks = from_owner.get((id(route), route.owner), [])
            for box, block in zip(route.boxes[me], blocks, strict=True):
                box.of(own).copy_(block)
        return found

    def _exchange(
        self, moves: Sequence[tuple[_Route, int, int]], tensors: Mapping[int, Tensor], *, whole: bool
    ) -> dict[tuple[int, int], list[Tensor]]:
        """Send blocks from rank to rank, and return the received blocks by route and sender.

        Args:
            moves: all moves as (route, sender, receiver), the same on all ranks. Ranks send nothing to themselves.
            tensors: for each route whose blocks this rank sends, the tensor with the blocks.
            whole: True if the sender has the whole matrix and sends the receiver's blocks, False if it sends its own.
        """
        moves = [move for move in moves if move[1] != move[2]]
        if not moves:
            return {}
        me, group = self._group.rank, self._group
        sent: list[Tensor] = []
        sends, receives = [0] * group.size, [0] * group.size
        for rank in range(group.size):
            for route, sender, receiver in moves:
                boxes = route.boxes[receiver if whole else sender]
                size = sum(prod(box.shape) for box in boxes) * _BYTES
                if sender == me and receiver == rank:
                    tensor = tensors[id(route)]
                    sent += [(box.within(tensor) if whole else box.of(tensor)).reshape(-1) for box in boxes]
                    sends[rank] += size
                elif receiver == me and sender == rank:
                    receives[rank] += size
        empty = torch.empty(0, dtype=torch.bfloat16, device=group.device)
        outgoing = torch.cat([tensor.to(group.device) for tensor in sent]) if sent else empty
        incoming = torch.empty(sum(receives), dtype=torch.uint8, device=group.device)
        # as bytes, because not every transport knows bfloat16
        group.all_to_all(incoming, outgoing.view(torch.uint8), receives, sends)
        found: dict[tuple[int, int], list[Tensor]] = {}
        numbers, at = incoming.view(torch.bfloat16), 0
        for rank in range(group.size):
            for route, sender, receiver in moves:
                if receiver == me and sender == rank:
                    blocks = found.setdefault((id(route), sender), [])
                    for box in route.boxes[receiver if whole else sender]:
                        blocks.append(numbers[at : at + prod(box.shape)].view(box.shape))
                        at += prod(box.shape)
        return found

    def _assigned(self, layouts: Sequence[Sequence[ShardLayout]]) -> list[_Route]:
        """Choose the owner of each matrix and the senders of its parts."""
        matrices = [
            (number, shape, boxes)
            for number, of_ranks in enumerate(layouts)
            for shape, boxes in _matrices(self._full[number], of_ranks)
        ]
        work, sent = [0] * self._group.size, [0] * self._group.size
        hosts = self._group.hosts if len(self._group.hosts) == self._group.size else (0,) * self._group.size
        routes = []
        for number, shape, boxes in sorted(matrices, key=lambda matrix: -_work(matrix[1])):
            sizes = [sum(prod(box.shape) for box in own) for own in boxes]
            owner = min((r for r, size in enumerate(sizes) if size == max(sizes)), key=lambda r: (work[r], r))
            work[owner] += _work(shape)
            alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
            for rank, own in enumerate(boxes):
                if own:
                    alike.setdefault(tuple(box.full for box in own), []).append(rank)
            sources = []
            for ranks in alike.values():
                source = owner if owner in ranks else min(ranks, key=lambda r: (hosts[r] != hosts[owner], sent[r], r))
                sent[source] += sizes[source] * (source != owner)
                sources.append(source)
            routes.append(_Route(number, shape, owner, boxes, tuple(sources)))
        return sorted(routes, key=lambda route: route.parameter)


_BYTES = torch.bfloat16.itemsize


def _kept(lists: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[Interval, ...], ...]:
    """Convert intervals from JSON."""
    return tuple(tuple((start, stop) for start, stop in intervals) for intervals in lists)


def _matrices(
    full: tuple[int, ...], of_ranks: Sequence[ShardLayout]
) -> list[tuple[tuple[int, ...], list[tuple[Box, ...]]]]:
    """Return the shape of each matrix in a parameter, and its blocks on each rank."""
    held = [tuple(layout.boxes()) for layout in of_ranks]
    if len(full) != 3:
        return [(full, held)]
    return [
        ((1, *full[1:]), [tuple(_of_expert(box, number) for box in own if _has(box, number)) for own in held])
        for number in range(full[0])
    ]


def _has(box: Box, expert: int) -> bool:
    return box.full[0] <= expert < box.full[0] + box.shape[0]


def _of_expert(box: Box, expert: int) -> Box:
    own = (box.own[0] + expert - box.full[0], *box.own[1:])
    return Box(own, (0, *box.full[1:]), (1, *box.shape[1:]))


def _work(shape: Sequence[int]) -> int:
    """Return a number proportional to the FLOPs of an orthogonalization."""
    rows, columns = matrix_shape(shape)
    small, large = sorted((rows, columns))
    return small * small * (2 * large + small)
