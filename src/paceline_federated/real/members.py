"""The clients of a federation: who has which number, and when each was last heard."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.errors import FederateError

MOST_SAMPLES = 2**40
_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
_IDENTITY = re.compile(r"[A-Za-z0-9_-]{8,128}")


@dataclass
class Member:
    """One client.

    Attributes:
        number: from 0, its own for the whole run.
        identity: random, made by the client once; who has it is this client.
        counted, late, refused, missed: rounds that ended so for it.
        counted_round: the newest round in which its update counted; 0 before any.
        bytes_to, bytes_from: of tasks and answers, tensors and shares, without what the connection adds.
        heard: seconds on the clock of the rounds; negative before it was heard in this process.
    """

    number: int
    identity: str
    name: str
    samples: int
    counted: int = 0
    counted_round: int = 0
    late: int = 0
    refused: int = 0
    missed: int = 0
    bytes_to: int = 0
    bytes_from: int = 0
    heard: float = field(default=-1.0, compare=False)


class Members:
    """All clients that ever joined.

    Args:
        places: clients that the job has.
        first: number of the first place.
    """

    def __init__(self, places: int, first: int = 0) -> None:
        self.places, self.first = places, first
        self._by_identity: dict[str, Member] = {}
        self._by_number: dict[int, Member] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def __getitem__(self, number: int) -> Member:
        return self._by_number[number]

    def all(self) -> list[Member]:
        """All of them, by number."""
        return [self._by_number[number] for number in sorted(self._by_number)]

    def known(self, identity: str) -> Member | None:
        """The client of an identity; None where it has not joined."""
        return self._by_identity.get(identity)

    def join(self, identity: str, name: str, samples: int, wanted: int | None, now: float) -> Member:
        """Take a client in, or find it again under its identity.

        Raises:
            FederateError: no place is left, the number is another's, it has no samples, or is called what no name is.
        """
        if not _IDENTITY.fullmatch(identity) or not _NAME.fullmatch(name):
            raise FederateError(
                "a client has a name of up to 64 letters, digits and . _ : @ -, and an identity of its own"
            )
        if not 0 < samples < MOST_SAMPLES:
            raise FederateError(f"client {name} has {samples} samples; without any it cannot take part")
        member = self._by_identity.get(identity)
        if member is None:
            member = self._new(identity, name, samples, wanted)
        elif wanted not in (None, member.number):
            raise FederateError(f"client {name} is number {member.number} already, and cannot become {wanted}")
        member.name, member.samples, member.heard = name, samples, now
        return member

    def heard_since(self, since: float) -> list[int]:
        """Numbers of the clients that were heard at this time or later."""
        return [number for number, member in sorted(self._by_number.items()) if member.heard >= max(0.0, since)]

    def state(self) -> list[dict[str, Any]]:
        """All members as plain values."""
        return [asdict(member) for member in self.all()]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take the members of `state` back. None of them was heard yet.

        Raises:
            FederateError: it is no such state.
        """
        try:
            members = [Member(**{**each, "heard": -1.0}) for each in state]
        except TypeError as error:
            raise FederateError(f"the members of this run cannot be read: {error}") from None
        self._by_number = {member.number: member for member in members}
        self._by_identity = {member.identity: member for member in members}

    @property
    def _numbers(self) -> range:
        return range(self.first, self.first + self.places)

    def _new(self, identity: str, name: str, samples: int, wanted: int | None) -> Member:
        if wanted is None:
            wanted = next((number for number in self._numbers if number not in self._by_number), -1)
        if wanted not in self._numbers:
            raise FederateError(
                f"client {name} finds no place: there are {self.places} (federate.clients), numbered from {self.first}"
            )
        if wanted in self._by_number:
            raise FederateError(
                f"number {wanted} is {self._by_number[wanted].name}'s. A client that returns needs the folder "
                "in which it kept its identity (--state)."
            )
        member = Member(wanted, identity, name, samples)
        self._by_identity[identity] = self._by_number[wanted] = member
        return member
