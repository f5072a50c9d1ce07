"""State machine of one parameter server, without sockets, threads and clocks.

The state is the only record of applied operations. It consists of parameters and optimizers, members, tickets, each
client's last answer, and the records of applied pieces. Only operations change the state, so the same operations in the
same order give the same state. The log (`log.py`) sends these operations to the backup.

Invariants, which also hold if messages are repeated, reordered or lost, or processes die:

- An operation is applied once. A client numbers its operations and sends one at a time. A repetition of
the last number returns the same answer; a smaller number is refused.
- A ticket counts once, even if several clients compute it. Each attempt of a ticket belongs to one holder. If the
holder is lost, the ticket is dealt again under the next attempt, and a push for an earlier attempt is dropped.
- The operation that applies a piece's gradient also stores the piece's record, so each counted ticket has one record.
- A refused operation changes nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from paceline.errors import ServerRefused
from paceline_server.parameters.parameters import Gradient, Parameters, Rows, must_fit, negated, once_each
from paceline_server.parameters.settings import ServerSettings, slices_of

_TICKETS_AT_ONCE = 4  # maximum number of tickets that one client may hold
_MOST_KEPT = 2**14  # maximum number of records kept for clients that have left
SLOWEST_BYTES_PER_S = 10e6  # slowest transfer rate of a link that does not count as lost


class Machine:
    """Parameters, members and tickets of one server.

    Call the methods in this order: `must_fit` (tensors are valid), `known` (already applied), `check` (allowed),
    `waits` (must wait), `apply`. Only `must_fit` reads no mutable state, so any thread may call it.

    Args:
        part: index of this server. The first server deals the tickets, and keeps the records.

    Attributes:
        records: records of applied pieces, each with its number in order of application, its ticket and the client's
            values.
    """

    def __init__(self, settings: ServerSettings, servers: int = 1, part: int = 0) -> None:
        self.settings = settings
        self.parameters = Parameters(settings, slices_of(settings, servers)[part])
        self.clients = Clients(settings.most_members)
        self.tickets = Tickets(settings.pieces, settings.staleness) if settings.pieces else None
        self.records: list[tuple[int, int, list[Any]]] = []
        self._deals, self._recorded = part == 0, 0

    def must_fit(self, operation: Operation) -> None:
        """Refuse tensors with wrong names, shapes, dtypes or values. Raises ServerRefused with a remedy."""
        match operation.action:
            case Initialize(tensors):
                must_fit(tensors, self.parameters.specs, operation.name)
                if missing := self.parameters.specs.keys() - tensors.keys():
                    raise ServerRefused(
                        "server.initialize_incomplete",
                        "{operation} does not contain the initial values of {missing}",
                        operation=operation.name,
                        missing=list(sorted(missing)[:8]),
                    )
            case Push() as push:
                if push.ticket is not None and not push.dense and not push.rows:
                    return  # the piece has no samples, or was skipped
                must_fit(push.gradients(), self.parameters.specs, operation.name)
                if push.dense.keys() & push.rows.keys():
                    raise ServerRefused(
                        "server.pushed_twice",
                        "{operation} pushed a tensor both as a whole and by rows. Push each tensor in one form.",
                        operation=operation.name,
                    )

    def known(self, operation: Operation) -> Reply | None:
        """Return the answer to an operation that was already applied, or None.

        Raises:
            ServerRefused: the operation is older than the client's last one, so no client waits for an answer.
        """
        return self.clients.answered(operation.identity, operation.sequence)

    def check(self, operation: Operation) -> None:
        """Refuse an invalid operation without changes. Raises ServerRefused with a remedy."""
        name, identity, _, action = operation
        match action:
            case Join():
                self.clients.must_be_free(name, identity)
                return
            case Leave() | Initialize():
                return
            case Open() if self.tickets is not None:
                return  # the process that sets the boundaries may not be a member
        self.clients.must_be_member(name, identity)
        match action:
            case Push():
                self._check_push(name, action)
            case Take() | Open() if self.tickets is None:
                raise ServerRefused(
                    "server.no_tickets",
                    "{name} requested tickets, but this server does not issue any. Set pieces in its settings.",
                    name=name,
                )
            case Load() if self.tickets and self.tickets.holders:
                raise ServerRefused(
                    "server.load_while_pushing",
                    "{name} loads a checkpoint while pushes are in progress. Load the checkpoint between steps.",
                    name=name,
                )

    def waits(self, operation: Operation) -> str | None:
        """Return why an operation must wait for others, or None if it can be applied."""
        if isinstance(operation.action, Take) and self.tickets is not None:
            return self.tickets.waits(operation.name)
        return None

    def read_waits(self, batches: int = 0) -> str | None:
        """Return why a client may not read the parameters yet, or None.

        Args:
            batches: number of global batches that must be fully applied.
        """
        if not self.parameters.ready:
            return "the parameters have no initial values yet: one client must call initialize"
        if self.tickets is not None and self.tickets.batches < batches:
            return f"{self.tickets.batches} global batches are applied"
        return None

    def apply(self, operation: Operation) -> Reply:
        """Apply an operation that passed `check` and does not wait."""
        name, identity, sequence, action = operation
        client = self.clients.record(name, identity)
        reply = Reply(self.parameters.version)
        match action:
            case Join():
                if self.clients.replace(name, identity):
                    self._lose(name)
                self.clients.join(name, identity)
            case Leave(other):
                self._lose(other or name, None if other else identity)
            case Initialize(tensors):
                if not self.parameters.ready:
                    self.parameters.initialize(tensors)
            case Push():
                reply = self._push(name, action)
                if action.take and self._deals and self.tickets and self.tickets.waits(name) is None:
                    reply = msgspec.structs.replace(reply, ticket=self.tickets.deal(name))
            case Take():
                ticket = self.tickets.deal(name) if self.tickets else None
                reply = Reply(self.parameters.version, ticket=ticket)
            case Open(until, recorded):
                assert self.tickets is not None
                self.tickets.open(until)
                first = recorded * self.tickets.pieces
                self.records = [record for record in self.records if record[1] >= first]
            case Load(parameters, batches):
                self.parameters.load(parameters)
                self.records = []
                if self.tickets is not None:
                    self.tickets.go_on_at(batches)
        client.sequence, client.reply = sequence, reply
        return reply

    def records_since(self, number: int) -> list[Any]:
        """Return the next record number, and the tickets and records since `number`."""
        return [self._recorded, [[ticket, note] for at, ticket, note in self.records if at >= number]]

    def state(self) -> dict[str, Any]:
        """Return the complete state as plain values and copied tensors."""
        return {
            "parameters": self.parameters.state(),
            "clients": self.clients.state(),
            "tickets": self.tickets and self.tickets.state(),
            "records": [self._recorded, list(self.records)],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.parameters.load(state["parameters"])
        self.clients.load(state["clients"])
        if self.tickets:
            self.tickets.load(state["tickets"])
        self._recorded, records = state["records"]
        self.records = [tuple(record) for record in records]

    def _check_push(self, name: str, push: Push) -> None:
        version = self.parameters.version
        if not self.parameters.ready:
            raise ServerRefused(
                "server.no_values",
                "{client} pushed before the parameters were initialized. One client must call initialize first.",
                client=name,
            )
        if push.read < 0:
            raise ServerRefused(
                "server.never_pulled",
                "{client} pushed an update of version {read}, but never pulled. Pull the parameters first.",
                client=name,
                read=push.read,
            )
        if push.read > version:
            raise ServerRefused(
                "server.version_differs",
                "{client} pushed an update of version {read}, but this server is only at version {version}",
                client=name,
                read=push.read,
                version=version,
            )
        if (push.ticket is None) != (self.tickets is None):
            told = "with a ticket, but this server gives none" if push.ticket else "without a ticket of this server"
            raise ServerRefused("server.push_refused", "{client} pushed {what}", client=name, what=told)

    def _push(self, name: str, push: Push) -> Reply:
        client = self.clients.member(name)
        if push.ticket is not None and not self._in_time(name, *push.ticket):
            client.late += 1
            return Reply(self.parameters.version, accepted=False)
        if push.record is not None and push.ticket is not None and self._deals:
            self.records.append((self._recorded, push.ticket[0], push.record))
            self._recorded += 1
        gradients = once_each(push.gradients())
        client.bytes += push.coded_bytes + nbytes(push.rows) if push.coded_bytes else nbytes(gradients)
        behind = self.parameters.version - push.read
        client.pushes, client.read = client.pushes + 1, push.read
        client.staleness[behind] = client.staleness.get(behind, 0) + 1
        # with tickets, one global batch normally takes one push per piece
        late = max(1, behind / (self.settings.pieces or 1)) if self.settings.staleness_aware else 1
        self.parameters.step(negated(gradients) if push.delta else gradients, 1 / late)
        return Reply(self.parameters.version, staleness=behind)

    def _in_time(self, name: str, number: int, attempt: int) -> bool:
        assert self.tickets is not None
        if not self._deals:
            return self.tickets.take_in(number)
        if not self.tickets.holds(name, number, attempt):
            return False
        self.tickets.apply(number)
        return True

    def _lose(self, name: str, identity: str | None = None) -> None:
        if self.clients.leave(name, identity) and self.tickets is not None:
            self.tickets.lose(name)


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of a client, which is applied once."""


