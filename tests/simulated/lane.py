"""A lane: a stream of one process group, and the thread that carries out what runs on it, in order."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simulated.device import _C
from simulated.environment import DELAY_MS, SEED
from simulated.faults import Faults

# What nobody waits for begins by itself after so long: other ranks may need it.
_DELAYS_MS = {"late": (5.0, 10.0), "random": (0.0, 3.0), "eager": (0.0, 1.0)}


class Progress:
    """Whether an operation has ended well; it outlives the operation in the flight recorder."""

    finished = False


class Operation:
    """One collective or message between its call and its end.

    Attributes:
        done: recorded behind it on its stream.
        error: why it failed; empty while it did not.
        kept: the device's tensors that it reads and writes.
    """

    def __init__(self, name: str, gate: Any, run: Callable[[int], None], done: torch.Event, kept: list[Tensor]) -> None:
        self.name, self.gate, self.run, self.done, self.kept = name, gate, run, done, kept
        self.due = 0.0
        self.error = ""
        self.progress = Progress()

    def release(self) -> None:
        """Let go of the device's tensors: whoever frees them now is behind it."""
        self.kept = []


class Lane:
    """A stream and its thread, which starts with the first operation.

    Attributes:
        broken: why nothing can be started any more; empty while it can.
    """

    def __init__(self, device: torch.device, name: str, faults: Faults) -> None:
        self.device, self.stream, self.broken = device, torch.Stream(device), ""
        self._name, self._faults = name, faults
        self._operations: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._lock, self._aborted = threading.Lock(), False
        self._pending: deque[Operation] = deque()  # whose gates are closed
        self._thread: threading.Thread | None = None
        self._position = 0
        rank = int(os.environ.get("RANK", 0))
        self._dice = random.Random(f"{os.environ.get(SEED, 0)} {rank} {name}")

    def staged(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Memory of the host for each tensor, by its `id`; inputs are on their way into it.

        An input that shares memory with an output is read now, in the current stream: from the call on, nobody may use
        it. The others are read when the collective runs: whoever overwrites them meanwhile changes what it sends.
        """
        current = torch.accelerator.current_stream(self.device)
        written = {_memory(tensor) for tensor in outputs}
        host = {id(t): torch.empty(t.shape, dtype=t.dtype) for t in [*outputs, *inputs]}
        late = [tensor for tensor in inputs if _memory(tensor) not in written]
        for tensor in inputs:
            if _memory(tensor) in written:
                _C.read(self.device.index, current.stream_id, tensor, host[id(tensor)])
        for tensor in outputs:
            _C.poison(tensor)
        self.stream.wait_stream(current)
        for tensor in late:
            _C.read(self.device.index, self.stream.stream_id, tensor, host[id(tensor)])
        return host

    def launch(
        self,
        name: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        host: dict[int, Tensor],
        run: Callable[[int], None],
    ) -> Operation:
        """Enqueue what is to happen between the inputs' reading and the outputs' writing.

        Args:
            run: called by the thread, with the operation's position on this lane.
        """
        gate = _C.gate(self.device.index, self.stream.stream_id)
        for tensor in outputs:
            _C.write(gate, host[id(tensor)], tensor)
        done = torch.Event(self.device)
        done.record(self.stream)
        operation = Operation(name, gate, run, done, [*outputs, *inputs])
        operation.due = time.monotonic() + self._dice.uniform(*_delays_ms()) / 1000
        with self._lock:
            self._pending.append(operation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._operations.put(operation)
        if self._aborted:  # meanwhile, by another thread
            self.abort()
        return operation

    def finish(self, deadline_s: float) -> None:
        """Wait until all that was started is done; at once where something has failed."""
        self._operations.put(None)
        until = time.monotonic() + deadline_s
        while self._thread is not None and self._thread.is_alive() and not self.broken and time.monotonic() < until:
            self._thread.join(0.05)

    def abort(self) -> None:
        """End what has been started, from any thread: outputs are garbage, and the device goes on."""
        with self._lock:
            self._aborted, self.broken = True, self.broken or "this process group was aborted"
            pending = [(operation.gate, operation.kept) for operation in self._pending]
        for gate, kept in pending:
            _C.abort_gate(gate, kept)

    def end(self) -> None:
        """End the thread; what it waits for has to be done or aborted before."""
        self.broken = self.broken or "this process group was destroyed"
        self._operations.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10)

    def _work(self) -> None:
        while (operation := self._operations.get()) is not None:
            try:
                self._carry_out(operation)
            except Exception as error:  # noqa: BLE001 - raised where the host waits
                if not self._aborted:
                    self.broken = operation.error = self.broken or f"{operation.name} failed: {error}"
                    _C.open_gate(operation.gate, operation.error)
            with self._lock:
                self._pending.popleft()
            operation.release()
            operation.progress.finished = not operation.error

    def _carry_out(self, operation: Operation) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        _C.wait_until_due(operation.gate, max(0.0, operation.due - time.monotonic()))
        if self._aborted:
            return
        self._position += 1
        self._faults.before(operation.name)
        begin = time.monotonic()
        operation.run(self._position)
        self._faults.slow(time.monotonic() - begin)
        _C.open_gate(operation.gate, "")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _delays_ms() -> tuple[float, float]:
    if given := os.environ.get(DELAY_MS):
        least, _, most = given.partition(":")
        return float(least), float(most or least)
    return _DELAYS_MS[_C.order()]
