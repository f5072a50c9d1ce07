"""What a step would hold and send, seen on tensors without memory: every operation passes here, and every tensor that comes and goes."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Bytes that a rank sends in a collective of n ranks, for the bytes of the tensors it puts in: the least that any algorithm can
# (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
_SENT: Mapping[str, Callable[[int, int], float]] = {
    "allreduce_": lambda size, n: 2 * size * (n - 1) / n,
    "allreduce_coalesced_": lambda size, n: 2 * size * (n - 1) / n,
    "allgather_": lambda size, n: size * (n - 1),
    "_allgather_base_": lambda size, n: size * (n - 1),
    "reduce_scatter_": lambda size, n: size * (n - 1) / n,
    "_reduce_scatter_base_": lambda size, n: size * (n - 1) / n,
    "alltoall_": lambda size, n: size * (n - 1) / n,
    "alltoall_base_": lambda size, n: size * (n - 1) / n,
    "broadcast_": lambda size, n: size,
    "send": lambda size, n: size,
}
_INPUT = {name: 1 if "allgather" in name or "reduce_scatter" in name or "alltoall" in name else 0 for name in _SENT}  # else it is in place


class Watch(TorchDispatchMode):
    """To be entered inside a `FakeTensorMode`. A tensor that is asked for its value answers "no", or 1, as it has none.

    Attributes:
        live_bytes, peak_bytes: of all tensors that were made under it and are still there; the most there were at once.
        sent_bytes: by the name of the process group.
        asked: the kinds of modules whose code looked at values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.sent_bytes: Counter[str] = Counter()
        self.asked: set[str] = set()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def begin(self) -> None:
        """Begin anew to look for the peak, and to count what is sent."""
        self.peak_bytes = self.live_bytes
        self.sent_bytes.clear()

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Within, the watch notices storages that are resized in place, which no operation tells of: FSDP2 frees what it gathered so."""
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

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            made = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return self._answer(args[0].dtype)
        if func.namespace == "c10d":
            self._count(func.__name__.partition(".")[0], args)
        for leaf in (made,) if isinstance(made, Tensor) else tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._note(leaf.untyped_storage())
        return made

    def _answer(self, dtype: torch.dtype) -> bool | int | float:
        frame: Any = sys._getframe(2)
        while frame is not None and not isinstance(asking := frame.f_locals.get("self"), nn.Module):
            frame = frame.f_back
        if frame is not None:
            self.asked.add(type(asking).__name__)
        return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _SENT:
            groups = (a for a in args if isinstance(a, torch.ScriptObject) and a._type().name() == "ProcessGroup")  # type: ignore[attr-defined]
            group = dist.ProcessGroup.unbox(next(groups))
            size = sum(t.nbytes for t in tree_leaves(args[_INPUT[name]]))
            self.sent_bytes[group.group_name] += round(_SENT[name](size, group.size()))

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
