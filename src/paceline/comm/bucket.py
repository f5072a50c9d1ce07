"""Gradients of many parameters in one flat buffer, and communication beside computation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.comm.group import Group, Pending
from paceline.device import current_stream, event, stream


class Memory(Protocol):
    """An allocator of flat tensors: a group or an all-reduce algorithm."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros."""


@dataclass
class Bucket:
    """A flat buffer of gradients, scalars (in the last bucket) and one usage count per parameter.

    Attributes:
        used: the tail of `flat`: 1 for a parameter that this replica used; after the sum, how many replicas did.
        seen: parameters whose gradients of this step are in the buffer, of any microbatch.
        whole: those of them that the last microbatch has added to.
    """

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]
    used: Tensor
    gradient_size: int
    seen: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    pending: Pending | Task | None = None

    @property
    def gradients(self) -> Tensor:
        """All gradients, flat."""
        return self.flat[: self.gradient_size]

    @classmethod
    def of(cls, parameters: list[nn.Parameter], memory: Memory, scalar_count: int = 0) -> Bucket:
        """A bucket for the gradients of `parameters` (of one dtype; float32 without any) and some scalars.

        Its buffer is allocated by `memory` (shared memory if the transport has it), which must also release it.
        """
        gradient_size = sum(p.numel() for p in parameters)
        dtype = parameters[0].dtype if parameters else torch.float32
        flat = memory.empty(gradient_size + scalar_count + len(parameters), dtype)
        views, start = [], 0
        for p in parameters:
            views.append(_like(flat[start : start + p.numel()], p))
            start += p.numel()
        return cls(flat, parameters, views, flat[gradient_size + scalar_count :], gradient_size)

    def take(self, i: int, parameter: Tensor) -> None:
        """Move the gradient of parameter `i` into the bucket.

        The first of a step overwrites, those of further microbatches add.
        """
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if i in self.seen:
            self.views[i].add_(gradient)
        else:
            self.views[i].copy_(gradient)
            self.seen.add(i)
        parameter.grad = None

    def take_all(self) -> None:
        """Move all gradients that there are here, at once."""
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.take(i, parameter)

    def fill(self) -> None:
        """Note who was reached by the backward pass, and zero the others."""
        unseen = [i for i in range(len(self.parameters)) if i not in self.seen]
        self.used.fill_(1.0)
        if unseen:
            self.used[unseen] = 0.0
            torch._foreach_zero_([self.views[i] for i in unseen])

    def sum_over(self, group: Group) -> None:
        """Replace the gradients of all parameters by their sums over the group, now."""
        self.take_all()
        self.fill()
        group.all_reduce(self.flat)
        self.hand_out()

    def send(self, group: Group) -> None:
        """Begin the sum over the group."""
        self.pending = group.start_all_reduce(self.flat)

    def hand_out(self) -> None:
        """Give every parameter its agreed gradient; one that no replica used gets none."""
        unseen = [i for i in range(len(self.parameters)) if i not in self.seen]
        used_elsewhere = (
            set() if not unseen else {i for i, n in zip(unseen, self.used[unseen].tolist(), strict=True) if n > 0}
        )
        for i, parameter in enumerate(self.parameters):
            parameter.grad = self.views[i] if i in self.seen or i in used_elsewhere else None
        self.seen.clear()
        self.whole.clear()
        self.pending = None


def _like(piece: Tensor, parameter: Tensor) -> Tensor:
    """A view of `piece` with the shape and strides of `parameter`, e.g. channels-last."""
    # the same order, without gaps
    return piece.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


class CommThread:
    """Runs collectives in one thread, in the order of `start`, the same on every rank.

    Where the main thread uses the same group meanwhile, the thread needs a copy of it (`Group.copy`).
    """

    def __init__(self, name: str = "paceline-sync") -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], Task] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> Task:
        """Run `work` after all that was handed over before."""
        task = Task()
        self._queue.put((work, task))
        return task

    def close(self) -> None:
        """End the thread after all its work."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, task = entry
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again where the result is waited for
                task.error = error
            task.done.set()
            del entry, work, task  # an idle thread keeps no tensor alive


class CommStream:
    """Queues collectives on a stream of its own, behind what the current one was given.

    The calling thread queues them, so all ranks do in the same order. From a thread, two groups' collectives could
    cross on the device, and wait for each other forever.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream(device)

    def start(self, work: Callable[[], None]) -> StreamTask:
        """Queue what `work` does."""
        self._stream.wait_stream(current_stream(self._stream.device))
        with self._stream:
            work()
            done = event(self._stream.device)
            done.record()
        return StreamTask(done)

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class StreamTask:
    """Work that was given to a `CommStream`."""

    done: torch.Event

    def wait(self) -> None:
        """Order the current stream behind it; the host goes on."""
        current_stream(self.done.device).wait_event(self.done)


@dataclass
class Task:
    """Work that was given to a `CommThread`."""

    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self) -> None:
        """Return when it is done. The collectives in it have deadlines of their own.

        Raises:
            SyncError, or whatever else the work raised.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error
