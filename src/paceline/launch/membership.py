"""Membership of processes in the epochs of an attempt, without sockets, clocks and processes.

The launcher tells it what it sees, and announces what it decides. An epoch is begun at once where a member is lost: the
others break off their step. It is *wanted* where one is to join: the members begin it after their step, all after the
same one, since they agree on it with their gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from paceline.epoch import Epoch

MOST_LOSSES, WITHIN_S = 3, 3600.0  # a process that is lost so often in an hour is left out


class Membership:
    """State machine of the epochs of `processes` processes, numbered from 0.

    Attributes:
        current: the newest epoch that was begun.
        wanted: the one that is to be begun after a step; None where nobody is to join.
        joining: processes that are ready to take part, and do not yet.
    """

    def __init__(self, processes: int, most_losses: int = MOST_LOSSES) -> None:
        self.current = Epoch(0, tuple(range(processes)))
        self.wanted: Epoch | None = None
        self.joining: set[int] = set()
        self._most_losses = most_losses
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._entered: dict[int, int] = {}

    @property
    def newest(self) -> Epoch:
        """The epoch of the highest number, begun or wanted."""
        return self.wanted or self.current

    def lost(self, process: int, at_s: float) -> bool:
        """Note the end of a process; returns whether it is to be started again."""
        losses = self._losses[process]
        losses[:] = [*(earlier for earlier in losses if at_s - earlier < WITHIN_S), at_s]
        self.joining.discard(process)
        self._entered.pop(process, None)
        members = {*self.current.members, *self.newest.members}
        if process in members:
            self._begin(members - {process})
        return len(losses) < self._most_losses

    def note(self, entered: Mapping[int, int], joining: set[int]) -> None:
        """Note which epoch each process has entered, and who waits to join."""
        self._entered |= entered
        if self.wanted is not None and all(self._is_in(self.wanted, process) for process in self.current.members):
            self.current, self.wanted = self.wanted, None
        self.joining = joining - set(self.newest.members)
        if not self.joining or self.wanted is not None:
            return
        if not self.current.members:
            # all were lost: whoever comes first goes on from what is saved
            self._begin(self.joining)
        elif all(self._is_in(self.current, process) for process in self.current.members):
            # not before: a member on its way to this epoch would go to the next one, and be waited for in this
            self.wanted = Epoch(self.current.number + 1, tuple(sorted({*self.current.members, *self.joining})))
            self.joining = set()

    def _begin(self, members: set[int]) -> None:
        self.current, self.wanted = Epoch(self.newest.number + 1, tuple(sorted(members))), None

    def _is_in(self, epoch: Epoch, process: int) -> bool:
        return self._entered.get(process) == epoch.number
