"""Changes of the replicas' shares of the batch within a run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

Shares = tuple[int, ...]
Place = tuple[int, int]  # epoch and step, both 0-based


class ShareChanges:
    """Shares of the full batches, in the order of the places from which they hold.

    Args:
        replicas, global_batch: the number of shares, and their sum.
    """

    def __init__(self, replicas: int, global_batch: int) -> None:
        self.replicas, self.global_batch = replicas, global_batch
        self._places: list[Place] = []
        self._shares: list[Shares] = []

    def at(self, place: Place) -> Shares | None:
        """Shares in force at a place; None where they are the partition's own."""
        found = bisect_right(self._places, place) - 1
        return self._shares[found] if found >= 0 else None

    @property
    def newest(self) -> Shares | None:
        """Shares that will hold from some place on; None where they are the partition's own."""
        return self._shares[-1] if self._shares else None

    def add(self, place: Place, shares: Sequence[int]) -> None:
        """Put shares in force from `place` on.

        What was to hold from there on is dropped, and so is what is over: all but the newest before that epoch.

        Raises:
            ValueError: they are no shares of a full batch, at least one sample each.
        """
        shares = tuple(shares)
        if not self.fits(shares) or min(shares) < 1:
            raise ValueError(f"{shares} are no shares of {self.global_batch} samples for {self.replicas} replicas")
        first = max(bisect_right(self._places, (place[0], 0)) - 1, 0)
        end = bisect_right(self._places, (place[0], place[1] - 1))
        self._places = [*self._places[first:end], place]
        self._shares = [*self._shares[first:end], shares]

    def fits(self, shares: Sequence[int]) -> bool:
        """True if there is one for each replica, and they sum to the global batch."""
        return len(shares) == self.replicas and sum(shares) == self.global_batch

    def state(self) -> list[Any]:
        """All changes that still matter, as JSON-able values."""
        return [[*place, list(shares)] for place, shares in zip(self._places, self._shares, strict=True)]

    def load(self, state: Sequence[Any]) -> None:
        """Take over saved changes, or none where they are for other replicas or another batch.

        Raises:
            ValueError: they are not what `state` gives.
        """
        self._places, self._shares = [], []
        for epoch, step, shares in state:
            if not all(type(number) is int and number >= 0 for number in (epoch, step, *shares)):
                raise ValueError(f"{[epoch, step, shares]!r:.200} is no change of shares")
            if self.fits(shares):
                self.add((epoch, step), shares)
