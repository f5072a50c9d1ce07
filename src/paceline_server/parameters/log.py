"""The replicated log of a server: ordered operations at the primary and its backup.

All state comes from the log. A gradient, its ticket, the record of its piece and the answer
to the client are one operation; the machine's state (`machine.py`) is the result of all operations so far.

Invariants:

- *Order.* Only the primary accepts operations. It accepts one operation at a time and numbers it. The backup applies
the same operations under the same numbers, and refuses all other operations.
- *Exactly once.* A client repeats an operation under the same number until a primary answers. The machine applies the
operation once.
- *No answered operation is lost.* The primary answers an operation, and shows its effect to readers, only after the
backup has received the operation. Therefore a backup that takes over knows every operation that a client has seen.
- *One primary.* The view names the primary and the backup. Only the next generation replaces a view, by
compare-and-set.
  A backup that cannot reach its primary, and a primary that cannot reach its backup, both try to begin the next
  generation, and one of them succeeds. The other process is deposed: it does not answer clients, and the backup refuses
  its operations.
- *Resumption.* A new backup receives the state at one position of the log and then every later operation. It counts
as a backup once it has received all of these operations. A checkpoint holds the parameters at a boundary, when no
operation is in progress.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.errors import ChannelError, DeadlineError, RemoteError, ServerRefused
from paceline.wire.key import RunKey
from paceline.wire.store import StoreClient
from paceline_server.client import Client, Pending, place_of
from paceline_server.parameters.machine import (
    SLOWEST_BYTES_PER_S,
    Machine,
    Operation,
    Reply,
    nbytes,
    plain,
    read_action,
)
from paceline_server.service import Caller

# delay of the answer to `beat`, and its deadline at the backup
_BEAT_S, _BEAT_DEADLINE_S = 0.25, 0.7
_LOOK_S = 0.5  # interval at which a primary checks its view and its backup
_PAUSE_S = 0.05  # interval between attempts to become a backup
_ANSWER_S = 0.8  # time in which the backup must apply an operation; after that, the backup counts as lost
_STATE_S = 600.0  # time in which the backup must load the whole state
Address = tuple[str, int] | Path


class Elsewhere(Exception):
    """Raised if this process is not the primary."""


class Mark(NamedTuple):
    """Position in the log, which must be confirmed before a read returns."""

    applied: int
    backup: Backup | None


class Log:
    """Ordered operations, applied to a machine by the primary or its backup.

    Args:
        new_machine: function that makes an empty machine.
        on_lead: function that is called, with the lock held, when this process becomes the primary.

    Attributes:
        turn: lock of this object and of the machine, notified on every change.
        machine: the state machine.
        index: number of applied operations.
        view: the newest view that this process knows.
        primary: True if this process serves clients.
    """

    def __init__(
        self,
        new_machine: Callable[[], Machine],
        views: Views,
        key: RunKey | None,
        name: str,
        on_lead: Callable[[], object],
    ) -> None:
        self.turn = threading.Condition()
        self.machine = new_machine()
        self.index = 0
        self.view: View | None = None
        self.primary = False
        self._new_machine, self._views, self._key = new_machine, views, key
        self._name, self._on_lead = name, on_lead
        self._own = ""  # address of this process
        self._closing = False
        self._deposed = threading.Event()  # set while this process is not the primary
        self._deposed.set()
        self._installed: int | None = None  # generation in which this process is the backup
        self._backup: Backup | None = None
        self._thread = threading.Thread(target=self._follow_views, name=f"{name}: views", daemon=True)

    @property
    def generation(self) -> int:
        """Number of the current view; 0 before the first view."""
        return self.view.generation if self.view else 0

    @property
    def has_backup(self) -> bool:
        """True while another process also has every answered operation."""
        backup = self._backup
        return backup is not None and backup.counts and not backup.lost

    @property
    def is_copied(self) -> bool:
        """True if answers wait for a backup."""
        return self._backup is not None

    def start(self, address: str) -> None:
        """Take the role of primary or backup, and follow the views until `close`."""
        self._own = address
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        with self.turn:
            self._closing = True
            self._step_down()
        if self._backup:
            self._backup.close()
        self._thread.join()

    def must_be_primary(self) -> None:
        """Raise Elsewhere if this process does not serve clients."""
        if not self.primary:
            raise Elsewhere

    def verify(self) -> None:
        """Verify that this is still the primary.

        Raises Elsewhere if another process is the primary, or ChannelError if the primary is unknown.
        """
        view = self._views.read()
        with self.turn:
            if self.primary and view is not None and view.generation > self.generation:
                self._backup, self._installed = None, None
                self._step_down()
            self.must_be_primary()

    def commit(self, operation: Operation) -> Reply:
        """Append an operation to the log, and apply the operation. The caller holds `turn`."""
        self.index += 1
        if self._backup:
            self._backup.post(self.index, operation)
        reply = self.machine.apply(operation)
        self.turn.notify_all()
        return reply

    def mark(self) -> Mark:
        """Return the current position in the log. The caller holds `turn`."""
        return Mark(self.index, self._backup if self._backup and self._backup.counts else None)

    def confirm(self, mark: Mark) -> None:
        """Wait until the backup has every operation up to a mark. A failed backup is removed."""
        if mark.backup is not None:
            try:
                mark.backup.wait(mark.applied)
            except (ChannelError, RemoteError):
                self._go_on_without(mark.backup)

    # Functions for the other process of this server

    def attend(self, caller: Caller, address: str) -> int:
        """Accept a process as the backup, and return the generation.

        The backup first receives the state, and then every later operation.
        """
        with self.turn:
            self.must_be_primary()
            if self._backup and not self._backup.lost:
                raise ServerRefused(
                    "server.backup_exists",
                    "{name} already has a backup, at {address}",
                    name=self._name,
                    address=self._backup.address,
                )
            assert self.view is not None
            backup = Backup(address, self._key, self.view.generation + 1, self._name)
            backup.install(self.index, self.machine.state())
            self._backup, index = backup, self.index
        try:
            backup.wait(index)
            with self.turn:  # from here on, answers wait for the backup
                backup.counts, index = True, self.index
            backup.wait(index)
            with self.turn:
                self.must_be_primary()
                together = View(backup.generation, self._own, address)
                if backup.lost or not self._views.replace(self.view, together):
                    raise ChannelError(
                        "server.not_the_backup",
                        "{address} is not the backup of generation {generation}",
                        address=address,
                        generation=backup.generation,
                    )
                self.view = together
                return backup.generation
        except (ChannelError, RemoteError) as error:
            backup.close()
            with self.turn:
                if self._backup is backup:
                    self._backup = None
            raise ServerRefused("server.backup_failed", "{error}", error=error) from None

    def beat(self, caller: Caller, generation: int) -> bool:
        """Return True if this is the primary of a generation, after a delay.

        The caller waits for the answer, and therefore notices immediately if this process ends.
        """
        self._deposed.wait(_BEAT_S)  # does not take the lock, which is held during a large push
        return self.primary and self.generation == generation

    def install(self, caller: Caller, generation: int, index: int, state: dict[str, Any]) -> None:
        """Load the state of the primary."""
        with self.turn:
            if self.primary or (self.view and generation <= self.view.generation):
                raise ServerRefused(
                    "server.old_generation",
                    "{caller} sent the state of generation {generation}, which has ended",
                    caller=caller.name,
                    generation=generation,
                )
            self.machine = self._new_machine()
            self.machine.load(state)
            self.index, self._installed = index, generation

    def repeat(self, caller: Caller, generation: int, index: int, entry: Any) -> None:
        """Apply an operation that the primary sent."""
        with self.turn:
            if self.primary or generation != self._installed or index != self.index + 1:
                raise ServerRefused(
                    "server.deposed",
                    "{caller} sent operation {index} of generation {generation}, but is no longer the primary",
                    caller=caller.name,
                    index=index,
                    generation=generation,
                )
            name, identity, sequence, values = entry
            self.machine.apply(Operation(name, identity, sequence, read_action(values)))
            self.index += 1

    def alive(self, caller: Caller, generation: int) -> bool:
        """True if this process is the backup in a generation."""
        return self._installed == generation and not self.primary

    # Roles

    def _follow_views(self) -> None:
        while not self._closing:
            # on failure, the primary or the store is still starting
            with suppress(ChannelError, RemoteError, ServerRefused, Elsewhere):
                if self.primary:
                    self._look_around()
                else:
                    self._take_a_role()
            with self.turn:
                self.turn.wait_for(lambda: self._closing, _LOOK_S if self.primary else _PAUSE_S)

    def _look_around(self) -> None:
        """Check regularly, even without calls, if this process is deposed or has no backup."""
        self.verify()
        backup = self._backup
        if backup is not None and backup.counts and not backup.answers():
            self._go_on_without(backup)

    def _take_a_role(self) -> None:
        view = self._views.read()
        if view is None or not view.primary:
            with self.turn:
                self._lead(view, View(1 if view is None else view.generation + 1, self._own))
        else:
            self._be_backup(view)

    def _lead(self, before: View | None, after: View) -> None:
        if self._views.replace(before, after):
            self.view, self.primary, self._installed = after, True, None
            self._deposed.clear()
            self._on_lead()
            self.turn.notify_all()

    def _step_down(self) -> None:
        self.primary = False
        self._deposed.set()
        self.turn.notify_all()

    def _be_backup(self, view: View) -> None:
        """Act as the backup until either process is lost; then become primary."""
        with self.turn:
            self.view = view
        with suppress(ChannelError, RemoteError, ServerRefused):
            self._attend(place_of(view.primary))
        newest = self._views.read()
        with self.turn:
            # the primary may be lost after the view names this process as the backup, but before the primary says so
            ours = newest is not None and newest.backup == self._own and newest.generation == self._installed
            if newest is not None and ours and not self._closing:
                self._lead(newest, View(newest.generation + 1, self._own))
            else:
                self._installed = None

    def _attend(self, address: Address) -> None:
        """Act as the backup of a primary until one of the two is lost.

        Raises an error if the primary accepts no backup, or is lost.
        """
        with Client(address, self._key, name=self._name, deadline_s=_BEAT_DEADLINE_S) as primary:
            status, generation = primary.call("attend", self._own, deadline_s=2 * _STATE_S)
            if status != "ok":
                code, text = generation
                raise ServerRefused.of_json({"code": code, "text": text})
            while not self._closing and primary.call("beat", generation) == ["ok", True]:
                pass

    def _go_on_without(self, backup: Backup) -> None:
        """Begin a generation without the backup. If this fails, this process is deposed."""
        backup.close()
        with self.turn:
            if self._backup is not backup:
                self.must_be_primary()
                return  # another thread has already done so
            assert self.view is not None
            alone = View(self.view.generation + 1, self._own)
            try:
                ours = self._views.replace(self.view, alone)
            except ChannelError as error:
                raise DeadlineError(
                    "server.primary_unknown",
                    "{name} lost its backup, and the store cannot confirm that {name} is still the primary: {error}",
                    name=self._name,
                    error=error,
                ) from None
            self._backup = None
            if not ours:
                self._installed = None
                self._step_down()
                raise Elsewhere
            self.view = alone


class Backup:
    """Backup, as its primary sees it.

    Attributes:
        address: address of the backup, as in a view.
        generation: generation in which the process is the backup, and accepts operations.
        counts: True once the backup has the state; answers to clients then wait for the backup.
        lost: True if the backup has failed, and is no longer used.
    """

    def __init__(self, address: str, key: RunKey | None, generation: int, name: str) -> None:
        self.address, self.generation = address, generation
        self.counts = self.lost = False
        self._client = Client(place_of(address), key, name=name, deadline_s=_ANSWER_S)
        self._sent: deque[tuple[int, Pending]] = deque()
        self._confirmed = -1
        self._collecting = threading.Lock()  # one thread receives all answers, in order

    def install(self, index: int, state: dict[str, Any]) -> None:
        """Send the whole state and the number of its operations. Raises ChannelError."""
        self._sent.append((index, self._client.begin("install", self.generation, index, state, deadline_s=_STATE_S)))

    def post(self, index: int, operation: Operation) -> None:
        """Send an operation. `wait` reports a failure."""
        entry = [*operation[:3], plain(operation.action)]
        deadline_s = (_ANSWER_S if self.counts else _STATE_S) + nbytes(entry) / SLOWEST_BYTES_PER_S
        try:
            pending = self._client.begin("repeat", self.generation, index, entry, deadline_s=deadline_s)
        except (ChannelError, RemoteError):
            self.lost = True
        else:
            self._sent.append((index, pending))

    def wait(self, index: int) -> None:
        """Wait until the backup has applied the operation.

        Raises ChannelError if the operation was not applied, or may not have been applied.
        """
        with self._collecting:
            while self._confirmed < index:
                if self.lost:
                    raise ChannelError("server.backup_lost", "the backup at {address} is lost", address=self.address)
                at, pending = self._sent[0]
                if pending.result()[0] != "ok":
                    raise ChannelError(
                        "server.backup_full",
                        "the backup at {address} does not accept further operations",
                        address=self.address,
                    )
                self._confirmed = at
                self._sent.popleft()

    def answers(self) -> bool:
        """Return True if the process answers, and is still the backup."""
        try:
            return not self.lost and self._client.call("alive", self.generation) == ["ok", True]
        except (ChannelError, RemoteError):
            return False

    def close(self) -> None:
        """Close the connection to the backup."""
        self.lost = True
        self._client.close()


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Generation of a server. Addresses are text: `host:port`, or the path of a socket."""

    generation: int
    primary: str
    backup: str | None = None

    def addresses(self) -> list[str]:
        """Return the addresses of this generation, with the primary's address first."""
        return [address for address in (self.primary, self.backup) if address]


