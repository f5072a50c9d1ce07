"""What a serving process keeps for its clients.

Objects, each as long as a client holds it; the connected clients; and answers to calls that may be repeated.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import RemoteError
from paceline_server.service import Caller

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


class Leases:
    """Forgets clients that have been away for longer than the grace time.

    Args:
        forget: called with a client's identity, once.
    """

    def __init__(self, grace_s: float, forget: Callable[[str], object]) -> None:
        self._grace_s, self._on_forget = grace_s, forget
        self._changed = threading.Condition()
        self._here: dict[str, set[Caller]] = {}  # connections, by client
        self._away: dict[str, float] = {}  # until when, by client
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="paceline-leases", daemon=True)
        self._thread.start()

    def came(self, caller: Caller) -> bool:
        """Note a connection of a client; True if the client was here before.

        One that was forgotten was not.
        """
        with self._changed:
            known = caller.identity in self._here
            self._here.setdefault(caller.identity, set()).add(caller)
            self._away.pop(caller.identity, None)
            return known

    def left(self, caller: Caller) -> None:
        """Note that a connection has ended."""
        with self._changed:
            connections = self._here.get(caller.identity)
            if connections is None or caller not in connections:  # forgotten, as it wished
                return
            connections.remove(caller)
            if not connections:
                self._away[caller.identity] = time.monotonic() + self._grace_s
                self._changed.notify_all()

    def forget(self, client: str) -> None:
        """Forget a client now."""
        with self._changed:
            self._away.pop(client, None)
            known = self._here.pop(client, None) is not None
        if known:
            self._on_forget(client)

    def close(self) -> None:
        """Stop; nobody is forgotten any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                over = [client for client, until in self._away.items() if until <= now]
                if not over:
                    self._changed.wait(min(self._away.values()) - now if self._away else None)
                    continue
                for client in over:
                    del self._away[client], self._here[client]
            for client in over:
                self._on_forget(client)


MOST_AHEAD = 4096  # calls of one lane that wait or whose answers are kept


class Lane:
    """Calls of one client on one object: each runs once, after the one before it.

    They are numbered from 0. A client whose connection was lost repeats what it has no answer to; a call that has run
    gives the same answer.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next = 0
        self._answers: dict[int, Future[Any]] = {}
        self._skipped: set[int] = set()
        self._ended = False

    def run(self, number: int, floor: int, work: Callable[[], Any]) -> Any:
        """The result of call `number`, by `work` if it has not run.

        Args:
            floor: the client has the answers to all calls below.

        Raises:
            RemoteError: the number is none that a client would send, or the client has gone.
        """
        with self._turn:
            for known in [known for known in self._answers if known < floor]:
                del self._answers[known]
            answer = self._answers.get(number)
            if answer is None:
                if not self._next <= number < self._next + MOST_AHEAD or len(self._answers) >= MOST_AHEAD:
                    raise RemoteError(f"call {number} came where call {self._next} was next; it was not run")
                mine = self._answers[number] = Future()
        if answer is not None:
            return answer.result()
        self._await_turn(number, mine)
        try:
            mine.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever repeats the call gets it, too
            mine.set_exception(error)
        with self._turn:
            self._advance()
        return mine.result()

    def skip(self, numbers: list[int]) -> None:
        """Wait for these calls no more: their client has given them up."""
        with self._turn:
            self._skipped |= {n for n in numbers if self._next <= n < self._next + MOST_AHEAD}
            if self._next in self._skipped and self._next not in self._answers:
                self._next -= 1
                self._advance()

    def end(self) -> None:
        """Let nothing run any more: the client has gone."""
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def _await_turn(self, number: int, mine: Future[Any]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._ended or self._next == number)
            if self._ended:
                error = RemoteError("the client of this call has gone; it was not run")
                mine.set_exception(error)
                raise error

    def _advance(self) -> None:
        """Let the next call run; those that were given up before they came are none."""
        self._next += 1
        while self._next in self._skipped and self._next not in self._answers:
            self._next += 1
        self._skipped = {number for number in self._skipped if number >= self._next}
        self._turn.notify_all()
