"""Sums over clients: every one of them gets the sum of what all gave. Nothing is kept, and nothing is replicated.

The tensors are added in the order of the clients' indices, so that the sum is the same in every run, and all get the
same bits. A sum belongs to a space, the newest of which counts: who waits in an older one is told.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from torch import Tensor

from paceline.errors import DeadlineError, ServerRefused

_MOST_MEMBERS = 2**16
_MOST_UNDER_WAY = 4096  # sums of one space


class Place(NamedTuple):
    """Name of a sum within its space: a step has one for each bucket."""

    number: int
    bucket: int


class Sums:
    """Sums under way. Threads of the callers do the work, and wait."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._space = ""
        self._order = -1
        self._under_way: dict[Place, _Sum] = {}

    def add(
        self, space: tuple[int, str], place: Place, index: int, members: int, tensor: Tensor, wait_s: float
    ) -> Tensor:
        """Give a tensor, and wait for the sum.

        Args:
            space: its number and its name; one of a higher number ends all before it.

        Raises:
            ServerRefused: the space is over, or the tensor does not fit those of the others.
            DeadlineError: some have given nothing in time; it names their indices. Ask again with the same tensor.
        """
        until = time.monotonic() + wait_s
        with self._turn:
            self._enter(space)
            if place not in self._under_way:
                if not 0 < members <= _MOST_MEMBERS or len(self._under_way) >= _MOST_UNDER_WAY:
                    raise ServerRefused(
                        f"a sum over {members} clients, beside {len(self._under_way)} others, is too much"
                    )
                self._under_way[place] = _Sum(members)
            held = self._under_way[place]
            held.take(index, members, tensor)
            if held.missing == []:
                self._turn.notify_all()
            while held.missing and self._under_way.get(place) is held:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(
                        f"no tensor from clients {held.missing[:8]} for sum {place.number}.{place.bucket}"
                    )
                self._turn.wait(left_s)
            if held.missing:
                raise ServerRefused(f"the sums of {space[1]!r} are over: {self._space!r} has begun")
            assert held.total is not None
            self._forget_before(place)
            return held.total

    def _enter(self, space: tuple[int, str]) -> None:
        order, name = space
        if order < self._order or (order == self._order and name != self._space):
            raise ServerRefused(f"the sums of {name!r} are over: {self._space!r} has begun")
        if order > self._order:
            self._order, self._space = order, name
            self._under_way.clear()
            self._turn.notify_all()

    def _forget_before(self, place: Place) -> None:
        """Drop sums of two steps ago: members of a step have those of the last."""
        for old in [p for p in self._under_way if p.number < place.number - 1]:
            del self._under_way[old]


class _Sum:
    """One sum: those that came are added as soon as all of lower index have."""

    def __init__(self, members: int) -> None:
        self.members, self.total = members, None
        self._next = 0  # index that is added next
        self._waiting: dict[int, Tensor] = {}

    total: Tensor | None

    @property
    def missing(self) -> list[int]:
        """Indices that have not come."""
        return [index for index in range(self._next, self.members) if index not in self._waiting]

    def take(self, index: int, members: int, tensor: Tensor) -> None:
        """Take the tensor of one client, whose memory is the sum's from here on. Once more is the same as once."""
        if members != self.members or not 0 <= index < members:
            raise ServerRefused(f"client {index} of {members} gave a tensor for a sum over {self.members} clients")
        if index < self._next or index in self._waiting:
            return
        first = self.total if self.total is not None else next(iter(self._waiting.values()), tensor)
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ServerRefused(
                f"client {index} gave {tuple(tensor.shape)} {tensor.dtype} for a sum of {tuple(first.shape)} "
                f"{first.dtype}"
            )
        self._waiting[index] = tensor
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self.total = ready if self.total is None else self.total.add_(ready)
            self._next += 1
