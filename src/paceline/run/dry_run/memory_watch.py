"""Memory and traffic of a step, counted on tensors without memory.

Every operation passes here, and every tensor that is made and freed.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from paceline.planning.model.record import OperationMode
from paceline.planning.model.recorder import tensors_in

# What a rank sends in an operation among n ranks, for each byte that it puts in: the least that any algorithm can
# (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
_SENT: tuple[tuple[str, Callable[[int], float]], ...] = (
    ("allreduce", lambda n: 2 * (n - 1) / n),
    ("allgather", lambda n: n - 1),
    ("reducescatter", lambda n: (n - 1) / n),
    ("alltoall", lambda n: (n - 1) / n),
    ("broadcast", lambda n: 1),
    ("send", lambda n: 1),
)
_PUTS_IN_SECOND = ("allgather", "reducescatter", "alltoall")  # of the operations of c10d: the result comes first


class MemoryWatch(OperationMode):
    """Dispatch mode, inside a `FakeTensorMode`, that counts live and sent bytes.

    A tensor whose value is read answers "no", or 1, as it has none.

    Attributes:
        live_bytes, peak_bytes: of all tensors that were made under it and are still there; the most there
            were at once.
        sent_bytes: by the name of the process group.
        asked: the kinds of modules whose code read values.
    """

    def __init__(self) -> None:
        super().__init__(self._operation, self._answer)
        self.live_bytes = self.peak_bytes = 0
        self.sent_bytes: Counter[str] = Counter()
        self.asked: set[str] = set()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def begin(self) -> None:
        """Reset the peak and the bytes sent."""
        self.peak_bytes = self.live_bytes
        self.sent_bytes.clear()

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Context in which storages resized in place are counted.

        No operation reports them: FSDP2 frees gathered parameters so.
        """
        resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._storages:
                self._note(storage)

        torch.UntypedStorage.resize_ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        elif func.namespace == "paceline":
            self._count_ring(func, args)
        for leaf in tensors_in(made):
            if leaf.device.type != "meta":
                self._note((leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage())

    def _answer(self, dtype: torch.dtype) -> bool | int | float:
        if (asking := _asking(sys._getframe(2))) is not None:
            self.asked.add(type(asking).__name__)
        return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count a collective of torch, eager or as compilers trace it.

        Each names its group among its arguments, in a place of its own.
        """
        name = func.__name__.partition(".")[0].replace("_", "")
        for kind, factor in _SENT:
            if name.startswith(kind):
                second = func.namespace == "c10d" and kind in _PUTS_IN_SECOND
                group = next(found for a in reversed(args) if (found := _group(a)) is not None)
                size = sum(t.nbytes for t in tree_leaves(args[int(second)]))
                self.sent_bytes[group.group_name] += round(factor(group.size()) * size)

    def _count_ring(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count a pass of `split.ring`: keys, values and their gradients on every link.

        Keys and values go to every other rank; their gradients travel until they are back on their own rank.
        """
        backward = "backward" in func.__name__
        pair = args[2:4] if backward else args[1:3]
        group = next(found for a in args if (found := _group(a)) is not None)
        size = (group.size() - 1) * sum(t.nbytes for t in pair)
        if backward:
            size += group.size() * sum(t.numel() * max(4, t.element_size()) for t in pair)
        self.sent_bytes[group.group_name] += size

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            reference, before = self._storages[key]
        else:
            reference, before = weakref.ref(storage, lambda _: self._gone(key)), 0
        self._storages[key] = reference, size
        self.live_bytes += size - before
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)[1]


def _asking(frame: FrameType | None) -> nn.Module | None:
    """The module whose code runs in the innermost frame outside of torch, if any."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        if owner is not None and not frame.f_globals["__name__"].startswith("torch."):
            return None
        frame = frame.f_back
    return None


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, str):
        return dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[attr-defined, arg-type]
    if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
        return dist.ProcessGroup.unbox(argument)
    return None
