"""Clients that are here, and those that have some seconds to come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline_server.service import Caller


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
