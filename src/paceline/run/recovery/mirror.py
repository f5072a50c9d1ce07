"""Copies of a rank's state, in its own memory and in a peer's memory."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from paceline.cluster.cgroup import memory_limit_bytes
from paceline.comm import Group
from paceline.comm.group import Pending
from paceline.device import current_stream, has_pinned_memory, has_streams, stream
from paceline.elastic.membership import Start, StepBoundary
from paceline.engine.engine import RankEngine
from paceline.engine.meter import CHECKPOINT
from paceline.planning.cost.constants import COPY_TRAFFIC, STATE_COPIES, STATE_SHARE
from paceline.run.record.recorder import StepInfo
from paceline.run.recovery.kept import KeptPart, Tell
from paceline.state.rank_state import RankState, state_bytes

Moment = tuple[int, int]  # (number of optimizer steps, number of changes of the pipeline cut)


@dataclass
class Copy:
    """Copy of a rank's state at a step boundary, in one contiguous memory block.

    `boundary` has the fields of a `StepBoundary`.
    """

    rank: int
    boundary: dict[str, Any]
    state: RankState

    @property
    def header(self) -> dict[str, Any]:
        """Description of the copy as JSON values, without its memory."""
        return {"rank": self.rank, "boundary": self.boundary, "state": self.state.header}

    @classmethod
    def to_receive(cls, header: dict[str, Any], reuse: Copy | None) -> Copy:
        """Create an empty copy as `header` describes; `reuse` lends its memory."""
        memory = None if reuse is None else reuse.memory
        return cls(header["rank"], header["boundary"], RankState.empty(header["state"], memory))

    @property
    def memory(self) -> Tensor:
        """Memory block of the state."""
        assert self.state.memory is not None
        return self.state.memory

    @property
    def moment(self) -> Moment:
        """Numbers of steps and cuts before the copy."""
        return _moment(self.boundary)


class Mirror(KeptPart):
    """Copies of this rank's state and of another rank's state.

    All ranks copy their states at the same step boundaries, and send the copies during the next steps. Each rank keeps
    two versions of both states, so one version is always complete when a rank is lost. If a machine has too little free
    memory, no rank keeps copies.

    Args:
        every_steps: number of steps between two copies; None limits the copies' cost to `STATE_SHARE` of the time.
    """

    needs_all = True

    def __init__(self, every_steps: int | None) -> None:
        super().__init__()
        self.every_steps = every_steps
        self._own: list[Copy] = []
        self._held: list[Copy] = []  # copies of another rank's state
        self._coming: tuple[Pending, Pending, Copy] | None = None
        self._stream: torch.Stream | None = None  # on accelerators, the stream of the copies to the host
        self._unsent: Copy | None = None  # copy that is on its way from the accelerator
        self._reached = -1
        self._group: Group | None = None
        self._off = False

    def start(self, group: Group, saved: int) -> Start | None:
        """Choose the newest step for which the ranks have copies of all parts.

        Returns None if there is no such step, or if a checkpoint is newer. All ranks of the group call this.
        """
        labels = [[copy.rank, copy.boundary] for copy in (*self._held, *self._own)]
        told = group.gather_json({"saved": saved, "reached": self._reached, "copies": labels})
        newest_saved = max(rank["saved"] for rank in told)
        holders: dict[Moment, dict[int, int]] = {}
        boundaries: dict[Moment, StepBoundary] = {}
        for holder, has in enumerate(told):
            for rank, boundary in has["copies"]:
                then = holders.setdefault(_moment(boundary), {})
                then[rank] = rank if then.get(rank) == rank else holder
                boundaries[_moment(boundary)] = StepBoundary(**boundary)
        for moment in sorted(holders, reverse=True):
            if moment[0] >= newest_saved and len(holders[moment]) == group.size:
                behind = sorted(rank for rank, holder in holders[moment].items() if holder != rank)
                lost_steps = max(rank["reached"] for rank in told) - moment[0]
                return Start(boundaries[moment], [], behind, behind, group.size, holders[moment], lost_steps)
        self._own, self._held = [], []
        return None

    def restore(self, engine: RankEngine, group: Group, start: Start) -> None:
        moment, me = (start.boundary.step, start.boundary.recuts), group.rank
        given = [self._copy(rank, moment) for rank in start.behind if start.holders[rank] == me]
        headers = {header["rank"]: header for told in group.gather_json([c.header for c in given]) for header in told}
        own = Copy.to_receive(headers[me], None) if me in headers else self._copy(me, moment)
        receive = [(start.holders[me], own.memory)] if me in headers else []
        self._group = group.for_host_memory()
        self._group.exchange([(copy.rank, copy.memory) for copy in given], receive)
        own.state.restore(engine)
        self._own, self._held = [own], [copy for copy in self._held if copy.moment == moment]
        self._reached = -1

    def begin(self, engine: RankEngine, group: Group, tell: Tell) -> None:
        """Begin a generation; all ranks of the group call this."""
        self._coming = self._unsent = None
        self._engine, self._tell = engine, tell
        self._group = self._group or group.for_host_memory()  # `restore` may have created it
        self._next, self._newest, self._cost_s, self._ended = 0, -1, math.inf, 0.0
        self._off = False
        self._to, self._from = partners(group.rank, group.hosts, group.size)
        if has_streams(engine.device) and has_pinned_memory(engine.device):
            self._stream = self._stream or stream(engine.device)
            engine.before_update = partial(self._before_update, engine.before_update)

    def _before_update(self, earlier: Callable[[int], object] | None, step: int) -> None:
        """Make the device finish the copy before it changes the state."""
        if self._unsent is not None and self._unsent.state.arrived is not None:
            current_stream(self._engine.device).wait_event(self._unsent.state.arrived)
        if earlier is not None:
            earlier(step)

    def at_boundary(self, engine: RankEngine, boundary: Callable[[], StepBoundary]) -> None:
        """Copy the state between two steps, if due."""
        self._send_arrived()
        step = engine.step_count
        if self._newest < 0:  # the first copy follows the first step, whose memory use must be known
            self._newest, self._next, self._ended = step, step + 1, time.perf_counter()
        if self._off or self._newest <= step < self._next:
            return
        now = boundary()
        if now.acted < step:  # a checkpoint or an evaluation will still follow this step
            return
        engine.on_phase("checkpoint", step)
        self._take(step, now)
        engine.meter.mark(CHECKPOINT)
        engine.on_phase("data", step + 1)

    def _take(self, step: int, boundary: StepBoundary) -> None:
        assert self._group is not None
        began = time.perf_counter()
        step_s = (began - self._ended) / max(step - self._newest, 1)
        self._settle()
        if step < self._newest:  # the run has rewound, and older copies may contain the cause
            self._own, self._held = [], []
        if math.isinf(self._cost_s) and self._finds_no_room(self._group):
            return
        # all ranks have the newest version, so the older version can be overwritten
        cost = max(self._group.gather_json(COPY_TRAFFIC * self._cost_s / max(step_s, 1e-6)))
        reuse = self._own.pop(0).state if len(self._own) > 1 else None
        state = RankState.of(self._engine).copied(reuse, in_one_piece=True, beside=self._stream)
        self._unsent = Copy(self._group.rank, asdict(boundary), state)
        if state.arrived is None:
            self._send_arrived()
        steps = FEWEST if math.isinf(cost) else steps_between(cost, 1)
        self._newest, self._next = step, step + (self.every_steps or steps)
        self._ended = time.perf_counter()
        self._cost_s = self._ended - began

    def _finds_no_room(self, group: Group) -> bool:
        """Release all copies on all ranks if a machine has too little memory for them."""
        taken = sum(len(copy.memory) for copy in (*self._own, *self._held))
        found = lack(group, max(STATE_COPIES * state_bytes(self._engine) - taken, 0))
        if found is not None:
            self._off, self._own, self._held = True, [], []
            self._tell("not_mirrored", {"wanted_bytes": found[0], "free_bytes": found[1]})
        return found is not None

    def broken_off(self, engine: RankEngine) -> None:
        self._reached = max(self._reached, engine.step_count)
        if self._coming is not None and all(work.is_completed() for work in self._coming[0].works):
            with suppress(Exception):  # the transfer may have failed because its sender is gone
                self._coming[0].wait()
                self._held.append(self._coming[2])
        self._coming = self._unsent = None

    def keep(self, engine: RankEngine) -> None:
        """Do nothing, because the existing copies suffice."""

    def end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _send_arrived(self) -> None:
        """Send the newest copy, which arrives from an accelerator during the following step."""
        own, group, self._unsent = self._unsent, self._group, None
        if own is None or group is None:
            return
        if own.state.arrived is not None:
            own.state.arrived.synchronize()
        header = group.gather_json(own.header)[self._from]
        self._own.append(own)
        coming = Copy.to_receive(header, self._held.pop(0) if len(self._held) > 1 else None)
        received = group.start_exchange([], [(self._from, coming.memory)])
        self._coming = received, group.start_exchange([(self._to, own.memory)], []), coming

    def _settle(self) -> None:
        if self._coming is not None:
            received, sent, coming = self._coming
            received.wait()
            sent.wait()
            self._coming = None
            self._held.append(coming)

    def _copy(self, rank: int, moment: Moment) -> Copy:
        return next(copy for copy in (*self._own, *self._held) if (copy.rank, copy.moment) == (rank, moment))


def _moment(boundary: Mapping[str, Any]) -> Moment:
    return boundary["step"], boundary["recuts"]


def partners(rank: int, hosts: Sequence[int], size: int) -> tuple[int, int]:
    """Return the rank that gets this rank's copy, and the rank that sends a copy.

    Both ranks are on other hosts if possible. In host order, their distance from this rank is the number of ranks on
    the largest host.
    """
    of = hosts if len(hosts) == size else [0] * size
    order, most = sorted(range(size), key=lambda r: (of[r], r)), max(of.count(host) for host in of)
    place, apart = order.index(rank), most if most < size else 1
    return order[(place + apart) % size], order[place - apart]


FEWEST, MOST = 10, 1000  # limits of the number of steps between two states


def steps_between(cost: float, fewest: int = FEWEST) -> int:
    """Return the number of steps between states that take `cost` steps each.

    The states then take at most `STATE_SHARE` of the time.
    """
    return min(max(math.ceil(cost / STATE_SHARE), fewest), MOST)


class LastGood:
    """Copy of this rank's newest good state, for rewinds.

    All ranks copy their states after the same steps. The interval depends on the slowest rank's last copy.

    Args:
        every_steps: number of steps between two copies; None limits the copies' cost to `STATE_SHARE` of the time.
    """

    def __init__(self, engine: RankEngine, group: Group, every_steps: int | None) -> None:
        self.engine, self.group, self.every_steps = engine, group, every_steps
        self.state: RankState | None = None
        self._next = 0
        self._step_s: list[float] = []
        self._untried = False  # whether no good step has followed the newest rewind

    def after_step(self, info: StepInfo, values: Callable[[], dict[str, Any]]) -> bool:
        """Record a step; return True if the state was due and has been copied."""
        if info.result.problem is not None:
            return False
        self._untried = False
        if info.result.timing is not None:
            self._step_s.append(info.result.timing.step_s)
        if info.result.step < self._next:
            return False
        self.take(values())
        return True

    def take(self, values: dict[str, Any]) -> None:
        """Copy the state now; every rank calls this."""
        began = time.perf_counter()
        self.state = RankState.of(self.engine, values).copied(self.state)
        self._next = self.state.step + (self.every_steps or self._worth_it(time.perf_counter() - began))
        self._step_s.clear()

    def newest(self, since: int) -> RankState | None:
        """Return the newest good state from step `since` or later, or None.

        If the first step after a rewind fails again, the state is not good and is dropped.
        """
        if self._untried:
            self.state, self._next = None, 0
        return self.state if self.state is not None and self.state.step >= since else None

    def restore(self, state: RankState) -> dict[str, Any]:
        """Restore a state; return the loop's values in it."""
        self._untried = True
        self._step_s.clear()
        return state.restore(self.engine)

    def _worth_it(self, copy_s: float) -> int:
        """Return the number of steps to the next copy; equal on all ranks."""
        step_s = statistics.median(self._step_s) if self._step_s else math.inf
        cost: float = max(copy / max(step, 1e-6) for copy, step in self.group.gather_json([copy_s, step_s]))
        return steps_between(cost)


