"""Tickets: pieces of the global batches, each applied exactly once whoever computes it.

Ticket t is piece t % pieces of global batch t // pieces. Tickets are dealt in order; one whose holder is lost is dealt
again under the next attempt, and a push for an earlier attempt is refused.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Ticket(NamedTuple):
    """A piece of a global batch to be computed by one client.

    Attributes:
        attempt: 0, and one more for each time that it was dealt again.
        needs: global batches whose pieces the parameters must hold that it is computed with.
    """

    number: int
    batch: int
    piece: int
    attempt: int
    needs: int


class Tickets:
    """State machine that deals tickets.

    Args:
        pieces: tickets of a global batch.
        staleness: global batches by which a ticket may run ahead of the last one that is applied whole.
        at_once: tickets that one client may hold.

    Attributes:
        until: tickets of batches below it may be dealt.
    """

    def __init__(self, pieces: int, staleness: float, at_once: int) -> None:
        self._pieces, self._staleness, self._at_once = pieces, staleness, at_once
        self.until = 0
        self._next = 0  # number that was never dealt
        self._below = 0  # all tickets below it are applied
        self._applied: set[int] = set()  # the others that are
        self._again: list[int] = []  # heap of tickets to be dealt again
        self._attempts: dict[int, int] = {}
        self._holders: dict[int, str] = {}

    @property
    def batches(self) -> int:
        """Global batches that are applied whole, all before them included."""
        return self._below // self._pieces

    @property
    def at_boundary(self) -> bool:
        """True if every ticket that may be dealt is applied."""
        return self._below >= self.until * self._pieces

    @property
    def in_flight(self) -> Mapping[int, str]:
        """Tickets that are dealt and not applied, with their holders."""
        return self._holders

    def open(self, until: int) -> None:
        """Allow tickets of batches below `until`; a boundary that is further already stays."""
        self.until = max(self.until, until)

    def waits(self, client: str) -> str | None:
        """Reason why a client has to wait for a ticket, or None."""
        if self.at_boundary:
            return None
        if sum(holder == client for holder in self._holders.values()) >= self._at_once:
            return f"it holds {self._at_once} tickets already: push or give back one"
        number = self._again[0] if self._again else self._next
        if number >= self.until * self._pieces:
            return f"tickets {self._shown()} are not applied yet"
        if number // self._pieces - self.batches > self._staleness:
            return f"ticket {number} would run more than {self._staleness:g} global batches ahead of {self._shown()}"
        return None

    def deal(self, client: str) -> Ticket | None:
        """The next ticket; None at the boundary. Not where `waits` gives a reason."""
        if self.at_boundary:
            return None
        if self._again:
            number = heapq.heappop(self._again)
        else:
            number, self._next = self._next, self._next + 1
        self._holders[number] = client
        batch, piece = divmod(number, self._pieces)
        needs = 0 if math.isinf(self._staleness) else max(0, batch - int(self._staleness))
        return Ticket(number, batch, piece, self._attempts.get(number, 0), needs)

    def holds(self, client: str, number: int, attempt: int) -> bool:
        """True if the ticket is this client's, under this attempt."""
        return self._holders.get(number) == client and self._attempts.get(number, 0) == attempt

    def apply(self, number: int) -> None:
        """Note that a ticket in flight was applied."""
        del self._holders[number]
        self._attempts.pop(number, None)
        self._note(number)

    def take_in(self, number: int) -> bool:
        """Note that a ticket of another server was applied here; False where it was before.

        Whoever brings it first counts: servers that deal none do not know who holds it.
        """
        if number < self._below or number in self._applied:
            return False
        self._note(number)
        return True

    def _note(self, number: int) -> None:
        self._applied.add(number)
        while self._below in self._applied:
            self._applied.remove(self._below)
            self._below += 1

    def give_back(self, number: int) -> None:
        """Have a ticket in flight dealt again."""
        del self._holders[number]
        self._attempts[number] = self._attempts.get(number, 0) + 1
        heapq.heappush(self._again, number)

    def lose(self, client: str) -> list[int]:
        """Have all tickets of a client dealt again; returns which."""
        lost = sorted(number for number, holder in self._holders.items() if holder == client)
        for number in lost:
            self.give_back(number)
        return lost

    def go_on_at(self, batches: int) -> None:
        """Begin at a global batch, those before it applied; nothing is in flight."""
        self._below = self._next = batches * self._pieces
        self.until = max(self.until, batches)
        self._applied.clear()
        self._again.clear()

    def state(self) -> dict[str, Any]:
        """Everything here, as plain values."""
        return {
            "until": self.until,
            "next": self._next,
            "below": self._below,
            "applied": sorted(self._applied),
            "again": sorted(self._again),
            "attempts": dict(self._attempts),
            "holders": dict(self._holders),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.until, self._next, self._below = state["until"], state["next"], state["below"]
        self._applied, self._again = set(state["applied"]), list(state["again"])
        self._attempts, self._holders = dict(state["attempts"]), dict(state["holders"])

    def _shown(self) -> str:
        """Tickets that are waited for and who has them, the first few."""
        waited = [f"{number} ({self._holders[number]})" for number in sorted(self._holders)[:4]]
        return ", ".join(waited) or f"{self._below}"