class Join(_Action, frozen=True, tag="join"):
    """Request to join under a name, and to replace another client of this name."""


class Leave(_Action, frozen=True, tag="leave"):
    """Request to end the client's own membership, or the membership of a lost client."""

    client: str | None = None


class Initialize(_Action, frozen=True, tag="initialize"):
    """Request to set the initial parameters. Only the first such request has an effect."""

    tensors: dict[str, Tensor]


class Push(_Action, frozen=True, tag="push"):
    """Push of a gradient, or of a change of the parameters.

    Attributes:
        read: version of the parameters with which the push was computed.
        ticket: number and attempt of the ticket, or None.
        take: True to deal the next ticket with the answer, if one is available now.
        coded: names of dense tensors, and all their numbers encoded with the settings' codec. The server decodes these
            numbers into `dense`.
        coded_bytes: encoded size of `dense` in bytes; 0 if `dense` was not encoded.
        record: plain values about the ticket's piece, which `records_since` returns.
    """

    dense: dict[str, Tensor]
    rows: dict[str, tuple[Tensor, Tensor]]
    read: int
    ticket: tuple[int, int] | None = None
    delta: bool = False
    take: bool = False
    coded: tuple[list[str], Tensor] | None = None
    coded_bytes: int = 0
    record: list[Any] | None = None

    def gradients(self) -> dict[str, Gradient]:
        """Return all gradients by name."""
        return {**self.dense, **{name: Rows(*rows) for name, rows in self.rows.items()}}


