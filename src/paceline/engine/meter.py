"""Step timing by part: data, compute, bubble, exposed communication, imbalance, optimizer, checkpoint.

Each part ends when the next part begins, so the parts add up to the step time.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.device import Clock

if TYPE_CHECKING:
    import torch

PARTS = ("data", "compute", "bubble", "comm", "imbalance", "optimizer", "checkpoint")
DATA, COMPUTE, BUBBLE, COMM, IMBALANCE, OPTIMIZER, CHECKPOINT = range(len(PARTS))


@dataclass(slots=True)
class Timing:
    """One step's time on one rank: seconds per part, in the order of `PARTS`."""

    step: int
    parts_s: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))

    @property
    def step_s(self) -> float:
        """Seconds from the end of the previous step to the end of this step."""
        return sum(self.parts_s)

    @property
    def busy_s(self) -> float:
        """Seconds until this rank was ready to communicate, without any wait for other ranks."""
        return self.step_s - self.parts_s[BUBBLE] - self.parts_s[COMM] - self.parts_s[IMBALANCE]

    def move(self, part: int, source: int) -> None:
        """Subtract the seconds of a part from `source`, in which they were also counted.

        The part gets at most the seconds of `source`.
        """
        self.parts_s[part] = min(self.parts_s[part], self.parts_s[source])
        self.parts_s[source] -= self.parts_s[part]


class Meter:
    """Stopwatch of one rank; `mark(part)` assigns the time since the last mark to `part`.

    On accelerators, the marks are events on the current stream. The events are read one step later, so the host never
    waits for a measurement. If a device has no timed events, the marks are host times at which the work was queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self.current = Timing(0)
        self._last = self._reduced = time.perf_counter()
        self._start: Any = None
        self._events: list[tuple[int, Any]] = []
        self._unread: deque[tuple[Timing, Any, list[tuple[int, Any]]]] = deque()
        self.previous_busy_s = 0.0

    def mark(self, part: int) -> None:
        """Assign the time since the last mark to `part`."""
        if self._clock.by_events:
            self._events.append((part, self._clock.now()))
            return
        now = time.perf_counter()
        self.current.parts_s[part] += now - self._last
        self._last = now

    def restart(self) -> None:
        """Forget the time since the last mark.

        This excludes an evaluation or a pause from the step time.
        """
        self._last = self._reduced = time.perf_counter()
        self.current.parts_s = [0.0] * len(PARTS)
        if self._clock.by_events:
            self._events.clear()
            self._start = self._clock.now()

    def busy_s(self) -> float:
        """Return the seconds this rank computed since the last reduction.

        On accelerators, this is the value of the previous step.
        """
        return self.previous_busy_s if self._clock.by_events else self._last - self._reduced

    @property
    def waited_s(self) -> float:
        """Return the seconds of `busy_s` spent waiting in the pipeline; 0 on accelerators."""
        return 0.0 if self._clock.by_events else self.current.parts_s[BUBBLE]

    def waited_in_pipeline(self, seconds: float) -> None:
        """Move seconds from compute to pipeline bubble."""
        self.current.parts_s[BUBBLE] = seconds
        if not self._clock.by_events:  # otherwise when the compute time has been read
            self.current.move(BUBBLE, COMPUTE)

    def split_wait(self, slowest_busy_s: float, own_busy_s: float) -> None:
        """Split communication time into imbalance (waiting for the slowest rank) and exposed communication.

        All ranks leave an all-reduce at about the same moment. The ranks' busy times after this moment show when each
        rank reached the next all-reduce. The clocks of different hosts are not compared.
        """
        self._reduced = self._last
        self.current.parts_s[IMBALANCE] = max(slowest_busy_s - own_busy_s, 0.0)
        if not self._clock.by_events:  # otherwise when the wait time has been read
            self.current.move(IMBALANCE, COMM)

    def finish(self, step: int) -> Timing | None:
        """End the step, and return the newest step whose times are known.

        On CPUs, this is the current step. On accelerators, it is the previous step, or None at the first step.
        """
        done = self.end(step)
        if not self._clock.by_events:
            return done
        return self._read_events() if len(self._unread) > 1 else None

    def end(self, step: int) -> Timing:
        """End the step; on accelerators its times are read later."""
        done = self.current
        done.step = step
        self.current = Timing(step + 1)
        if not self._clock.by_events:
            return done
        if self._start is not None:
            self._unread.append((done, self._start, self._events))
        self._start = self._events[-1][1] if self._events else self._clock.now()
        self._events = []
        return done

    def ended(self, step: int, slowest_busy_s: float, own_busy_s: float) -> Timing | None:
        """Return the times of a step that the accelerator has completed; None if untimed."""
        while self._unread and self._unread[0][0].step < step:  # an error ended an earlier step
            self._unread.popleft()
        if not self._unread or self._unread[0][0].step != step:
            return None
        self._unread[0][0].parts_s[IMBALANCE] = max(slowest_busy_s - own_busy_s, 0.0)
        return self._read_events()

    def _read_events(self) -> Timing:
        timing, previous, events = self._unread.popleft()
        self._clock.reach(events[-1][1] if events else previous)
        for part, event in events:
            timing.parts_s[part] += self._clock.seconds(previous, event)
            previous = event
        timing.move(BUBBLE, COMPUTE)
        timing.move(IMBALANCE, COMM)
        self.previous_busy_s = timing.busy_s
        return timing
