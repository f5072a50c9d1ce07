"""End of waits on an accelerator when the generation is over.

On an accelerator, the host waits for the device, and the device waits for the other ranks. If a rank is lost, such a
wait may never end, and raise no error. A thread therefore watches the generation. When the generation is over, the
thread aborts the process groups of torch's collective library. The device then finishes the queued work. The process
keeps the device's context and memory. Results of aborted collectives are undefined. Code that reads a result from the
device therefore calls `wire/status.py:refuse_aborted` before it uses the result. Code that uses a result on the device
without reading the result calls `settle` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from paceline.device import aborted_together, event, is_accelerator, survive_lost_peers, synchronize
from paceline.errors import device_fault
from paceline.wire.status import (
    generation_is_over,
    generations_are_watched,
    note_abort,
    refuse_aborted,
    was_aborted,
)

_LOOK_S = 0.01
_TRIES = 100  # maximum number of waits; a device may report errors of aborted collectives, one at each wait


class Interruption:
    """Thread that aborts this process's groups on an accelerator when the generation is over.

    Attributes:
        gradients_arrived: returns True if the newest reduced gradients are complete on the device. The function is
            called before the abort, because the answer is unknown afterwards.
        had_gradients: result of that call; False before the abort.
    """

    def __init__(self, device: torch.device) -> None:
        survive_lost_peers()
        self.device = device
        self.gradients_arrived: Callable[[], bool] = lambda: False
        self.had_gradients = False
        self._phase: tuple[torch.Event, Callable[[], None]] | None = None
        self._phase_lock = threading.Lock()
        self._aborted: set[ProcessGroup] = set()
        self._one_at_a_time = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-interruption", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        """Abort all groups, and wait until the device has finished its queued work.

        Raises:
            RuntimeError: the device is lost.
        """
        self._abort()
        for _ in range(_TRIES):
            try:
                synchronize(self.device)
            except RuntimeError as error:
                if device_fault(error):
                    raise
            else:
                return

    def begin_phase_after_compute(self, tell: Callable[[], None]) -> None:
        """Call `tell` when the device has finished the work queued so far.

        The host queues collectives before the device has computed their inputs. A rank whose device still computes or
        hangs must not look like a rank that waits for others.
        """
        computed = event(self.device)
        computed.record()
        with self._phase_lock:
            self._phase = computed, tell

    def end_phase(self) -> None:
        """Forget the last `begin_phase_after_compute`, because its phase is over."""
        with self._phase_lock:
            self._phase = None

    def end(self) -> None:
        """End the thread; the groups may then be destroyed."""
        self._ended.set()
        self._thread.join()
        self._aborted.clear()
        note_abort(False)

    def _watch(self) -> None:
        # groups that the main thread creates after the abort are aborted as well
        while not self._ended.wait(_LOOK_S):
            if generation_is_over():
                self._abort()
            else:
                self._note_phase()

    def _note_phase(self) -> None:
        with self._phase_lock, suppress(RuntimeError):  # the device may be lost
            if self._phase is not None and self._phase[0].query():
                self._phase[1]()
                self._phase = None

    def _abort(self) -> None:
        with self._one_at_a_time:
            if not was_aborted():
                with suppress(RuntimeError):  # the device may be lost
                    self.had_gradients = self.gradients_arrived()
                note_abort(True)
            world = distributed_c10d._world
            # The default group is aborted first: a step counts only if its sum over all ranks is complete.
            groups = [group for group in world.pg_names if group not in self._aborted]
            groups.sort(key=lambda group: (group is not world.default_pg, world.pg_names[group]))
            if not groups:
                return
            with aborted_together(groups[0]):
                for group in groups:
                    self._aborted.add(group)
                    with suppress(RuntimeError):  # gloo cannot abort, but detects lost peers itself
                        group.abort()


def settle(device: torch.device) -> None:
    """Wait for results of collectives, if an abort could leave them undefined.

    Raises:
        GenerationOver: the collectives were aborted.
    """
    if is_accelerator(device) and generations_are_watched():
        synchronize(device)
        refuse_aborted()