class Take(_Action, frozen=True, tag="take"):
    """Request for a ticket."""


class Open(_Action, frozen=True, tag="open"):
    """Request to allow tickets of further global batches.

    Attributes:
        recorded: number of global batches whose records are no longer needed.
    """

    until: int
    recorded: int = 0


class Load(_Action, frozen=True, tag="load"):
    """Request to restore a checkpoint's parameters and number of global batches."""

    parameters: dict[str, Any]
    batches: int


Action = Join | Leave | Initialize | Push | Take | Open | Load


class Operation(NamedTuple):
    """Action with its client, and with the client's number for the action.

    Attributes:
        name: readable name of the client.
        identity: random identity of the client's process.
    """

    name: str
    identity: str
    sequence: int
    action: Action


class Ticket(NamedTuple):
    """Piece of a global batch that one client computes.

    Attributes:
        attempt: number of times that the ticket was dealt again.
        needs: number of global batches that the parameters for this piece must include.
    """

    number: int
    batch: int
    piece: int
    attempt: int
    needs: int


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of an operation.

    Attributes:
        version: version of the parameters after the operation.
        accepted: False if the ticket was dealt to another client in the meantime, and the push was dropped.
        staleness: number of steps since the version with which the push was computed.
        ticket: the ticket that was dealt, or None.
    """

    version: int
    accepted: bool = True
    staleness: int = 0
    ticket: Ticket | None = None


def plain(action: Action) -> dict[str, Any]:
    """Convert an action to nested plain values and tensors."""
    return {"type": type(action).__struct_config__.tag, **msgspec.structs.asdict(action)}


def read_action(values: Any) -> Action:
    """Read an action that `plain` converted. Raises ServerRefused for an invalid action."""
    try:
        action: Action = msgspec.convert(values, Action)
        return action
    except (msgspec.ValidationError, TypeError) as error:
        raise ServerRefused(
            "server.not_an_action",
            "a client requested an action that this server does not support: {error}",
            error=error,
        ) from None


def nbytes(value: Any) -> int:
    """Return the memory of all tensors in nested values."""
    if isinstance(value, dict):
        return sum(nbytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(nbytes(item) for item in value)
    return int(getattr(value, "nbytes", 0))


class Client(msgspec.Struct):
    """Record of one client.

    Attributes:
        pushes: number of applied pushes.
        late: number of pushes whose ticket had been dealt to another client.
        read: version with which the client's last push was computed.
        staleness: number of pushes, by their staleness in steps.
        replaced: True if another client has joined under the same name.
    """

    name: str
    sequence: int = 0
    reply: Reply | None = None
    pushes: int = 0
    late: int = 0
    bytes: int = 0
    read: int = -1
    replaced: bool = False
    staleness: dict[int, int] = {}


class Clients:
    """Clients by identity, with the answer to each client's last operation.

    Attributes:
        members: identities of the members, by name.
    """

    def __init__(self, most_members: int) -> None:
        self._most = most_members
        self._all: dict[str, Client] = {}
        self.members: dict[str, str] = {}

    def answered(self, identity: str, sequence: int) -> Reply | None:
        """Return the answer to an applied operation, or None for a new operation.

        Raises ServerRefused if the client has already sent a newer operation.
        """
        client = self._all.get(identity)
        if client is None or sequence > client.sequence:
            return None
        if sequence < client.sequence:
            raise ServerRefused(
                "server.operation_repeated",
                "{client} repeated operation {sequence} after operation {newest}. Operation {sequence} was already "
                "applied or given up.",
                client=client.name,
                sequence=sequence,
                newest=client.sequence,
            )
        return client.reply

    def record(self, name: str, identity: str) -> Client:
        """Return the record of a client, member or not, and make the record if necessary."""
        return self._all.setdefault(identity, Client(name))

    def must_be_free(self, name: str, identity: str) -> None:
        """Refuse replaced clients, and members beyond the limit. Raises ServerRefused."""
        if identity in self._all and self._all[identity].replaced:
            raise ServerRefused(
                "server.replaced",
                "another process has joined as {name} and has replaced this client",
                name=name,
            )
        if len(self.members) >= self._most and name not in self.members:
            raise ServerRefused(
                "server.too_many_members",
                "{name} cannot join: at most {limit:,} members are allowed (most_members)",
                name=name,
                limit=self._most,
            )

    def must_be_member(self, name: str, identity: str) -> None:
        """Refuse a client that is not a member. Raises ServerRefused."""
        if self.members.get(name) != identity:
            gone = "was lost to the others, or has left" if identity in self._all else "has not joined"
            raise ServerRefused(
                "server.not_a_member",
                "{name} is not a member of this server: it {why}. Call join first.",
                name=name,
                why=gone,
            )

    def member(self, name: str) -> Client:
        """Return the record of a member."""
        return self._all[self.members[name]]

    def replace(self, name: str, identity: str) -> bool:
        """Mark earlier clients of a name as replaced; return True if a member must leave."""
        for other, client in self._all.items():
            client.replaced |= client.name == name and other != identity
        return self.members.get(name, identity) != identity

    def join(self, name: str, identity: str) -> None:
        """Add a member."""
        self._all[identity].name = name
        self.members[name] = identity

    def leave(self, name: str, identity: str | None) -> bool:
        """Remove a member, and return True if the client was a member.

        The client's record is kept for a while.
        """
        if name not in self.members or identity not in (None, self.members[name]):
            return False
        left = self.members.pop(name)
        self._all[left] = self._all.pop(left)  # only the clients that left most recently are kept
        if (surplus := len(self._all) - len(self.members) - _MOST_KEPT) > 0:
            present = set(self.members.values())
            for oldest in [identity for identity in self._all if identity not in present][:surplus]:
                del self._all[oldest]
        return True

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return the counters by client name. Counters of clients with the same name are summed."""
        counts: dict[str, dict[str, Any]] = {}
        for client in self._all.values():
            of = counts.setdefault(client.name, {"pushes": 0, "late": 0, "bytes": 0, "staleness": {}})
            for key in ("pushes", "late", "bytes"):
                of[key] += getattr(client, key)
            for behind, count in client.staleness.items():
                of["staleness"][behind] = of["staleness"].get(behind, 0) + count
            of["read"], of["member"] = client.read, client.name in self.members
        return counts

    def state(self) -> dict[str, Any]:
        """Return the complete state as plain values."""
        return {"all": msgspec.to_builtins(self._all), "members": dict(self.members)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.members = dict(state["members"])
        self._all = msgspec.convert(state["all"], dict[str, Client])


@dataclass
class Tickets:
    """Tickets for pieces of the global batches, dealt in order.

    Ticket t is piece t % pieces of global batch t // pieces.

    Attributes:
        pieces: number of tickets per global batch.
        staleness: number of global batches by which a ticket may run ahead of the last fully applied batch.
        until: number of the first global batch whose tickets may not be dealt yet.
        next: lowest ticket that was never dealt.
        below: lowest ticket that is not applied.
        applied: applied tickets above `below`.
        again: heap of tickets to be dealt again.
        attempts: number of the current attempt, for each ticket that was dealt again.
        holders: client that holds each ticket that is dealt but not applied.
    """

    pieces: int
    staleness: float
    until: int = 0
    next: int = 0
    below: int = 0
    applied: set[int] = field(default_factory=set)
    again: list[int] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    holders: dict[int, str] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """Number of consecutive global batches that are fully applied."""
        return self.below // self.pieces

    @property
    def at_boundary(self) -> bool:
        """True if every ticket that may be dealt is applied."""
        return self.below >= self.until * self.pieces

    def open(self, until: int) -> None:
        """Allow tickets of batches below `until`. An existing later limit is kept."""
        self.until = max(self.until, until)

    def waits(self, client: str) -> str | None:
        """Return why a client must wait for a ticket, or None."""
        if self.at_boundary:
            return None
        if sum(holder == client for holder in self.holders.values()) >= _TICKETS_AT_ONCE:
            return f"it holds {_TICKETS_AT_ONCE} tickets already: push one"
        number = self.again[0] if self.again else self.next
        if number >= self.until * self.pieces:
            return f"tickets {self._shown()} are not applied yet"
        if number // self.pieces - self.batches > self.staleness:
            return f"ticket {number} would run more than {self.staleness:g} global batches ahead of {self._shown()}"
        return None

    def deal(self, client: str) -> Ticket | None:
        """Deal the next ticket; return None at the boundary. `waits` must have returned None."""
        if self.at_boundary:
            return None
        if self.again:
            number = heapq.heappop(self.again)
        else:
            number, self.next = self.next, self.next + 1
        self.holders[number] = client
        batch, piece = divmod(number, self.pieces)
        needs = 0 if math.isinf(self.staleness) else max(0, batch - int(self.staleness))
        return Ticket(number, batch, piece, self.attempts.get(number, 0), needs)

    def holds(self, client: str, number: int, attempt: int) -> bool:
        """Return True if this client holds the ticket under this attempt."""
        return self.holders.get(number) == client and self.attempts.get(number, 0) == attempt

    def apply(self, number: int) -> None:
        """Record that a dealt ticket was applied."""
        del self.holders[number]
        self.attempts.pop(number, None)
        self._note(number)

    def take_in(self, number: int) -> bool:
        """Record that this server applied another server's ticket; return False if already recorded.

        The first push counts, because a server that deals no tickets does not know the holder.
        """
        if number < self.below or number in self.applied:
            return False
        self._note(number)
        return True

    def lose(self, client: str) -> None:
        """Schedule all tickets of a client to be dealt again."""
        for number in [number for number, holder in self.holders.items() if holder == client]:
            del self.holders[number]
            self.attempts[number] = self.attempts.get(number, 0) + 1
            heapq.heappush(self.again, number)

    def go_on_at(self, batches: int) -> None:
        """Begin at a global batch. All earlier batches count as applied, and no ticket is dealt."""
        self.below = self.next = batches * self.pieces
        self.until = max(self.until, batches)
        self.applied.clear()
        self.again.clear()

    def state(self) -> dict[str, Any]:
        """Return the complete state as plain values."""
        return asdict(self) | {"applied": sorted(self.applied)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned."""
        vars(self).update(state, applied=set(state["applied"]))

    def _note(self, number: int) -> None:
        self.applied.add(number)
        while self.below in self.applied:
            self.applied.remove(self.below)
            self.below += 1

    def _shown(self) -> str:
        """Describe the first few pending tickets and their holders."""
        waited = [f"{number} ({self.holders[number]})" for number in sorted(self.holders)[:4]]
        return ", ".join(waited) or f"{self.below}"
