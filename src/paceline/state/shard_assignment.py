"""Assignment of checkpoint pieces to the ranks that write them.

Every rank computes the same assignment without communication. Ranks that differ only along mesh axes that a
tensor is not divided along hold the same piece of it; they distribute such tensors among themselves. `merge`
checks that all pieces together make up every tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.split.layout import Box, Part, ShardLayout
from paceline.split.mesh import Mesh
from paceline.state.manifest import Receipt, TensorEntry, TensorPiece
from paceline.state.shard import describe

_MOST_CELLS = 10**8


@dataclass(frozen=True)
class MeshCoordinate:
    """Mesh coordinate of a rank, without any process group.

    Attributes:
        rank: global rank.
        sizes: ranks along each mesh axis that has more than one.
        place: the rank's coordinate on each of these.
        data_rank: data-parallel rank, the share of the global batch it reads; ranks with the same one have
            the same buffers.
        data_ranks: number of data-parallel ranks, into which the global batch is dealt.
    """

    rank: int
    sizes: dict[str, int]
    place: dict[str, int]
    data_rank: int
    data_ranks: int

    @classmethod
    def of(cls, mesh: Mesh) -> MeshCoordinate:
        """The coordinate of this rank in a mesh."""
        sizes = {axis: n for axis, n in mesh.sizes.items() if n > 1}
        return cls(mesh.world.rank, sizes, {axis: mesh.place[axis] for axis in sizes}, mesh.data_rank, mesh.data_ranks)

    @classmethod
    def plain(cls, rank: int, world: int) -> MeshCoordinate:
        """The coordinate of one of `world` ranks that all hold the whole model."""
        return cls(rank, {"dp": world} if world > 1 else {}, {"dp": rank} if world > 1 else {}, rank, world)

    @property
    def is_first_of_stage(self) -> bool:
        """True on the first rank of each pipeline stage."""
        return not any(place for axis, place in self.place.items() if axis != "pp")


@dataclass
class ShardContents:
    """One rank's checkpoint pieces.

    Attributes:
        described: dtype and full shape of every shared tensor that the rank holds.
        written: tensor name and block of every piece that it writes, by key in its file.
    """

    rank: int
    described: dict[str, dict[str, Any]]
    written: dict[str, tuple[str, Box]]

    @classmethod
    def of(
        cls, shared: Mapping[str, Tensor], parts: Mapping[str, Part], coordinate: MeshCoordinate
    ) -> tuple[ShardContents, dict[str, Tensor]]:
        """The contents of a shard and the tensors of its pieces; arguments as in `to_write`."""
        described = {name: describe(name, tensor) for name, tensor in shared.items()}
        for name, part in parts.items():
            described[name]["shape"] = list(part.layout.full)
        written: dict[str, tuple[str, Box]] = {}
        pieces: dict[str, Tensor] = {}
        for name, boxes in to_write(shared, parts, coordinate).items():
            own = shared[name]
            for box in boxes:
                key = key_of(name, box, described[name]["shape"])
                if key in pieces:
                    raise CheckpointError(
                        f"{key}: both the name of a tensor and that of a piece of another. Rename the parameter"
                    )
                written[key] = name, box
                pieces[key] = own if box.shape == own.shape else box.of(own.detach())
        return cls(coordinate.rank, described, written), pieces

    def entries(self) -> dict[str, TensorEntry]:
        """Entries for the receipt.

        Made in the background: for many tensors it takes as long as the remainder of `Checkpointer.save`.
        """
        entries = {name: TensorEntry(**described, pieces=[]) for name, described in self.described.items()}
        for key, (name, box) in self.written.items():
            piece = TensorPiece(shard=self.rank, key=key, offset=list(box.full), shape=list(box.shape))
            entries[name].pieces.append(piece)
        return entries


def to_write(
    shared: Mapping[str, Tensor], parts: Mapping[str, Part], coordinate: MeshCoordinate
) -> dict[str, list[Box]]:
    """Pieces that the rank at `coordinate` writes, by tensor name.

    Args:
        shared: the rank's own part of every tensor.
        parts: how it holds them; a tensor that is not named here is whole on every rank.
    """
    # by the axes along which the ranks hold the same: names and bytes
    alike: dict[tuple[str, ...], dict[str, int]] = {}
    for name, tensor in shared.items():
        part = parts.get(name)
        if part is None or part.writes:
            axes = tuple(
                axis for axis in coordinate.sizes if axis != "pp" and (part is None or axis not in part.sharded)
            )
            alike.setdefault(axes, {})[name] = tensor.nbytes
    boxes: dict[str, list[Box]] = {}
    for axes, sizes in alike.items():
        holder = 0
        for axis in axes:
            holder = holder * coordinate.sizes[axis] + coordinate.place[axis]
        for name, writer in assign_writers(sizes, prod(coordinate.sizes[axis] for axis in axes)).items():
            if writer == holder:
                part = parts.get(name)
                boxes[name] = [_all_of(shared[name].shape)] if part is None else _boxes(part.layout)
    return boxes


def assign_writers(sizes: Mapping[str, int], holders: int) -> dict[str, int]:
    """Writer of each tensor among `holders` ranks, with nearly equal bytes.

    It depends on names and sizes alone, so every rank computes the same. Largest first, each to the rank with
    the least so far (Graham, 1969): no rank gets more than 4/3 of the best division.
    """
    load = [0] * holders
    writer: dict[str, int] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        writer[name] = load.index(min(load))
        load[writer[name]] += sizes[name]
    return writer


def merge(receipts: Sequence[Receipt]) -> dict[str, TensorEntry]:
    """The full tensors made up of the pieces of all ranks.

    Raises:
        CheckpointError: ranks disagree on a tensor's shape or type, or some of its elements were written by
            no rank, or by two.
    """
    merged: dict[str, TensorEntry] = {}
    for rank, receipt in enumerate(receipts):
        for name, entry in receipt.tensors.items():
            full = merged.setdefault(name, TensorEntry(dtype=entry.dtype, shape=entry.shape, pieces=[]))
            if (full.dtype, full.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{name} is {entry.dtype} {entry.shape} on rank {rank} and {full.dtype} {full.shape} on a rank "
                    "before it. All ranks should train one model"
                )
            full.pieces += [piece for piece in entry.pieces if not _written_whole(full, piece)]
    for name, entry in merged.items():
        if wrong := uncovered(entry.shape, entry.pieces):
            raise CheckpointError(
                f"the ranks' pieces of {name} do not make up the tensor of shape {entry.shape}: {wrong}"
            )
    return merged


def key_of(name: str, box: Box, full: Sequence[int]) -> str:
    """Name of a piece in its file: the tensor's, with the offset unless whole."""
    return name if box.shape == tuple(full) else f"{name}@{','.join(map(str, box.full))}"


