"""Objects that a serving process keeps for its clients, and answers to repeated calls."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import RemoteError

MOST_OBJECTS = 2**16
MOST_ANSWERS = 4096  # maximum number of answers kept in one lane


@dataclass(eq=False)
class HeldObject:
    """Object with its origin, and the number of references of each client."""

    what: Any
    recipe: str
    name: str | None
    holders: Counter[str] = field(default_factory=Counter)


class HeldObjects:
    """Objects by number. An object is deleted when no client has a reference to it any more."""

    def __init__(self) -> None:
        self._lock, self._naming = threading.Lock(), threading.Lock()
        self._objects: dict[str, HeldObject] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def make(self, client: str, recipe: str, name: str | None, make: Callable[[], Any]) -> str:
        """Make an object for a client, or reuse the existing object of the same name.

        Returns:
            Number of the object.

        Raises:
            RemoteError: an object of this name was made differently, or there are too many objects.
        """
        if name is None:
            return self._add(client, HeldObject(make(), recipe, None))
        with self._naming:  # two clients that request the same name share one object
            with self._lock:
                for number, held in self._objects.items():
                    if held.name == name:
                        if held.recipe != recipe:
                            raise RemoteError(
                                "remote.made_differently",
                                '"{name}" was created here as {here}, but is requested as {wanted}. Give one of '
                                "them another name.",
                                name=name,
                                here=held.recipe,
                                wanted=recipe,
                            )
                        held.holders[client] += 1
                        return number
            return self._add(client, HeldObject(make(), recipe, name))

    def attach(self, client: str, number: str) -> None:
        """Give a client a reference to an object that another client made.

        Raises:
            RemoteError: the object was deleted.
        """
        with self._lock:
            if number not in self._objects:
                raise RemoteError(
                    "remote.object_ended",
                    "object {object} no longer exists: its last client released it, or has ended",
                    object=number,
                )
            self._objects[number].holders[client] += 1

    def get(self, client: str, number: str) -> Any:
        """Return an object to a client that has a reference to it.

        Raises:
            RemoteError: the client has no reference to the object.
        """
        with self._lock:
            held = self._objects.get(number)
            if held is None or client not in held.holders:
                raise RemoteError(
                    "remote.object_not_held",
                    "this client does not hold object {object}: the object was released, or the client was "
                    "disconnected for longer than the grace time",
                    object=number,
                )
            return held.what

    def release(self, client: str, numbers: list[str]) -> None:
        """Remove one reference of a client to each of these objects."""
        with self._lock:
            for number in numbers:
                if number in self._objects:
                    self._drop(client, number, 1)

    def leave(self, client: str) -> None:
        """Remove all references of a client."""
        with self._lock:
            for number, held in list(self._objects.items()):
                self._drop(client, number, held.holders[client])

    def all(self) -> list[Any]:
        """Return all objects."""
        with self._lock:
            return [held.what for held in self._objects.values()]

    def _add(self, client: str, held: HeldObject) -> str:
        held.holders[client] += 1
        with self._lock:
            if len(self._objects) >= MOST_OBJECTS:
                raise RemoteError(
                    "remote.too_many_objects",
                    "this service already holds {limit:,} objects. Release some.",
                    limit=MOST_OBJECTS,
                )
            number = secrets.token_hex(8)
            self._objects[number] = held
            return number

    def _drop(self, client: str, number: str, count: int) -> None:
        holders = self._objects[number].holders
        holders[client] -= count
        if holders[client] <= 0:
            del holders[client]
        if not holders:
            del self._objects[number]


class Answers:
    """Answers to the calls of one lane, so that a repeated call runs only once.

    A client numbers the calls of a lane. After a lost connection, the client repeats the unanswered calls in order. The
    service runs the calls of a lane one at a time, so only one thread at a time uses this object.
    """

    def __init__(self) -> None:
        self._next = 0
        self._kept: dict[int, tuple[Any, BaseException | None]] = {}

    def once(self, number: int, floor: int, work: Callable[[], Any]) -> Any:
        """Return the result of call `number`; run `work` if the call has not run yet.

        Args:
            floor: lowest number of a call whose answer the client may still need.

        Raises:
            RemoteError: the client has cancelled this call, or too many answers are unacknowledged.
        """
        for known in [known for known in self._kept if known < floor]:
            del self._kept[known]
        if number not in self._kept:
            if number < self._next or len(self._kept) >= MOST_ANSWERS:
                raise RemoteError(
                    "remote.call_out_of_order",
                    "call {number} arrived, but call {next} was expected. It was not executed.",
                    number=number,
                    next=self._next,
                )
            self._next = number + 1
            try:
                self._kept[number] = work(), None
            except BaseException as raised:  # noqa: BLE001 - a repeated call gets it, too
                self._kept[number] = None, raised
        result, error = self._kept[number]
        if error is not None:
            raise error
        return result
