"""Activation offload (`offload_activations`): blocks keep saved tensors in host memory between the two passes.

`torch.autograd.graph.save_on_cpu` does the same, but its copies are in the stream that computes. Here, the copies have
streams of their own, and a block's tensors come back while the backward pass computes the block after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from paceline.device import current_stream, event, has_pinned_memory, has_streams, is_accelerator, stream
from paceline.errors import PlanError
from paceline.split.remat import Forward, Undo, replace_forwards

# smaller tensors stay on the device: the latency of their copies would exceed the time of the transfer
LEAST_BYTES = 2**20
_KEPT_TYPES = (Tensor, nn.Parameter, FakeTensor)


def offload_activations(blocks: Sequence[nn.Module], device: torch.device) -> Undo:
    """Keep saved tensors of blocks in host memory; return a function that undoes this.

    The tensors come back in the backward pass. Call this after `rematerialise`. Blocks that are recomputed then keep
    only their inputs in host memory. The results do not change. During a pass, the tensors of two blocks are on the
    device.

    On the device stay tensors of less than `LEAST_BYTES`, parameters and buffers, and arguments that need no gradient,
    such as masks, because all blocks share them. On a CPU, nothing is moved. A dry run moves tensors without values.

    Raises:
        PlanError: the device has no streams, or its host memory cannot be pinned.
    """
    if is_accelerator(device) and not (has_streams(device) and has_pinned_memory(device)):
        raise PlanError(
            "plan.no_pinned_memory",
            "offload_activations=on copies beside the computation, but a device of type {type} has no streams or no "
            "pinned host memory. Use offload_activations=off.",
            type=device.type,
        )
    offload = _Offload(device)
    undo = replace_forwards(blocks, offload.offloaded)

    def undo_both() -> None:
        undo()
        offload.close()

    return undo_both


class _Saved:
    """Memory of a tensor that the backward pass of a block needs.

    Several saved tensors may be views of the same memory.

    Attributes:
        block: the call of the block.
        here: the memory as a flat tensor on the device; None while it is only in host memory.
        version: version counter of `here` when the tensor was saved.
        away: the copy in host memory, complete at the event `copied`.
        changed: True if the memory was changed in place before it left the device.
    """

    def __init__(self, block: _Call, here: Tensor, away: Tensor, copied: torch.Event | None) -> None:
        self.block, self.version, self.copied = block, here._version, copied
        self.here: Tensor | None = here
        self.away: Tensor | None = away
        self.changed = False


class _Call:
    """One call of a block in a forward pass.

    Attributes:
        number: index of the block.
        before: the call of the previous block; dead once its backward pass is over.
        saved: what the call saved and autograd still needs, by storage, type and version.
        returned: True once the backward pass asked for a tensor.
    """

    def __init__(self, number: int, before: _Call | None) -> None:
        self.number = number
        consecutive = before is not None and before.number + 1 == number
        self.before: Callable[[], _Call | None] = ref(before) if consecutive else lambda: None
        self.saved: WeakValueDictionary[tuple[int, torch.dtype, int], _Saved] = WeakValueDictionary()
        self.returned = False


class _Offload:
    """The tensors of one rank on their way to host memory or back.

    In the forward pass, the tensors of the last two calls are on the device. If the backward pass asks for a tensor of
    a call, all tensors of the call come back, and those of the call before it begin to come back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._numbers = device, count()
        self._copies = _Copies(device) if is_accelerator(device) else _ShapesOnly()
        self._leaving: deque[tuple[_Call, list[_Saved]]] = deque()
        # memory that the copies write; it must not be reused before they end
        self._coming: tuple[torch.Event | None, list[Tensor]] | None = None

    def offloaded(self, block: nn.Module, forward: Forward) -> Forward:
        number = next(self._numbers)

        @wraps(forward)
        def offloaded(*args: Any, **keywords: Any) -> Any:
            moves = is_accelerator(self._device) or detect_fake_mode() is not None
            if not (moves and torch.is_grad_enabled()):
                return forward(*args, **keywords)
            staying = [*block.parameters(), *block.buffers(), *_without_gradient((args, keywords))]
            with saved_tensors_hooks(partial(self._pack, self._begin(number), _storages(staying)), self._unpack):
                return forward(*args, **keywords)

        return offloaded

    def close(self) -> None:
        for _, saved in self._leaving:
            self._land(saved)
        self._leaving.clear()
        self._arrive()

    def _begin(self, number: int) -> _Call:
        """Begin a call; the tensors of the call before the previous one leave the device."""
        while len(self._leaving) > 1:
            _, saved = self._leaving.popleft()
            self._land(saved)
            for one in saved:
                assert one.here is not None
                one.changed = one.here._version != one.version
                one.here = None
        call = _Call(number, self._leaving[-1][0] if self._leaving else None)
        self._leaving.append((call, []))
        return call

    def _land(self, saved: list[_Saved]) -> None:
        """Let the device wait until the copies of a call are complete."""
        for one in saved:
            self._copies.wait(one.copied)

    def _pack(self, call: _Call, staying: set[int], tensor: Tensor) -> tuple[Any, ...]:
        storage = _storage(tensor) if tensor.device.type == self._device.type else None
        if storage is None or storage.nbytes() < LEAST_BYTES or storage._cdata in staying or _of_weights(tensor):
            return tensor.detach(), tensor._version
        key = (storage._cdata, tensor.dtype, tensor._version)
        one = call.saved.get(key)
        if one is None:
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            one = call.saved[key] = _Saved(call, whole, *self._copies.away(whole))
            if self._leaving and self._leaving[-1][0] is call:
                self._leaving[-1][1].append(one)
        return one, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: tuple[Any, ...]) -> Tensor:
        one, *details = packed
        if isinstance(one, Tensor):
            _refuse_changed(one._version != details[0])
            return one
        assert isinstance(one, _Saved)
        self._return(one.block)
        assert one.here is not None
        _refuse_changed(one.changed or one.here._version != one.version)
        return one.here.as_strided(*details)

    def _return(self, call: _Call) -> None:
        """Bring the tensors of a call back, and begin with the previous call."""
        if call.returned:
            return
        call.returned = True
        for entry in list(self._leaving):
            if entry[0] is call:
                # still on the device; autograd frees the memory, which is safe only after the copies
                self._land(entry[1])
                self._leaving.remove(entry)
        self._fetch(call)
        self._arrive()
        before = call.before()
        if before is not None:
            self._fetch(before)

    def _fetch(self, call: _Call) -> None:
        missing = [one for one in call.saved.values() if one.here is None]
        if not missing:
            return
        self._arrive()
        made, arrived = self._copies.back([one.away for one in missing if one.away is not None], self._device)
        self._coming = arrived, made
        for one, tensor in zip(missing, made, strict=True):
            one.here, one.version, one.away = tensor, tensor._version, None

    def _arrive(self) -> None:
        if self._coming is not None:
            self._copies.wait(self._coming[0])
            self._coming = None


