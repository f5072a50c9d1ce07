"""Objects that a serving process keeps for clients, each as long as somebody holds it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import RemoteError

MOST_OBJECTS = 2**16


@dataclass(eq=False)
class HeldObject:
    """An object, what it was made from, and the leases on it: client by lease."""

    what: Any
    recipe: str
    name: str | None
    leases: dict[str, str] = field(default_factory=dict)


class HeldObjects:
    """Objects by number, which end when their last lease does."""

    def __init__(self) -> None:
        self._lock, self._naming = threading.RLock(), threading.Lock()
        self._objects: dict[str, HeldObject] = {}
        self._leased: dict[str, str] = {}  # object by lease

    def __len__(self) -> int:
        return len(self._objects)

    def make(self, client: str, recipe: str, name: str | None, make: Callable[[], Any]) -> tuple[str, str]:
        """Number and lease of a new object, or of the one of that name.

        Raises:
            RemoteError: another object has that name, or there are too many.
        """
        if name is None:
            return self._add(client, HeldObject(make(), recipe, None))
        with self._naming:  # two clients that ask for one name make one object
            with self._lock:
                found = next((number for number, held in self._objects.items() if held.name == name), None)
                if found is not None and (other := self._objects[found].recipe) != recipe:
                    raise RemoteError(
                        f'"{name}" was made here as {other}, and is asked for as {recipe}: give one of them another '
                        "name"
                    )
                if found is not None:
                    return found, self._lease(client, found)
            return self._add(client, HeldObject(make(), recipe, name))

    def attach(self, client: str, number: str) -> str:
        """A lease on an object that another client made.

        Raises:
            RemoteError: it has ended.
        """
        with self._lock:
            if number not in self._objects:
                raise RemoteError(f"object {number} has ended: its last holder released it, or died")
            return self._lease(client, number)

    def get(self, client: str, number: str) -> Any:
        """The object, for a client that holds it.

        Raises:
            RemoteError: the client does not.
        """
        with self._lock:
            held = self._objects.get(number)
            if held is None or client not in held.leases.values():
                raise RemoteError(
                    f"object {number} is not held by this client: it was released, or its lease ended while the "
                    "client could not be reached"
                )
            return held.what

    def release(self, client: str, leases: list[str]) -> None:
        """End leases of a client; unknown ones are passed over."""
        with self._lock:
            for lease in leases:
                number = self._leased.get(lease)
                if number is not None and self._objects[number].leases.get(lease) == client:
                    self._end(lease, number)

    def leave(self, client: str) -> None:
        """End all leases of a client."""
        with self._lock:
            held = [lease for each in self._objects.values() for lease, holder in each.leases.items()]
            self.release(client, held)

    def all(self) -> list[Any]:
        """Every object."""
        with self._lock:
            return [held.what for held in self._objects.values()]

    def _add(self, client: str, held: HeldObject) -> tuple[str, str]:
        with self._lock:
            if len(self._objects) >= MOST_OBJECTS:
                raise RemoteError(f"{MOST_OBJECTS:,} objects are held here; release some")
            number = secrets.token_hex(8)
            self._objects[number] = held
            return number, self._lease(client, number)

    def _lease(self, client: str, number: str) -> str:
        lease = secrets.token_hex(8)
        self._objects[number].leases[lease] = client
        self._leased[lease] = number
        return lease

    def _end(self, lease: str, number: str) -> None:
        del self._leased[lease]
        del self._objects[number].leases[lease]
        if not self._objects[number].leases:
            del self._objects[number]
