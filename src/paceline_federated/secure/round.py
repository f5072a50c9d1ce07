"""One round of secure aggregation over real clients: keys, groups, and their sums."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import SecureSumError
from paceline_federated.secure.group import Group, Plain, public_keys
from paceline_federated.secure.messages import FEWEST, Announcement, Terms, default_threshold
from paceline_federated.secure.packing import PackedSum, Packing
from paceline_federated.secure.suspects import Suspects


@dataclass
class Gathered:
    """Result of a secure round.

    Attributes:
        sums: accepted ones, with the number of clients in each.
        counted: clients in an accepted sum.
        refused: clients in a sum that was not accepted, with the reason.
        found: clients that are the only ones left to have poisoned one.
    """

    sums: list[tuple[PackedSum, int]] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    found: set[int] = field(default_factory=set)


class SecureRound:
    """A round whose server sees sums of groups alone.

    Args:
        name: of the round, of this run alone.
        packing: layout of the clients' vectors.
        most: clients in a group.
        phase_s: seconds for an answer once training is over.
        suspects: of all rounds; groups are smaller while a poisoner is looked for.
    """

    def __init__(self, name: str, packing: Packing, most: int, phase_s: float, suspects: Suspects, seed: int) -> None:
        self._name, self._packing, self._most, self._phase_s = name, packing, most, phase_s
        self._suspects, self._random = suspects, random.Random(f"{seed}/{name}")
        self._keys: dict[int, Announcement] = {}
        self._groups: list[Group] | None = None
        self._group_of: dict[int, Group] = {}
        self._alone: dict[int, str] = {}

    @property
    def ready(self) -> set[int]:
        """Clients that have trained and sent their keys."""
        return set(self._keys)

    @property
    def summing(self) -> bool:
        """True once groups are made, so that who trains still is too late."""
        return self._groups is not None

    @property
    def ended(self) -> bool:
        """True once every group has its sum, or none."""
        return self._groups is not None and all(group.ended for group in self._groups)

    def take(self, number: int, kind: str, content: Any) -> None:
        """An answer of client `number`. Raises SecureSumError as `Group.take`."""
        if kind == "keys":
            if self.summing or number in self._keys:
                raise SecureSumError(f"client {number} sent its keys {'too late' if self.summing else 'twice'}")
            self._keys[number] = public_keys(content)
        elif number not in self._group_of:
            raise SecureSumError(f"client {number} is in no group of this round")
        else:
            self._group_of[number].take(number + 1, kind, content)

    def leave(self, number: int) -> None:
        """Wait for a client no more."""
        if number in self._group_of:
            self._group_of[number].leave(number + 1)
        elif not self.summing:
            self._keys.pop(number, None)

    def work(self, number: int) -> Plain | None:
        """The answer that is awaited of a client; None where there is none."""
        group = self._group_of.get(number)
        return None if group is None else group.work(number + 1)

    def awaited(self) -> set[int]:
        """Clients whose answer some group waits for."""
        return {number for number in self._group_of if self.work(number) is not None}

    def begin(self, now: float) -> None:
        """Make groups of the clients that are ready."""
        ready = sorted(self._keys)
        self._random.shuffle(ready)
        self._groups = []
        for members in _dealt(ready, self._size(len(ready))):
            name = f"{self._name}/{len(self._groups)}"
            terms = Terms(name, default_threshold(len(members)), self._packing.numbers, self._most)
            try:
                group = Group(terms, {number + 1: self._keys[number] for number in members}, self._phase_s, now)
            except SecureSumError as error:
                self._alone.update(dict.fromkeys(members, str(error)))
                continue
            self._groups.append(group)
            self._group_of.update(dict.fromkeys(members, group))

    def advance(self, now: float) -> None:
        """Go on where answers are in or overdue."""
        for group in self._groups or ():
            group.advance(now)

    def gathered(self) -> Gathered:
        """The result, once all has ended."""
        gathered = Gathered(refused=dict(self._alone))
        for group in self._groups or ():
            members = sorted(number - 1 for number in group.survivors)
            if (found := self._sum_of(group, gathered, members)) is not None:
                gathered.sums.append((found, len(members)))
                gathered.counted += members
        gathered.counted.sort()
        return gathered

    def _sum_of(self, group: Group, gathered: Gathered, members: Collection[int]) -> PackedSum | None:
        names = [str(number) for number in members]
        if group.total is None:
            gathered.refused.update(dict.fromkeys((number - 1 for number in group.members), group.problem or ""))
            return None
        try:
            found = self._packing.unpack(group.total, len(members))
        except SecureSumError as error:
            gathered.refused.update(dict.fromkeys(members, str(error)))
            gathered.found |= {int(name) for name in self._suspects.refused(names)}
            return None
        gathered.found |= {int(name) for name in self._suspects.accepted(names)}
        return found

    def _size(self, ready: int) -> int:
        """Clients in a group at most; fewer while a poisoner is looked for."""
        if self._suspects.searching and ready >= 2 * FEWEST:
            return max(FEWEST, min(self._most, ready // 2))
        return self._most


def _dealt(clients: list[int], most: int) -> list[list[int]]:
    """Clients in groups of nearly the same size, with at most so many each."""
    groups = max(1, -(-len(clients) // most))
    if len(clients) // groups < FEWEST:
        groups = max(1, len(clients) // FEWEST)
    return [clients[at::groups] for at in range(groups)]
