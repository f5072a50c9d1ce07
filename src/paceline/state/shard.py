"""Shards of a checkpoint: the pieces that each rank writes, and its file.

Every rank computes the same assignment without communication. If a tensor is not divided along a mesh axis, the ranks
along this axis hold the same piece of the tensor. These ranks distribute such tensors among themselves, so that each
piece is written once. `merge` checks that all pieces together form every tensor.

Tensors are copied into a staging buffer while training continues. One pass over the buffer both writes the file and
computes its SHA-256 digest. The file has the safetensors format: 8 bytes with the length of the header, a JSON header,
and the bytes of the tensors. The safetensors package would serialize the whole file in memory, and write it in one
call. Writing the staging buffer in pieces needs no second copy, and never holds the GIL for a long time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.device import current_stream, event, has_pinned_memory, has_streams, on_accelerator, stream
from paceline.errors import CheckpointError
from paceline.files import create_private, private_opener
from paceline.split.layout import Box, Part, ShardLayout
from paceline.split.mesh import Mesh
from paceline.state.manifest import Receipt, TensorEntry, TensorPiece

# number of bytes that are hashed and written at a time; they are still in the cache when they are written
PIECE_BYTES = 1 << 20
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Shard:
    """Writer of one file, with a staging buffer that all checkpoints reuse.

    `begin` gets two kinds of tensors. Tensors in `own` are copied before `begin` returns, or on a GPU before any work
    that is enqueued later. Tensors in `shared` are copied later: on a CPU by `gather`, in a thread that the caller
    chooses, and on a GPU by a side stream. Without copies, `write` reads the tensors themselves.
    """

    def __init__(self) -> None:
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._header = b""
        self._bytes = 0
        self._uncopied: list[Tensor] = []  # what the file holds, if the staging buffer is not used
        self._to_gather: list[tuple[Tensor, Tensor]] = []  # (destination, source), on CPU
        self._on_the_way: list[tuple[Tensor, Tensor]] = []  # (destination, source), on a GPU
        self._stream: torch.Stream | None = None
        self._copied: torch.Event | None = None

    @property
    def file_bytes(self) -> int:
        """Size of the file in bytes."""
        return len(self._header) + self._bytes

    def begin(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor], *, copies: bool = True) -> None:
        """Compute the layout of the file, copy `own`, and start copying `shared`.

        The tensors in `shared` must not change before `gather` has returned.

        Args:
            copies: False if no tensor changes before `write` has ended. Tensors on a CPU are then not copied.

        Raises:
            CheckpointError: safetensors cannot store a tensor, or a name is in both `shared` and `own`.
        """
        if twice := shared.keys() & own.keys():
            raise CheckpointError(
                "checkpoint.named_twice",
                "{names}: these names are given both to shared tensors and to a rank's own tensors. Each name "
                "must belong to one tensor.",
                names=sorted(twice),
            )
        tensors = {name: tensor.detach() for name, tensor in (*shared.items(), *own.items())}
        self._header, offsets, self._bytes = _header({name: describe(name, tensor) for name, tensor in tensors.items()})
        self._uncopied, self._to_gather, self._on_the_way, self._copied = [], [], [], None
        if not copies and not any(map(on_accelerator, tensors.values())):
            self._uncopied = [tensors[name] for name in offsets]
            return
        self._make_room(pinned=any(has_pinned_memory(t.device) for t in tensors.values()))
        places = {name: self._place(tensor, offsets[name]) for name, tensor in tensors.items()}
        for name in own:
            if on_accelerator(tensors[name]):
                places[name].copy_(tensors[name], non_blocking=True)
            else:
                _copy(places[name], tensors[name])
        self._to_gather = [(places[name], tensors[name]) for name in shared if not on_accelerator(tensors[name])]
        self._on_the_way = [(places[name], tensors[name]) for name in shared if on_accelerator(tensors[name])]
        self._copied = self._start_stream(next((t.device for t in tensors.values() if on_accelerator(t)), None))

    def gather(self) -> None:
        """Copy the shared CPU tensors, in the calling thread and on one core."""
        for place, tensor in self._to_gather:
            _copy(place, tensor)
        self._to_gather = []

    def hold_stream(self) -> None:
        """Make the current stream wait for the copies from the accelerator.

        The host does not wait. Without an accelerator, this method does nothing.
        """
        if self._copied is not None and self._stream is not None:
            current_stream(self._copied.device).wait_event(self._copied)

    def write(self, path: Path) -> Generator[None, None, str]:
        """Write the file and flush it to disk; return its SHA-256 digest in hexadecimal.

        This generator yields after every piece, so that the caller can pause.

        Raises:
            OSError: the file cannot be written (disk full, folder missing, file too large).
        """
        if self._copied is not None:
            self._copied.synchronize()
            self._on_the_way = []
        digest = hashlib.sha256(self._header)
        with open(path, "wb", opener=private_opener) as file:
            file.write(self._header)
            for piece in self._content():
                digest.update(piece)
                file.write(piece)
                # This call starts the write-back of written bytes, so that the disk is never idle and the final flush
                # is short. It also frees the pages of these bytes, so that a checkpoint does not evict training data
                # from the page cache.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                yield
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _content(self) -> Iterator[memoryview]:
        """Yield the bytes after the header, in pieces."""
        for held in self._uncopied or [self._staging[: self._bytes]]:
            content = as_bytes(held)
            for begin in range(0, len(content), PIECE_BYTES):
                yield content[begin : begin + PIECE_BYTES]

    def _make_room(self, *, pinned: bool) -> None:
        if self._staging.numel() < self._bytes or (pinned and not self._staging.is_pinned()):
            self._staging = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new buffer is allocated
            self._staging = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=pinned)

    def _place(self, tensor: Tensor, offset: int) -> Tensor:
        return self._staging[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _start_stream(self, device: torch.device | None) -> torch.Event | None:
        """Enqueue the copies from the accelerator on a side stream. Return an event for their end.

        The copies start after all work that is already enqueued on the current stream. `_on_the_way` keeps the tensors
        until the copies have ended, because otherwise the allocator could reuse their memory.
        """
        if device is None:
            return None
        if self._stream is None and has_streams(device):
            self._stream = stream(device)
        if self._stream is not None:
            self._stream.wait_stream(current_stream(device))
        with self._stream or nullcontext():
            for place, tensor in self._on_the_way:
                place.copy_(tensor, non_blocking=True)
            copied = event(device)
            copied.record()
        return copied


def write_one_by_one(path: Path, described: Mapping[str, dict[str, Any]], read: Callable[[str], Tensor]) -> None:
    """Write and flush a safetensors file, with at most one tensor in memory.

    Args:
        described: result of `describe` for each tensor, indexed by tensor name.
        read: function that returns the tensor with a given name, on the CPU.

    Raises:
        OSError: the file cannot be written.
    """
    header, offsets, _ = _header(described)
    with create_private(path) as file:
        file.write(header)
        for name in offsets:
            file.write(as_bytes(read(name).detach()))
        file.flush()
        os.fsync(file.fileno())


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor in row-major order, copied only if not contiguous."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def described_bytes(described: Mapping[str, Any]) -> int:
    """Return the size in bytes of a tensor from its description."""
    elements: int = math.prod(described["shape"])
    return elements * DTYPES[described["dtype"]].itemsize


def describe(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return `{"dtype": safetensors code, "shape": [...]}` for a tensor.

    Raises:
        CheckpointError: safetensors cannot store the tensor.
    """
    if tensor.layout != torch.strided or tensor.dtype not in CODES:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise CheckpointError(
            "checkpoint.tensor_unsupported",
            "{name} is {kind}, which a checkpoint (safetensors) cannot hold. Make it a dense tensor of one of "
            "these types: {codes}.",
            name=name,
            kind=kind,
            codes=list(CODES),
        )
    return {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape)}


