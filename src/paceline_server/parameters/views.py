"""Views of a server: its primary and its backup, in numbered generations.

The view is one value that is only ever replaced by the next one, by compare-and-set, so at any time at most one process
believes rightly that it is the primary: a backup that cannot reach its primary, and a primary that cannot reach its
backup, both ask for the next generation, and one of them gets it. The other one is deposed, and refuses everything.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import msgspec

from paceline.errors import ChannelError

Address = tuple[str, int] | Path


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A generation of a server. Addresses as text: `host:port`, or the path of a socket."""

    generation: int
    primary: str
    backup: str | None = None

    def addresses(self) -> list[str]:
        """The addresses of this generation, the primary's first."""
        return [address for address in (self.primary, self.backup) if address]


class Views(Protocol):
    """Keeper of the view."""

    def read(self) -> View | None:
        """The newest view; None before the first."""

    def replace(self, old: View | None, new: View) -> bool:
        """Replace the view, if it still is `old`; returns whether it was."""


class Store(Protocol):
    """The calls that `StoreViews` needs of a `StoreClient`."""

    def compare_set(self, key: str, expected: bytes, desired: bytes, deadline_s: float | None = None) -> bytes:
        """Set a value where it is the expected one; returns the value that is there."""


class StoreViews:
    """The view of one server under a key of the run's store."""

    def __init__(self, store: Store, name: str, deadline_s: float = 5.0) -> None:
        self._store, self._key, self._deadline_s = store, f"parameter server/{name}", deadline_s

    def read(self) -> View | None:
        """The newest view; None before the first. Raises ChannelError."""
        # A value that nobody sets: with it as the expected one, nothing changes and the present one is returned.
        present = self._store.compare_set(self._key, _NOBODYS, _NOBODYS, self._deadline_s)
        return None if present in (b"", _NOBODYS) else _read(present)

    def replace(self, old: View | None, new: View) -> bool:
        """Replace the view, if it still is `old`. Raises ChannelError."""
        before, after = (b"" if view is None else msgspec.json.encode(view) for view in (old, new))
        return self._store.compare_set(self._key, before, after, self._deadline_s) == after


class OwnViews:
    """View of a server that is kept in one process, without a store."""

    def __init__(self) -> None:
        self._lock, self._view = threading.Lock(), None

    _view: View | None

    def read(self) -> View | None:
        """The view."""
        return self._view

    def replace(self, old: View | None, new: View) -> bool:
        """Replace the view, if it still is `old`."""
        with self._lock:
            if self._view != old:
                return False
            self._view = new
            return True


def as_text(address: Address) -> str:
    """An address as a view has it."""
    return str(address) if isinstance(address, Path) else f"{address[0]}:{address[1]}"


def as_address(text: str) -> Address:
    """The address that `as_text` wrote."""
    host, colon, port = text.rpartition(":")
    return (host, int(port)) if colon and not text.startswith("/") else Path(text)


_NOBODYS = b"-"


def _read(value: bytes) -> View:
    try:
        return msgspec.json.decode(value, type=View)
    except msgspec.MsgspecError as error:
        raise ChannelError(f"the store holds no view of a parameter server: {error}") from None