class _Copies:
    """Copies between an accelerator and pinned memory, in one stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = stream(device), stream(device)

    def away(self, tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
        """Begin to copy a tensor to host memory; return the copy and its event."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._out.wait_stream(current_stream(self._device))
        with self._out:
            host.copy_(tensor, non_blocking=True)
        return host, self._recorded(self._out)

    def back(self, hosts: list[Tensor], device: torch.device) -> tuple[list[Tensor], torch.Event | None]:
        """Begin to copy tensors to the device; return the copies and their event."""
        # memory of the current stream, which may still use what it freed before
        made = [torch.empty_like(host, device=device, pin_memory=False) for host in hosts]
        self._in.wait_stream(current_stream(self._device))
        with self._in:
            for tensor, host in zip(made, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
        return made, self._recorded(self._in)

    def wait(self, copied: torch.Event | None) -> None:
        """Let the current stream wait for an event."""
        if copied is not None:
            current_stream(self._device).wait_event(copied)

    def _recorded(self, queue: torch.Stream) -> torch.Event:
        made = event(self._device)
        made.record(queue)
        return made


class _ShapesOnly:
    """Stand-in for `_Copies` in a dry run, whose tensors have no values.

    Tensors in host memory are meta tensors, which do not count as memory of the device.
    """

    def away(self, tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
        return torch.empty_like(tensor, device="meta"), None

    def back(self, hosts: list[Tensor], device: torch.device) -> tuple[list[Tensor], torch.Event | None]:
        return [torch.empty_like(host, device=device) for host in hosts], None

    def wait(self, copied: torch.Event | None) -> None:
        pass


def _refuse_changed(changed: bool) -> None:
    """Refuse a tensor that was changed in place. Autograd cannot, because it does not know the tensor."""
    if changed:
        raise PlanError(
            "plan.saved_tensor_changed",
            "offload_activations: the model changes a tensor in place that the backward pass needs, so its gradients "
            "would be wrong. Change a copy of the tensor (torch.autograd.set_detect_anomaly(True) shows where).",
        )


def _without_gradient(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and not leaf.requires_grad]


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {storage._cdata for tensor in tensors if (storage := _storage(tensor)) is not None}


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of an ordinary tensor; None for any other tensor."""
    plain = type(tensor) in _KEPT_TYPES and tensor.layout == torch.strided
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
        return None
    with suppress(NotImplementedError):
        return tensor.untyped_storage()
    return None


# operations of autocast and of linear layers on a weight
_OF_WEIGHTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")


def _of_weights(tensor: Tensor) -> bool:
    """Return True for the copy of a weight that autocast makes and shares."""
    node = tensor.grad_fn
    while node is not None and node.name() in _OF_WEIGHTS:
        node = node.next_functions[0][0]
        if node is not None and isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
    return False