class Views:
    """View of one server, in the run's store or, without a store, in memory."""

    def __init__(self, store: StoreClient | None = None, name: str = "", deadline_s: float = 5.0) -> None:
        self._store, self._key, self._deadline_s = store, f"parameter server/{name}", deadline_s
        self._own: View | None = None

    def read(self) -> View | None:
        """Return the newest view; None before the first view. Raises ChannelError."""
        if self._store is None:
            return self._own
        # A value that is never stored. With this expected value, the store changes nothing and returns the current
        # value.
        present = self._store.compare_set(self._key, _NOBODYS, _NOBODYS, self._deadline_s)
        if present in (b"", _NOBODYS):
            return None
        try:
            return msgspec.json.decode(present, type=View)
        except msgspec.MsgspecError as error:
            raise ChannelError(
                "server.no_view", "the store contains no view of a parameter server: {error}", error=error
            ) from None

    def replace(self, old: View | None, new: View) -> bool:
        """Replace the view `old`; return False if the stored view differs. Raises ChannelError."""
        if self._store is None:
            still_is = self._own == old
            self._own = new if still_is else self._own
            return still_is
        before, after = (b"" if view is None else msgspec.json.encode(view) for view in (old, new))
        return self._store.compare_set(self._key, before, after, self._deadline_s) == after


_NOBODYS = b"-"


def wait_for(turn: threading.Condition, attempt: Callable[[], Any], until: float) -> Any:
    """Repeat an attempt after each change until there is no reason to wait.

    Raises:
        DeadlineError: at the deadline, there is still a reason to wait.
    """
    while isinstance(result := attempt(), str):
        if (left_s := until - time.monotonic()) <= 0:
            raise DeadlineError("server.waited", "{reason}", reason=result)
        turn.wait(left_s)
    return result
