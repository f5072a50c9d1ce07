"""One rank's file of a checkpoint: staged in memory, then written and hashed.

The copy into the staging buffer runs while training goes on; writing and SHA-256 share one pass over it. The
file is in the safetensors format: 8 bytes of header length, a JSON header, the tensors' bytes. It is written
here and not by the safetensors package because that one serialises the whole file in memory and writes it in
one call: streaming the staging buffer in pieces instead needs no second copy and never holds the GIL for
long.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.device import current_stream, event, has_pinned_memory, has_streams, on_accelerator, stream
from paceline.errors import CheckpointError
from paceline.files import create_private, private_opener

# hashed and written at a time: small enough that the write finds in the cache what the hash has read
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
    """The tensors of one file, in a staging buffer that every checkpoint reuses.

    CPU tensors given to `begin` as `shared` are copied by `gather`, on a thread of the caller's choice. Those
    on a GPU are copied by a side stream that starts at once. `own` tensors are copied before `begin` returns
    (on a GPU: before anything enqueued later).
    """

    def __init__(self) -> None:
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._header = b""
        self._bytes = 0
        self._to_gather: list[tuple[Tensor, Tensor]] = []  # (where to, from), on CPU
        self._on_the_way: list[tuple[Tensor, Tensor]] = []  # (where to, from), on a GPU
        self._stream: torch.Stream | None = None
        self._copied: torch.Event | None = None

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return len(self._header) + self._bytes

    def begin(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Lay the file out, copy `own` and start copying `shared`. `shared` may not change until `gather` is done.

        Raises:
            CheckpointError: a tensor that safetensors cannot hold, or one name twice.
        """
        if twice := shared.keys() & own.keys():
            raise CheckpointError(
                f"{', '.join(sorted(twice))}: named both as shared and as a rank's own; each name stands for one tensor"
            )
        tensors = {name: tensor.detach() for name, tensor in (*shared.items(), *own.items())}
        offsets = self._lay_out(tensors)
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
        """Copy what is on the CPU, on the calling thread and one core."""
        for place, tensor in self._to_gather:
            _copy(place, tensor)
        self._to_gather = []

    def hold_stream(self) -> None:
        """Make the current stream wait for the copies from the accelerator.

        The host does not wait. Nothing to do on CPU.
        """
        if self._copied is not None and self._stream is not None:
            current_stream(self._copied.device).wait_event(self._copied)

    def write(self, path: Path) -> Generator[None, None, str]:
        """Write the file and flush it to disk; returns its SHA-256 in hexadecimal.

        A generator that pauses after every piece.

        Raises:
            OSError: it cannot be written (disk full, folder gone, file too large).
        """
        if self._copied is not None:
            self._copied.synchronize()
            self._on_the_way = []
        digest = hashlib.sha256(self._header)
        content = self._staging[: self._bytes].numpy().data
        with open(path, "wb", opener=private_opener) as file:
            file.write(self._header)
            for begin in range(0, self._bytes, PIECE_BYTES):
                piece = content[begin : begin + PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
                # Starts the write-back of what is there, so that the disk works all along and the last flush is short,
                # and gives the memory back, so that a checkpoint does not push the training data out of the page cache.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                yield
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Make the header; returns each tensor's offset in bytes."""
        self._header, offsets, self._bytes = _header({name: describe(name, tensor) for name, tensor in tensors.items()})
        return offsets

    def _make_room(self, *, pinned: bool) -> None:
        if self._staging.numel() < self._bytes or (pinned and not self._staging.is_pinned()):
            self._staging = torch.empty(0, dtype=torch.uint8)  # give the old one back first
            self._staging = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=pinned)

    def _place(self, tensor: Tensor, offset: int) -> Tensor:
        return self._staging[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _start_stream(self, device: torch.device | None) -> torch.Event | None:
        """Enqueue the copies from the accelerator on a side stream; returns their end event.

        They start after all work enqueued on the current stream so far. The tensors are held in `_on_the_way`
        until then: memory given back earlier could be handed out again under the copy.
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
    """Write a safetensors file with at most one tensor in memory, and flush it.

    Args:
        described: the result of `describe` for each tensor.
        read: returns a tensor on the CPU by its name.

    Raises:
        OSError: it cannot be written.
    """
    header, offsets, _ = _header(described)
    with create_private(path) as file:
        file.write(header)
        for name in offsets:
            tensor = read(name).detach().contiguous()
            if tensor.numel():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def described_bytes(described: Mapping[str, Any]) -> int:
    """Size in bytes of a tensor from its `describe` entry."""
    elements: int = math.prod(described["shape"])
    return elements * DTYPES[described["dtype"]].itemsize


def describe(name: str, tensor: Tensor) -> dict[str, Any]:
    """`{"dtype": code of safetensors, "shape": [...]}` of a tensor.

    Raises:
        CheckpointError: safetensors has no way to hold it.
    """
    if tensor.layout != torch.strided or tensor.dtype not in CODES:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise CheckpointError(
            f"{name} is {kind}, which a checkpoint (safetensors) cannot hold. Keep it dense, in one of: "
            f"{', '.join(map(str, CODES))}."
        )
    return {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape)}


def _header(described: Mapping[str, Mapping[str, Any]]) -> tuple[bytes, dict[str, int], int]:
    """A safetensors header, each tensor's offset behind it, and the end offset.

    The widest types come first, so that each is aligned to its own.
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
    # NumPy copies on the calling thread alone and without the GIL; torch would wake the threads that the training step
    # computes with. Seen as integers, because NumPy lacks bfloat16 and the 8-bit floats.
    integers = _INTEGERS[tensor.element_size()]
    np.copyto(place.view(integers).numpy(), tensor.view(integers).numpy())
