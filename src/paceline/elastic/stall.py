"""Comparison of all ranks' positions, which finds the rank that did not enter a collective.

A rank that waits depends on the ranks that have entered fewer collectives of the same group. If others depend on a rank
that waits for no rank itself, this rank has caused the stall. If all ranks wait for one another, there are two cases.
If ranks of a group made different calls with the same number, a rank that left out another rank's call is the cause, or
else a rank with the least frequent call. Otherwise, the rank that is furthest in its program has left out a collective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from paceline.wire.position import Position, Wait
from paceline.wire.status import PHASES, RankStatus


@dataclass(frozen=True)
class Stall:
    """Collective in which ranks wait for a rank that did not enter it.

    Attributes:
        rank: the rank that did not enter the collective.
        waiting: ranks that wait in the collective.
        stuck: all ranks that wait for others.
        wait: the collective, as seen by a waiting rank.
        step: step of the waiting rank.
        layer: the layer that called the collective; if none did, the layer in which `rank` is.
        own_layer: the layer in which `rank` is.
        instead: the operation in which `rank` waits; None if it waits for no rank.
        differs: True if `rank` made a different call instead of the collective.
    """

    rank: int
    waiting: Sequence[int]
    stuck: Sequence[int]
    wait: Wait
    step: int
    own_layer: str = ""
    instead: Wait | None = None
    differs: bool = False

    @property
    def layer(self) -> str:
        """The layer of the collective, or else the layer in which the rank is."""
        return self.wait.layer or self.own_layer

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the error about this stall."""
        wait = self.wait
        described = {"collective": wait.what, "number": wait.number, "tensors": wait.tensors, "group": wait.label}
        return {**described, "layer": self.layer, "step": self.step, "waiting": list(self.waiting)}


def stall_of(
    positions: Mapping[int, Position],
    statuses: Sequence[RankStatus],
    members: Sequence[int],
    suspended: Set[int] = frozenset(),
) -> Stall | None:
    """Find the rank that did not enter a collective, or return None.

    Args:
        positions: positions of the ranks that have answered, by number.
        statuses: statuses of all ranks, by number.
        members: numbers of the ranks of the generation, in ascending order.
        suspended: ranks that SIGSTOP has suspended. Such a rank may have called a collective that its device cannot
            carry out.
    """
    known = {n: p for n, p in positions.items() if p.entered and _is_of(members, n, p)}
    found = _Comparison(known, statuses, members, suspended)
    return found.stall()


def _is_of(members: Sequence[int], number: int, position: Position) -> bool:
    """Return True if a rank's position may belong to the generation with these members."""
    named = {position.rank, *(rank for wait in position.waits for rank in (*wait.members, *(wait.awaited or ())))}
    return max(named) < len(members) and members[position.rank] == number


class _Comparison:
    def __init__(
        self,
        positions: Mapping[int, Position],
        statuses: Sequence[RankStatus],
        members: Sequence[int],
        suspended: Set[int],
    ) -> None:
        self.positions, self.statuses, self.members, self.suspended = positions, statuses, members, suspended
        self.depends: dict[int, list[tuple[Wait, set[int]]]] = defaultdict(list)
        for number, position in positions.items():
            for wait in position.waits if number not in suspended else ():
                if awaited := self._awaited(number, position, wait):
                    self.depends[number].append((wait, awaited))

    def stall(self) -> Stall | None:
        awaited = Counter(n for of_rank in self.depends.values() for _, others in of_rank for n in others)
        free = [number for number in awaited if number not in self.depends]
        if free:
            return self._blaming(max(free, key=lambda n: (awaited[n], -n)))
        if (odd := self._different_call()) is not None:
            return odd
        return self._blaming(max(awaited, key=self._progress)) if awaited else None

    def _awaited(self, number: int, position: Position, wait: Wait) -> set[int]:
        """Return the numbers of the ranks that a rank waits for."""
        by_transport = None if wait.awaited is None else {self.members[rank] for rank in wait.awaited}
        others = {self.members[rank] for rank in wait.members} - {number}
        silent = others - self.positions.keys()
        late = {n for n in others - silent if wait.number and self._entered(n, wait.group) < wait.number}
        late |= silent if by_transport is None else silent & by_transport
        return late or by_transport or others & self.suspended

    def _entered(self, number: int, group: str) -> int:
        return self.positions[number].entered.get(group, 0)

    def _different_call(self) -> Stall | None:
        """Find ranks with different operations or tensors in one collective.

        A rank that left out the call of another rank is blamed. Without such a rank, it is one of the fewest.
        """
        places: dict[tuple[str, int], dict[int, Wait]] = defaultdict(dict)
        for number, position in self.positions.items():
            for wait in position.waits:
                if wait.number:
                    places[wait.group, wait.number][number] = wait
        for calls in places.values():
            kinds = Counter(wait.call for wait in calls.values())
            if len(kinds) > 1:

                def fault(number: int, calls: dict[int, Wait] = calls, kinds: Counter[Any] = kinds) -> tuple[Any, ...]:
                    wait = calls[number]
                    return wait.after in kinds, -kinds[wait.call], self._progress(number)

                rank = max(calls, key=fault)
                others = [n for n in calls if calls[n].call != calls[rank].call]
                return self._made(rank, others, calls[others[0]], instead=calls[rank], differs=True)
        return None

    def _blaming(self, rank: int) -> Stall:
        waits = [(n, wait) for n, of_rank in self.depends.items() for wait, others in of_rank if rank in others]
        wait = min(waits, key=lambda pair: self._progress(pair[0]))[1]
        waiting = [n for n, other in waits if (other.group, other.number) == (wait.group, wait.number)]
        instead = self.depends[rank][0][0] if rank in self.depends else None
        return self._made(rank, waiting, wait, instead=instead)

    def _made(self, rank: int, waiting: Sequence[int], wait: Wait, **more: Any) -> Stall:
        own = self.positions.get(rank)
        step = self.statuses[waiting[0]].step
        return Stall(rank, waiting, sorted(self.depends), wait, step, own.layer if own else "", **more)

    def _progress(self, number: int) -> tuple[int, int, float]:
        """Return a rank's progress in its program: step, phase, and start of its wait."""
        status, position = self.statuses[number], self.positions.get(number, Position())
        return status.step, PHASES.index(status.phase), -min((w.waited_s for w in position.waits), default=0.0)
