"""Membership of processes in the generations of an attempt, without sockets, clocks and processes.

The launcher tells it what it sees, and announces what it decides. A generation is begun at once where a member is lost:
the others break off their step. It is *wanted* where one is to join: the members begin it after their step, all after
the same one, since they agree on it with their gradients. A replica that is divided over several processes takes part
whole or not at all: those that wait for a lost one of theirs keep what they hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set

from paceline.generation import Generation

WITHIN_S = 3600.0  # in which losses and restarts are counted
MOST_LOSSES = 3  # a process that is lost so often in an hour is left out


def noted(times_s: list[float], at_s: float) -> int:
    """Note a time; returns how many of the last hour are noted, this one included."""
    times_s[:] = [*(earlier for earlier in times_s if at_s - earlier < WITHIN_S), at_s]
    return len(times_s)


class Membership:
    """State machine of the generations of `processes` processes, numbered from 0.

    Args:
        replica_size: processes of one replica, whose numbers follow each other.

    Attributes:
        current: the newest generation that was begun.
        wanted: the one that is to be begun after a step; None where nobody is to join.
        left_out: processes that are not started again, or not before their host is back.
        released: those of them that leave after a step, or have left, as somebody has asked.
        away: those of them whose host may come back.
        held: True while nobody goes on, as too few hosts are there: all wait, with what they hold.
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
        self.held = False

    @property
    def newest(self) -> Generation:
        """The generation of the highest number, begun or wanted."""
        return self.wanted or self.current

    @property
    def hopeless(self) -> bool:
        """True if no replica can be whole again."""
        return not self.whole(set(range(self._processes)) - (self.left_out - self.away))

    def replica_of(self, process: int) -> set[int]:
        """The processes of its replica, itself among them."""
        first = process - process % self._replica_size
        return set(range(first, first + self._replica_size))

    def begin_without(self, processes: Set[int]) -> None:
        """Have the first generation without the replicas of processes that are not there yet."""
        self.left_out |= processes
        self.current = Generation(0, tuple(sorted(self._possible())))

    def whole(self, processes: Set[int]) -> set[int]:
        """Processes of those given whose replica is whole."""
        return {process for process in processes if self.replica_of(process) <= processes}

    def lost(self, process: int, at_s: float) -> bool:
        """Note the end of a process; returns whether it is to be started again."""
        return process in self.lost_together({process}, at_s)

    def lost_together(self, processes: Set[int], at_s: float) -> set[int]:
        """Note ends of processes, in one generation; returns which to start again."""
        losses = {process: noted(self._losses[process], at_s) for process in processes}
        members = {*self.current.members, *self.newest.members}
        if members & processes or (members and self.held):
            self._begin(members.difference(*(self.replica_of(process) for process in processes)))
        too_often = {process for process in processes if losses[process] >= self._most_losses}
        self.left_out |= too_often
        return set(processes) - too_often - self.released

    def losses_before(self, at_s: float) -> dict[int, list[float]]:
        """Losses of each process that was lost, in seconds before a time."""
        return {process: [at_s - lost_s for lost_s in losses] for process, losses in self._losses.items()}

    def remember(self, losses: Mapping[int, list[float]], at_s: float) -> None:
        """Count losses that another has noted, in seconds before a time."""
        for process, times in losses.items():
            self._losses[process] = [at_s - before_s for before_s in times]

    def release(self, processes: Set[int]) -> None:
        """Have whole replicas leave after a step."""
        self.released |= processes
        self.left_out |= processes

    def take_back(self, processes: Set[int]) -> None:
        """Have processes that were left out join again; their losses are forgotten."""
        self.released -= processes
        self.left_out -= processes
        for process in processes:
            self._losses.pop(process, None)

    def note(self, entered: Mapping[int, int], waiting: set[int]) -> None:
        """Note the generation that each living process has entered, and which wait to join."""
        # not before all are there: one on its way to this generation would go to the next, and be waited for in this
        members = set(self.current.members)
        if {entered.get(process) for process in members & set(self.newest.members)} - {self.newest.number}:
            return
        joining = self.whole(waiting - members - self.released)
        staying = members - self.released or members  # nobody leaves with what no other has
        if self.wanted is not None:
            self.current, self.wanted = self.wanted, None
        elif (joining or staying < members) and not self.held:
            kept = {process for process, generation in entered.items() if generation >= 0}
            if members:
                self.wanted = Generation(self.current.number + 1, tuple(sorted(staying | joining)))
            elif not kept <= waiting:
                return  # the newest state may be with one that is on its way
            elif self._replica_size == 1 or joining == self._possible():
                # All were lost. Whoever comes first goes on from what is saved; but parts of several replicas may have
                # the whole model together.
                self._begin(joining)

    def _possible(self) -> set[int]:
        """The processes of all replicas that can be whole."""
        return self.whole(set(range(self._processes)) - self.left_out)

    def _begin(self, members: set[int]) -> None:
        members = set() if self.held else members
        self.current, self.wanted = Generation(self.newest.number + 1, tuple(sorted(members))), None