@dataclass(frozen=True)
class Need:
    """Memory that a rank needs, and free memory of its machine.

    Attributes:
        machine: identifier of the machine; equal on its emulated hosts and in its containers.
        wanted_bytes: bytes that the rank needs in addition to its current use.
        own_bytes: bytes that the rank uses now, without shared memory.
        free_bytes: free bytes of the machine.
        limit_bytes: memory limit of the rank's control group; None without a limit.
    """

    machine: str
    wanted_bytes: int
    own_bytes: int
    free_bytes: int
    limit_bytes: int | None

    @classmethod
    def of_this_rank(cls, wanted_bytes: int) -> Need:
        """Measure the need of this rank.

        The need includes memory up to the rank's peak, which its next step will use again.
        """
        memory, most_bytes = psutil.Process().memory_info(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        machine = ""
        with suppress(OSError):
            machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        return cls(
            machine,
            wanted_bytes + max(most_bytes - memory.rss, 0),
            memory.rss - getattr(memory, "shared", 0),
            psutil.virtual_memory().available,
            memory_limit_bytes(),
        )


def lack(group: Group, wanted_bytes: int) -> tuple[int, int] | None:
    """Return the needed and free bytes of a machine with too little memory.

    Returns None if all machines have enough. All ranks of the group call this.
    """
    return lack_of([Need(**told) for told in group.gather_json(asdict(Need.of_this_rank(wanted_bytes)))])


def lack_of(needs: Sequence[Need]) -> tuple[int, int] | None:
    for machine in sorted({need.machine for need in needs}):
        there = [need for need in needs if need.machine == machine]
        free = min(need.free_bytes for need in there)
        limits = [need.limit_bytes for need in there if need.limit_bytes is not None]
        if limits:
            free = min(free, min(limits) - sum(need.own_bytes for need in there))
        wanted = sum(need.wanted_bytes for need in there)
        if wanted > free:
            return wanted, max(free, 0)
    return None