def _header(described: Mapping[str, Mapping[str, Any]]) -> tuple[bytes, dict[str, int], int]:
    """Return a safetensors header, each tensor's offset after the header, and the end offset.

    Tensors with the widest types come first, so that each tensor is aligned.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(described, key=lambda n: (-DTYPES[described[n]["dtype"]].itemsize, n)):
        offsets[name] = end
        end += described_bytes(described[name])
        header[name] = {**described[name], "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, end


def _copy(place: Tensor, tensor: Tensor) -> None:
    # NumPy copies only in the calling thread and without the GIL. torch would also use the threads of the training
    # step. The tensors are viewed as integers, because NumPy lacks bfloat16 and the 8-bit floating-point types.
    integers = _INTEGERS[tensor.element_size()]
    np.copyto(place.view(integers).numpy(), tensor.view(integers).numpy())


_MOST_CELLS = 10**8


@dataclass(frozen=True)
class MeshCoordinate:
    """Mesh coordinate of a rank, which needs no process group.

    Attributes:
        rank: global rank.
        sizes: number of ranks along each mesh axis that has more than one rank.
        place: coordinate of the rank on each of the axes in `sizes`.
        data_rank: data-parallel rank, which determines the rank's share of the global batch. Ranks with the same
            data-parallel rank have the same buffers.
        data_ranks: number of data-parallel ranks, over which the global batch is divided.
    """

    rank: int
    sizes: dict[str, int]
    place: dict[str, int]
    data_rank: int
    data_ranks: int

    @classmethod
    def of(cls, mesh: Mesh) -> MeshCoordinate:
        """Return the coordinate of this rank in a mesh."""
        sizes = {axis: n for axis, n in mesh.sizes.items() if n > 1}
        return cls(mesh.world.rank, sizes, {axis: mesh.place[axis] for axis in sizes}, mesh.data_rank, mesh.data_ranks)

    @classmethod
    def plain(cls, rank: int, world: int) -> MeshCoordinate:
        """Return the coordinate of one of `world` ranks, each of which holds the whole model."""
        return cls(rank, {"dp": world} if world > 1 else {}, {"dp": rank} if world > 1 else {}, rank, world)

    @property
    def is_first_of_stage(self) -> bool:
        """True on the first rank of each pipeline stage."""
        return not any(place for axis, place in self.place.items() if axis != "pp")


@dataclass
class ShardContents:
    """Description of the pieces that one rank writes.

    Attributes:
        described: dtype and full shape of every shared tensor of which the rank holds a part.
        written: tensor name and block of every piece that the rank writes, indexed by the key in the file.
    """

    rank: int
    described: dict[str, dict[str, Any]]
    written: dict[str, tuple[str, Box]]

    @classmethod
    def of(
        cls, shared: Mapping[str, Tensor], parts: Mapping[str, Part], coordinate: MeshCoordinate
    ) -> tuple[ShardContents, dict[str, Tensor]]:
        """Return the contents of a shard and the tensors to write. See `to_write` for the arguments."""
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
                        "checkpoint.name_collision",
                        "{name} is the name of a tensor and also the name of a shard of another tensor. Rename the "
                        "parameter.",
                        name=key,
                    )
                written[key] = name, box
                pieces[key] = own if box.shape == own.shape else box.of(own.detach())
        return cls(coordinate.rank, described, written), pieces

    def entries(self) -> dict[str, TensorEntry]:
        """Return the tensor entries for the receipt.

        This runs in the background, because with many tensors it takes as long as the rest of `Checkpointer.save`.
        """
        entries = {name: TensorEntry(**described, pieces=[]) for name, described in self.described.items()}
        for key, (name, box) in self.written.items():
            piece = TensorPiece(shard=self.rank, key=key, offset=list(box.full), shape=list(box.shape))
            entries[name].pieces.append(piece)
        return entries


def to_write(
    shared: Mapping[str, Tensor], parts: Mapping[str, Part], coordinate: MeshCoordinate
) -> dict[str, list[Box]]:
    """Return the blocks that the rank at `coordinate` writes, indexed by tensor name.

    Args:
        shared: the rank's part of every tensor, indexed by tensor name.
        parts: the part of each tensor that the rank holds. A tensor without an entry is whole on every rank.
    """
    # names and sizes of tensors, grouped by the axes along which ranks hold the same piece
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
    """Assign each tensor to one of `holders` ranks, with nearly equal bytes per rank.

    The result depends only on names and sizes, so every rank computes the same result. Tensors are assigned from the
    largest to the smallest, each to the rank with the fewest bytes so far. With this order, no rank gets more than 4/3
    of the optimum (Graham, 1969).
    """
    load = [0] * holders
    writer: dict[str, int] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        writer[name] = load.index(min(load))
        load[writer[name]] += sizes[name]
    return writer


def merge(receipts: Sequence[Receipt]) -> dict[str, TensorEntry]:
    """Build the full tensors from the pieces of all ranks.

    Raises:
        CheckpointError: the shape or type of a tensor differs between ranks, or an element of a tensor was written by
            no rank or by several ranks.
    """
    merged: dict[str, TensorEntry] = {}
    for rank, receipt in enumerate(receipts):
        for name, entry in receipt.tensors.items():
            full = merged.setdefault(name, TensorEntry(dtype=entry.dtype, shape=entry.shape, pieces=[]))
            if (full.dtype, full.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    "checkpoint.ranks_differ",
                    "{name} is {dtype} {shape} on rank {rank} and {full_dtype} {full_shape} on an earlier rank. "
                    "All ranks must train the same model.",
                    name=name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    rank=rank,
                    full_dtype=full.dtype,
                    full_shape=full.shape,
                )
            full.pieces += [piece for piece in entry.pieces if not _written_whole(full, piece)]
    for name, entry in merged.items():
        if wrong := uncovered(entry.shape, entry.pieces):
            raise CheckpointError(
                "checkpoint.shards_incomplete",
                "the shards of {name} do not form a tensor of shape {shape}: {wrong}",
                name=name,
                shape=entry.shape,
                wrong=wrong,
            )
    return merged


def key_of(name: str, box: Box, full: Sequence[int]) -> str:
    """Return the name of a piece in its file.

    The name is the tensor's name. If the piece is not the whole tensor, the offset is appended.
    """
    return name if box.shape == tuple(full) else f"{name}@{','.join(map(str, box.full))}"


def _boxes(layout: ShardLayout) -> list[Box]:
    return [_all_of(layout.full)] if layout.is_whole else list(layout.boxes())


def _all_of(shape: tuple[int, ...]) -> Box:
    """Return the block that covers a whole tensor, which may be empty."""
    begin = (0,) * len(shape)
    return Box(begin, begin, shape)


def _written_whole(full: TensorEntry, piece: TensorPiece) -> bool:
    """Return True if this piece is a whole tensor that another rank has already written.

    For a divided parameter, the counters of the optimizer are equal on all ranks, but each rank writes a copy.
    """
    return piece.shape == full.shape and any(there.shape == full.shape for there in full.pieces)


def uncovered(shape: Sequence[int], pieces: Iterable[TensorPiece]) -> str | None:
    """Return the reason why pieces do not cover each element exactly once, or None.

    The boundaries of all pieces divide the tensor into cells. Each cell must lie in exactly one piece.
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