def _boxes(layout: ShardLayout) -> list[Box]:
    return [_all_of(layout.full)] if layout.is_whole else list(layout.boxes())


def _all_of(shape: tuple[int, ...]) -> Box:
    """The block that covers a tensor, also an empty one."""
    begin = (0,) * len(shape)
    return Box(begin, begin, shape)


def _written_whole(full: TensorEntry, piece: TensorPiece) -> bool:
    """True if another rank has written this tensor whole already.

    Optimizer counters of a divided parameter are equal on all its parts, and each of them writes its own.
    """
    return piece.shape == full.shape and any(there.shape == full.shape for there in full.pieces)


def uncovered(shape: Sequence[int], pieces: Iterable[TensorPiece]) -> str | None:
    """Reason why pieces do not hold each element of a tensor once, or None.

    The cuts of all pieces divide the tensor into cells; each cell should lie in one piece.
    """
    begins = [piece.offset for piece in pieces]
    ends = [[a + n for a, n in zip(piece.offset, piece.shape, strict=True)] for piece in pieces]
    cuts = [sorted({0, n, *(b[d] for b in begins), *(e[d] for e in ends)}) for d, n in enumerate(shape)]
    if prod(len(along) for along in cuts) > _MOST_CELLS:
        return "they cut it into more cells than any mesh would"
    place = [{cut: i for i, cut in enumerate(along)} for along in cuts]
    if any(along[0] < 0 or along[-1] > n for along, n in zip(cuts, shape, strict=True)):
        return "a piece lies outside of it"
    held = np.zeros([len(along) - 1 for along in cuts], dtype=np.int32)
    for begin, end in zip(begins, ends, strict=True):
        held[tuple(slice(at[a], at[b]) for at, a, b in zip(place, begin, end, strict=True))] += 1
    if (held == 0).any():
        return "some of its elements were written by no rank"
    return "some of its elements were written by two ranks" if (held > 1).any() else None
