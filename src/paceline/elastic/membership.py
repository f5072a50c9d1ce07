"""Membership of processes in the generations of an attempt, without sockets, clocks or real processes.

The launcher reports events to `Membership`, and announces its decisions to the ranks. After a loss, the next generation
begins at once, and the other members abort their step. If a process wants to join, a generation is *wanted*, which the
members begin after a step. They agree on this step by a flag that is sent with their gradients. A replica that is
divided over several processes takes part as a whole or not at all. While a lost process of a replica is replaced, the
other processes of the replica wait and keep their state.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.files import write_whole
from paceline.rank_environment import STORE, RankEnvironment
from paceline.wire.status import Generation, StatusBoard, next_number

WITHIN_S = 3600.0  # time window in which losses and restarts are counted
MOST_LOSSES = 3  # losses within an hour after which a process is left out


def noted(times_s: list[float], at_s: float) -> int:
    """Add an event at time `at_s`; return the number of events in the last hour."""
    times_s[:] = [*(earlier for earlier in times_s if at_s - earlier < WITHIN_S), at_s]
    return len(times_s)


class Membership:
    """State machine of the generations of `processes` processes, numbered from 0.

    Args:
        replica_size: number of processes per replica. The processes of a replica have consecutive numbers.

    Attributes:
        current: newest generation that has begun.
        wanted: generation to begin after a step; None if no process joins or leaves.
        left_out: processes that are not restarted at all, or not until their host is back.
        released: left-out processes that have left, or leave after a step, because a user requested it.
        away: left-out processes whose host may come back.
        departing: processes that leave after a step, because their host does.
        pausing: True if all members leave after a step, and wait for a new coordinator.
        held: True while too few hosts are present. All processes then wait and keep their state.
    """

    def __init__(self, processes: int, most_losses: int = MOST_LOSSES, replica_size: int = 1) -> None:
        self.current = Generation(0, tuple(range(processes)))
        self.wanted: Generation | None = None
        self._processes = processes
        self._most_losses, self._replica_size = most_losses, replica_size
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self.left_out: set[int] = set()
        self.released: set[int] = set()
        self.away: set[int] = set()
        self.departing: set[int] = set()
        self.pausing = False
        self.held = False

    @property
    def newest(self) -> Generation:
        """Wanted generation if there is one, otherwise the current generation."""
        return self.wanted or self.current

    @property
    def hopeless(self) -> bool:
        """True if no replica can be whole again."""
        return not self.whole(set(range(self._processes)) - (self.left_out - self.away))

    def replica_of(self, process: int) -> set[int]:
        """Return all processes of the replica that contains a process."""
        first = process - process % self._replica_size
        return set(range(first, first + self._replica_size))

    def begin_without(self, processes: Set[int]) -> None:
        """Form the first generation, without replicas that have an absent process."""
        self.leave_out(processes)
        self.current = Generation(0, tuple(sorted(self._possible())))

    def whole(self, processes: Set[int]) -> set[int]:
        """Select the processes of replicas whose processes are all in `processes`."""
        return {process for process in processes if self.replica_of(process) <= processes}

    def lost(self, process: int, at_s: float) -> bool:
        """Record the loss of a process; return True if the process should be restarted."""
        return process in self.lost_together({process}, at_s)

    def lost_together(self, processes: Set[int], at_s: float) -> set[int]:
        """Record the simultaneous loss of processes; return the processes to restart."""
        losses = {process: noted(self._losses[process], at_s) for process in processes}
        members = {*self.current.members, *self.newest.members}
        if members & processes or (members and self.held):
            self._begin(members.difference(*(self.replica_of(process) for process in processes)))
        too_often = {process for process in processes if losses[process] >= self._most_losses}
        self.leave_out(too_often)
        return set(processes) - too_often - self.released

    def losses_before(self, at_s: float) -> dict[int, list[float]]:
        """Return how many seconds before `at_s` each process was lost."""
        return {process: [at_s - lost_s for lost_s in losses] for process, losses in self._losses.items()}

    def remember(self, losses: Mapping[int, list[float]], at_s: float) -> None:
        """Add losses that a previous coordinator recorded, given in seconds before `at_s`."""
        for process, times in losses.items():
            self._losses[process] = [at_s - before_s for before_s in times]

    def leave_out(self, processes: Set[int], away: Set[int] = frozenset()) -> None:
        """Continue without `processes`. The hosts of the processes in `away` may come back."""
        self.left_out |= processes
        self.away |= away

    def come_back(self, processes: Set[int]) -> None:
        """Readmit processes whose host has come back."""
        self.left_out -= processes
        self.away -= processes

    def release(self, processes: Set[int]) -> None:
        """Let whole replicas leave after a step."""
        self.released |= processes
        self.leave_out(processes)

    def take_back(self, processes: Set[int]) -> None:
        """Readmit processes that were left out, and delete the record of their losses."""
        self.released -= processes
        self.left_out -= processes
        for process in processes:
            self._losses.pop(process, None)

    def note(self, entered: Mapping[int, int], waiting: set[int]) -> None:
        """Update the membership from the state of the running processes.

        Args:
            entered: generation that each running process has entered; -1 for none.
            waiting: processes that wait to join.
        """
        # wait until all members have entered: a late member would enter the next generation while the others wait for
        # it
        members = set(self.current.members)
        if {entered.get(process) for process in members & set(self.newest.members)} - {self.newest.number}:
            return
        if self.wanted is not None and not self.wanted.members and not members <= waiting:
            return  # a member is still in its last step
        leaving = self.released | self.departing
        joining = self.whole(waiting - members - leaving)
        staying = self.whole(members - leaving) or members  # members that hold the only copy of the state must stay
        if self.wanted is not None:
            self.current, self.wanted = self.wanted, None
        elif self.pausing:
            if members:
                self.wanted = Generation(self.current.number + 1, ())
        elif (joining or staying < members) and not self.held:
            kept = {process for process, generation in entered.items() if generation >= 0}
            if members:
                self.wanted = Generation(self.current.number + 1, tuple(sorted(staying | joining)))
            elif not kept <= waiting:
                return  # a process that has not arrived yet may have the newest state
            elif self._replica_size == 1 or joining == self._possible():
                # All replicas were lost. If a replica is one process, the first one continues from its saved state. If
                # replicas are divided, the parts of several replicas may together form the whole model.
                self._begin(joining)

    def _possible(self) -> set[int]:
        """Return the processes of all replicas that can be whole."""
        return self.whole(set(range(self._processes)) - self.left_out)

    def _begin(self, members: set[int]) -> None:
        members = set() if self.held else members
        self.current, self.wanted = Generation(self.newest.number + 1, tuple(sorted(members))), None


@dataclass(frozen=True)
class StepBoundary:
    """State of a training loop at the end of a step, without tensors.

    The state can be written as JSON, and is equal on all ranks at the same step.

    Attributes:
        step: number of optimizer steps taken; -1 on a rank that has no state yet.
        generation: generation in which the newest step was taken. After an abort, different ranks may take the same
            step in different generations.
        ready: generation in which the next step was aborted after the gradients of all ranks had arrived, or -1. A rank
            of a divided replica can then take this step by itself.
        acted: newest step after which the due evaluations and checkpoints are done.
        stop: state of the stop rule.
        schedule: state of the learning-rate schedule.
        evaluated_at: step of the newest evaluation.
        rejected: steps whose batch was skipped after a rewind.
        items_per_sample: see `LossNormalization`.
        corrupted: see `Corruption.times`.
        last: metrics of the newest step.
        before: metrics of earlier steps that each replica took by itself. Only one replica has recorded these metrics.
        recuts: number of times that pipelines were divided into new stages.
        outcome: result of the newest step, for ranks that are ready to take it.
        cut: first layer of each pipeline stage, as in `Plan.cut`.
        epoch_ends: steps after which epochs of a stream have ended.
        position: the loader's position in a stream; None for other data, whose position follows from the step.
    """

    step: int = -1
    generation: int = -1
    ready: int = -1
    acted: int = -1
    stop: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    evaluated_at: int = -1
    rejected: list[int] = field(default_factory=list)
    items_per_sample: float | None = None
    corrupted: list[int] = field(default_factory=list)
    last: dict[str, Any] | None = None
    before: list[dict[str, Any]] = field(default_factory=list)
    recuts: int = 0
    outcome: dict[str, Any] | None = None
    cut: str = ""
    epoch_ends: list[int] = field(default_factory=list)
    position: dict[str, Any] | None = None


@dataclass(frozen=True)
class Start:
    """Start of a generation: the state from which its ranks continue.

    Attributes:
        boundary: newest step boundary at which the ranks together have the whole model, or an empty boundary.
        ready: ranks that take the newest step by themselves, because they have its gradients.
        behind: ranks that receive the state from others.
        new: ranks in `behind` that have no state yet.
        replica_size: number of ranks that together hold one copy of the model.
        holders: rank that holds the copy of each rank's state, if all ranks return to copies in memory (`Mirror`);
            otherwise empty.
        lost_steps: number of steps that must be trained again.
    """

    boundary: StepBoundary
    ready: list[int]
    behind: list[int]
    new: list[int]
    replica_size: int = 1
    holders: dict[int, int] = field(default_factory=dict)
    lost_steps: int = 0

    @property
    def begins(self) -> bool:
        """True if no rank has a state. All ranks then start from the beginning or a checkpoint."""
        return self.boundary.step < 0

    def holders_of_part(self, rank: int, ranks: int) -> list[int]:
        """Return the replicas that have the newest state of the model part of `rank`.

        Args:
            ranks: total number of ranks.
        """
        have = set(range(ranks)) - set(self.behind)
        parts = range(rank % self.replica_size, ranks, self.replica_size)
        return [replica for replica, of_part in enumerate(parts) if of_part in have]


def newest_of(boundaries: Sequence[StepBoundary], replica_size: int = 1) -> Start:
    """Compute the state from which ranks with these step boundaries continue.

    A rank takes a step only after all ranks have the gradients of the step. Ranks that aborted this step can therefore
    still take it.
    """
    found = {(boundary.generation, boundary.step, boundary.cut) for boundary in boundaries if boundary.step >= 0}
    for generation, step, cut in sorted(found, reverse=True):
        cut_so = [(rank, boundary) for rank, boundary in enumerate(boundaries) if boundary.cut == cut]
        taken = [rank for rank, boundary in cut_so if (boundary.step, boundary.generation) == (step, generation)]
        ready = [rank for rank, boundary in cut_so if (boundary.step + 1, boundary.ready) == (step, generation)]
        if len({rank % replica_size for rank in (*taken, *ready)}) == replica_size:
            source = max(taken, key=lambda rank: (boundaries[rank].acted, -rank))
            behind = [rank for rank in range(len(boundaries)) if rank not in (*taken, *ready)]
            new = [rank for rank in behind if boundaries[rank].step < 0]
            return Start(replace(boundaries[source], ready=-1), ready, behind, new, replica_size)
    ranks = range(len(boundaries))
    return Start(StepBoundary(), [], [*ranks], [*ranks], replica_size)


_LOOK_S = 0.002


class Member:
    """This process as a member of the run.

    Args:
        number: permanent number of the process, independent of its rank in a generation.
        folder: folder in which the launcher lists the members of each generation.
    """

    def __init__(self, number: int, board: StatusBoard, folder: Path) -> None:
        self.number, self.board, self.folder = number, board, folder
        self.generation = Generation(-1, ())
        self._out_of = -1  # number of the newest generation that began without this process

    @classmethod
    def of_this_rank(cls) -> Member:
        """Make the member for this process, whose launcher must announce generations."""
        environment = RankEnvironment.from_env()
        assert environment.status_file is not None, "only ranks of our launcher take part in generations"
        return cls(environment.rank, StatusBoard.of_this_rank(), environment.status_file.parent)

    def is_over(self) -> bool:
        """Return True if another generation has begun."""
        return self.board.current_generation > self.generation.number

    def another_is_wanted(self) -> bool:
        """Return True if another generation should begin after this step."""
        return self.board.wanted_generation > self.generation.number

    def is_awaited(self) -> bool:
        """Return True if other processes wait for this process in an announced generation."""
        number = next_number(self.board.current_generation, self.board.wanted_generation, self.generation.number)
        generation = announced(self.folder, number) if number is not None else None
        return generation is not None and self.number in generation.members

    def next_generation(self) -> Generation:
        """Wait for the next generation that has this process as a member, and enter it.

        If the replica of this process has lost a rank, this process waits to join, like a replacement. While the
        coordinator is replaced, all processes wait in a generation without members. The launcher ends waiting processes
        that can no longer join.
        """
        told = False
        while True:
            number = next_number(self.board.current_generation, self.board.wanted_generation, self.generation.number)
            if number is not None and number > self._out_of:
                generation = announced(self.folder, number)
                if generation is None:
                    time.sleep(_LOOK_S)
                    continue
                if self.number in generation.members:
                    self.generation = generation
                    if (store := store_file(self.folder)).exists():
                        os.environ[STORE] = store.read_text()
                    self.board.enter(number)
                    return generation
                self.generation, self._out_of = Generation(-1, ()), number
            if self.generation.number < 0 and not told:
                told = True
                self.board.mark("joining", 0)
            time.sleep(_LOOK_S)


def announce(board: StatusBoard, folder: Path, current: Generation, newest: Generation) -> None:
    """Announce generations on a status board, and remove the files of older generations.

    Args:
        folder: folder that contains the status board.
    """
    for generation in (current, newest):
        write_whole(_members_file(folder, generation.number), json.dumps(generation.members))
    board.announce(current.number, newest.number)
    for file in folder.glob(_members_file(folder, "*").name):
        if int(file.stem.partition("-")[2]) < current.number:
            file.unlink()


def announced(folder: Path, number: int) -> Generation | None:
    """Read an announced generation; return None if a newer generation has just replaced it."""
    try:
        return Generation(number, tuple(json.loads(_members_file(folder, number).read_text())))
    except FileNotFoundError:
        return None


def _members_file(folder: Path, generation: int | str) -> Path:
    return folder / f"generation-{generation}.json"


def store_file(folder: Path) -> Path:
    """Return the path of the file for the rendezvous store's address.

    A launcher that continues the run on another host writes the file.
    """
    return folder / "store-address"
