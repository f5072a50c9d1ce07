"""Transfer of batches from loader processes to their rank.

torch sends each tensor in new shared memory. For a small batch, a copy through a pipe costs less. For a large batch,
the page faults of new memory cost more than its copy, so memory is reused.
"""

from __future__ import annotations

import io
import math
import mmap
import multiprocessing
import os
import pickle
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from paceline.data.loader_processes import Workers

_SMALL_BYTES = 1 << 19  # most bytes of tensors that are sent through a pipe, after whole numbers are narrowed
_LARGE_BYTES = 1 << 27  # largest batch that is sent in reused memory
_HELD = 3  # batches that the rank may hold while loader processes write further ones
_MOST_SLOTS = 64  # of a loader process; torch sends batches that find no slot
_ALIGNED = 64
_MAP_NORESERVE = 0x4000  # a constant of Linux, which Python's mmap lacks before 3.13


class Sending:
    """Function that packs batches in a loader process, and its counterpart in the rank.

    Pass an instance to DataLoader as `collate_fn`; the batches must be collated already. Loader processes are forks,
    which inherit the shared memory. Only memory that has been used takes up space.
    """

    def __init__(self, workers: Workers) -> None:
        context = workers.context or multiprocessing
        method = context if isinstance(context, str) else context.get_start_method()
        slots = min(workers.ahead // max(1, workers.count) + _HELD, _MOST_SLOTS)
        self._memory: list[_Memory] = []
        if method == "fork":
            with suppress(OSError):  # a limit of virtual memory or of descriptors
                self._memory = [_Memory(slots) for _ in range(workers.count)]

    @property
    def has_lost_memory(self) -> bool:
        """True if slots cannot be used again, because the rank forked with their batches."""
        return any(memory.lost for memory in self._memory)

    def __call__(self, batch: Any) -> Any:
        """In a loader process, pack a batch; return it unchanged if torch must send it."""
        info = get_worker_info()
        if info is None:
            return batch
        with suppress(Exception):
            return SmallBatch(_packed(batch, _ByValue))
        if not self._memory:
            return batch
        memory = self._memory[info.id]
        slot = memory.free_slot()
        if slot is None:
            return batch
        try:
            message = LargeBatch(info.id, slot, _packed(batch, lambda file: _ToMemory(file, memory.slots[slot])))
        except Exception:  # noqa: BLE001 - torch sends the batch then, or raises the error
            return batch
        memory.taken(slot)
        return message

    def received(self, message: Any) -> Any:
        """Return the batch of a message in the rank."""
        if isinstance(message, SmallBatch):
            return pickle.loads(message.pickled)
        if isinstance(message, LargeBatch):
            return _FromMemory(message.pickled, self._memory[message.process].lent(message.slot)).load()
        return message


@dataclass(frozen=True)
class SmallBatch:
    """A batch that is sent by value; each tensor gets its own memory."""

    pickled: bytes


@dataclass(frozen=True)
class LargeBatch:
    """A batch whose tensors are in a slot of shared memory."""

    process: int
    slot: int
    pickled: bytes


class _Memory:
    """Memory that a loader process and its rank share, in slots of one batch each.

    The rank returns a slot through a pipe when no tensor of its batch exists any more. If the rank forks meanwhile, the
    child may still read the batch, so the slot is not used again.

    Attributes:
        lost: number of slots that are not used again.
    """

    def __init__(self, slots: int) -> None:
        self.lost = 0
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.slots = [mmap.mmap(-1, _LARGE_BYTES, flags) for _ in range(slots)]
        self._free = list(range(slots))
        self._returned, self._return = os.pipe()
        os.set_blocking(self._returned, False)
        # batches may outlive the loader, and the pipe closes when the last batch is gone
        weakref.finalize(self, _close, self._returned, self._return).atexit = False

    def free_slot(self) -> int | None:
        """Return a slot without a batch, in the loader process."""
        with suppress(BlockingIOError):
            self._free += os.read(self._returned, len(self.slots))
        return self._free[-1] if self._free else None

    def taken(self, slot: int) -> None:
        """Mark a slot as used, in the loader process."""
        self._free.remove(slot)

    def lent(self, slot: int) -> memoryview:
        """Return a view of a slot in the rank; tensors on it keep it alive."""
        view = memoryview(self.slots[slot])
        weakref.finalize(view, self._give_back, slot, _forks, os.getpid()).atexit = False
        return view

    def _give_back(self, slot: int, forks: int, pid: int) -> None:
        if os.getpid() != pid:
            return
        if forks != _forks:
            self.lost += 1
            return
        with suppress(OSError):  # the loader process has ended
            os.write(self._return, bytes([slot]))


_forks = 0  # number of forks of this process


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _packed(batch: Any, pickler: Any) -> bytes:
    written = io.BytesIO()
    pickler(written).dump(batch)
    return written.getvalue()


class _ByValue(ForkingPickler):
    """Pickler of small batches; raises PicklingError for all other batches."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._left = _SMALL_BYTES
        self._sent: set[int] = set()  # addresses of tensors already pickled

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.nbytes > _SMALL_BYTES:
            raise pickle.PicklingError("a large array")
        if not isinstance(value, Tensor):
            return NotImplemented
        if not _is_plain(value) or value.data_ptr() in self._sent:
            raise pickle.PicklingError("a tensor of another kind, or a second view of the same memory")
        if value.nbytes:
            self._sent.add(value.data_ptr())
        return self.reduced(value)

    def reduced(self, value: Tensor) -> Any:
        """Return how a plain tensor is pickled."""
        sent = _narrowed(value) if value.nbytes <= 4 * self._left else value
        if sent.nbytes > self._left:
            raise pickle.PicklingError("a large tensor")
        self._left -= sent.nbytes
        content = bytearray(sent.reshape(-1).view(torch.uint8).numpy())
        return _tensor, (content, sent.dtype, value.dtype, value.shape)


class _ToMemory(_ByValue):
    """Pickler that writes the tensors of a batch to a slot."""

    def __init__(self, file: Any, slot: mmap.mmap) -> None:
        super().__init__(file)
        self._slot, self._end = slot, 0

    def reduced(self, value: Tensor) -> Any:
        """Copy a plain tensor to the slot."""
        first, self._end = self._end, self._end + -(-value.nbytes // _ALIGNED) * _ALIGNED
        if self._end > len(self._slot):
            raise pickle.PicklingError("the batch is larger than a slot")
        if value.nbytes:
            there = torch.frombuffer(self._slot, dtype=value.dtype, count=value.numel(), offset=first)
            there.copy_(value.reshape(-1))
        return _Place, (first, value.dtype, tuple(value.shape))


class _Place:
    """Stand-in for the class of a tensor in a slot, which `_FromMemory` replaces."""


class _FromMemory(pickle.Unpickler):
    """Unpickler of a batch whose tensors are in a slot."""

    def __init__(self, pickled: bytes, view: memoryview) -> None:
        super().__init__(io.BytesIO(pickled))
        # Not a method: in a reference cycle, the tensors of this object would live until the next garbage collection.
        self._opened = partial(_in_memory, view)

    def find_class(self, module: str, name: str) -> Any:
        """Return the function that opens a tensor in place of `_Place`."""
        return self._opened if (module, name) == (__name__, _Place.__name__) else super().find_class(module, name)


def _in_memory(view: memoryview, first: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor at a place of a slot; the tensor keeps the view alive."""
    numel = math.prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=numel, offset=first).view(shape)


def _is_plain(value: Tensor) -> bool:
    """Return True for a contiguous CPU tensor that uses its whole storage."""
    if type(value) is not Tensor or value.layout is not torch.strided or not value.is_cpu or value.requires_grad:
        return False
    if value.is_conj() or value.is_neg():
        return False
    return value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


def _narrowed(value: Tensor) -> Tensor:
    """Convert whole numbers, such as tokens, to the smallest type that holds them.

    The types are int16, int32 and int64.
    """
    if value.dtype != torch.int64 or not value.numel():
        return value
    least, most = (int(bound) for bound in value.aminmax())
    for dtype in (torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        if limits.min <= least and most <= limits.max:
            return value.to(dtype)
    return value


def _tensor(content: bytearray, sent: torch.dtype, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=sent).to(dtype, copy=True).view(shape)
