"""State machine of one parameter server, apart from sockets, threads and clocks.

The same operations in the same order make the same state, so a replica, or a journal played again, is the server
itself. Each operation is applied once: one that comes again gets the answer of the first time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from paceline.errors import ServerRefused
from paceline_server.parameters.parameters import Gradient, Parameters, Rows
from paceline_server.parameters.settings import ServerSettings, slices_of
from paceline_server.parameters.sums import Sum, bounded, combined, must_fit, once_each, scaled


class Machine:
    """Parameters, members, rounds and tickets of one server.

    Ask in this order: `must_fit` (are its tensors right), `known` (it came before), `check` (may it come at all),
    `waits` (may it come now), `apply`. Only `must_fit` reads nothing that changes, so other threads may call it.

    Args:
        part: which of the servers it is.
    """

    def __init__(self, settings: ServerSettings, servers: int = 1, part: int = 0) -> None:
        self.settings = settings
        self.parameters = Parameters(settings, slices_of(settings, servers)[part])
        self.clients = Clients(settings.most_members)
        self.tickets = (
            Tickets(settings.pieces, settings.staleness, settings.tickets_at_once) if settings.pieces else None
        )
        self._deals = part == 0
        self._round: dict[str, dict[str, Gradient]] = {}  # pushes of the round under way, by member
        self._sum, self._factors = Sum(), 0.0

    def must_fit(self, operation: Operation) -> None:
        """Refuse tensors of wrong names, shapes, dtypes or values. Raises ServerRefused, saying what to do."""
        match operation.action:
            case Initialize(tensors):
                must_fit(tensors, self.parameters.specs, operation.name)
                if missing := self.parameters.specs.keys() - tensors.keys():
                    raise ServerRefused(f"{operation.name} left out first values of {', '.join(sorted(missing)[:8])}")
            case Push() as push:
                if push.ticket is not None and not push.dense and not push.rows:
                    return  # a piece without samples here, or one that was left out
                must_fit(push.gradients(), self.parameters.specs, operation.name)
                if push.dense.keys() & push.rows.keys():
                    raise ServerRefused(f"{operation.name} pushed a tensor whole and by rows: push it once")
                if self.settings.combine in ("median", "trimmed_mean") and push.rows:
                    raise ServerRefused(
                        f"{operation.name} pushed rows, and combine={self.settings.combine} is of whole tensors"
                    )

    def known(self, operation: Operation) -> Reply | None:
        """The answer of an operation that was applied already.

        Raises:
            ServerRefused: it is an older one, to which nobody waits for an answer.
        """
        return self.clients.answered(operation.identity, operation.sequence)

    def check(self, operation: Operation) -> None:
        """Refuse what is wrong. Nothing changes. Raises ServerRefused, saying what to do."""
        match operation.action:
            case Join():
                self.clients.must_be_free(operation.name, operation.identity)
            case Leave() | Initialize():
                pass
            case Open() if self.tickets is not None:
                pass  # who keeps the boundaries need not be a member
            case _:
                self.clients.must_be_member(operation.name, operation.identity)
                self._check_of_member(operation)

    def waits(self, operation: Operation) -> str | None:
        """Reason why an operation must wait for others; None where it can be applied."""
        match operation.action:
            case Push() if operation.name in self._round:
                return self._round_waits()
            case Take() if self.tickets is not None:
                return self.tickets.waits(operation.name)
        return None

    def read_waits(self, name: str, batches: int = 0) -> str | None:
        """Reason why a client may not read the parameters yet; None where it may.

        Args:
            batches: global batches that must be applied whole.
        """
        if not self.parameters.ready:
            return "the parameters have no first values: one client calls initialize"
        if name in self._round:
            return self._round_waits()
        if self.tickets is not None:
            return f"{self.tickets.batches} global batches are applied" if self.tickets.batches < batches else None
        ahead, slowest = self.clients.ahead(name)
        return f"it is {ahead} pushes ahead of {slowest}" if ahead > self.settings.staleness else None

    def apply(self, operation: Operation) -> Reply:
        """Apply an operation that passed `check` and does not wait."""
        name, identity, sequence, action = operation
        self.clients.know(name, identity)
        reply = Reply(self.parameters.version)
        match action:
            case Join():
                if self.clients.replace(name, identity):
                    self._lose(name)
                self.clients.join(name, identity)
            case Leave(client):
                self._lose(client or name, None if client else identity)
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
            case GiveBack(number):
                assert self.tickets is not None
                self.tickets.give_back(number)
            case Open(until):
                assert self.tickets is not None
                self.tickets.open(until)
            case Load(parameters, batches):
                self._load(parameters, batches)
        self.clients.answer(identity, sequence, reply)
        return reply

    def state(self) -> dict[str, Any]:
        """Everything here, as plain values and copied tensors."""
        return {
            "parameters": self.parameters.state(),
            "clients": self.clients.state(),
            "tickets": self.tickets and self.tickets.state(),
            "round": {name: _plain(push) for name, push in self._round.items()},
            "sum": [_plain(self._sum.gradients), self._sum.count, self._factors],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.parameters.load(state["parameters"])
        self.clients.load(state["clients"])
        if self.tickets:
            self.tickets.load(state["tickets"])
        self._round = {name: _gradients(push) for name, push in state["round"].items()}
        gradients, count, self._factors = state["sum"]
        self._sum = Sum()
        self._sum.gradients, self._sum.count = _gradients(gradients), count

    def _check_of_member(self, operation: Operation) -> None:
        name, action = operation.name, operation.action
        match action:
            case Push():
                self._check_push(name, action)
            case Take() | Open() | GiveBack() if self.tickets is None:
                raise ServerRefused(f"{name} asked for tickets, and this server deals none: set pieces in its settings")
            case GiveBack(number, attempt):
                assert self.tickets is not None
                if not self.tickets.holds(name, number, attempt):
                    raise ServerRefused(f"{name} gave back ticket {number}, which it does not hold")
            case Load() if self._round or self._sum.count or (self.tickets and self.tickets.in_flight):
                raise ServerRefused(f"{name} loads a checkpoint while pushes are under way: do it at a boundary")

    def _check_push(self, name: str, push: Push) -> None:
        if not self.parameters.ready:
            raise ServerRefused(f"{name} pushed before the parameters had values: one client calls initialize first")
        behind, oldest = self.parameters.version - push.read, self.settings.oldest_version
        if push.read < 0:
            raise ServerRefused(f"{name} pushed for version {push.read}, so it never pulled: pull first")
        if behind < 0:
            raise ServerRefused(
                f"{name} pushed for version {push.read}, and this server is at {self.parameters.version}"
            )
        if oldest is not None and behind > oldest:
            raise ServerRefused(
                f"{name} pushed for version {push.read}, {behind} steps ago: at most {oldest}. Pull, and compute anew"
            )
        if (push.ticket is None) != (self.tickets is None):
            told = "with a ticket, and this server deals none" if push.ticket else "without a ticket of this server"
            raise ServerRefused(f"{name} pushed {told}")

    def _push(self, name: str, push: Push) -> Reply:
        client = self.clients.member(name)
        if push.ticket is not None and not self._in_time(name, *push.ticket):
            client.late += 1
            return Reply(self.parameters.version, accepted=False)
        gradients = once_each(push.gradients())
        client.bytes += push.coded_bytes + nbytes(push.rows) if push.coded_bytes else nbytes(gradients)
        if push.delta:
            gradients = scaled(gradients, -1.0)
        if (bound := self.settings.norm_bound) is not None and (within := bounded(gradients, bound)):
            gradients, client.bounded = within, client.bounded + 1
        behind = self.parameters.version - push.read
        client.note_push(push.read, behind)
        before = self.parameters.version
        if self.settings.rounds:
            self._round[name] = gradients
            self._end_round()
        else:
            self._accumulate(gradients, behind)
        stepped = self.parameters.version > before
        return Reply(self.parameters.version, stepped=stepped, staleness=behind)

    def _in_time(self, name: str, number: int, attempt: int) -> bool:
        """Note that a ticket is applied; False where it comes too late."""
        assert self.tickets is not None
        if not self._deals:
            return self.tickets.take_in(number)
        if not self.tickets.holds(name, number, attempt):
            return False
        self.tickets.apply(number)
        return True

    def _accumulate(self, gradients: dict[str, Gradient], behind: int) -> None:
        self._sum.add(gradients)
        # with tickets, as many pushes as a global batch has pieces are what is usual
        usual = self.settings.pieces or 1
        self._factors += 1 / max(1, behind / usual) if self.settings.staleness_aware else 1.0
        count = self._sum.count
        if count == self.settings.pushes_per_step:
            total = self._sum.gradients
            if self.settings.combine == "mean" and count > 1:
                total = scaled(total, 1 / count)
            self.parameters.step(total, self._factors / count)
            self._sum, self._factors = Sum(), 0.0

    def _end_round(self) -> None:
        """Step if every member has pushed."""
        if self._round and self.clients.members <= self._round.keys():
            pushes = [self._round[name] for name in sorted(self._round)]
            self.parameters.step(combined(pushes, self.settings.combine, self.settings.trim))
            self._round.clear()

    def _lose(self, name: str, identity: str | None = None) -> None:
        """End a membership; what its client has pushed stays."""
        if self.clients.leave(name, identity):
            if self.tickets is not None:
                self.tickets.lose(name)
            self._end_round()

    def _round_waits(self) -> str:
        return f"the round waits for {', '.join(sorted(self.clients.members - self._round.keys())[:8])}"

    def _load(self, parameters: Mapping[str, Any], batches: int) -> None:
        self.parameters.load(parameters)
        if self.tickets is not None:
            self.tickets.go_on_at(batches)


def _plain(gradients: Mapping[str, Gradient]) -> dict[str, Any]:
    return {name: list(g) if isinstance(g, Rows) else g for name, g in gradients.items()}


def _gradients(values: Mapping[str, Any]) -> dict[str, Gradient]:
    return {name: Rows(*value) if isinstance(value, list | tuple) else value for name, value in values.items()}


SLOWEST_BYTES_PER_S = 10e6  # of a link that is not taken for lost


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a client asks for once."""


class Join(_Action, frozen=True, tag="join"):
    """Become a member under a name; another client that has it is lost."""


class Leave(_Action, frozen=True, tag="leave"):
    """End a membership: one's own, or that of a client that died."""

    client: str | None = None


class Initialize(_Action, frozen=True, tag="initialize"):
    """Give the parameters their first values; the first one counts."""

    tensors: dict[str, Tensor]


class Push(_Action, frozen=True, tag="push"):
    """A gradient, or a change of the parameters.

    Attributes:
        read: the version that it was computed with.
        ticket: number and attempt.
        take: deal the next ticket with the answer, where there is one now.
        coded: names of dense tensors, and all their numbers in the settings' code; a server decodes them into `dense`.
        coded_bytes: bytes in which `dense` came; 0: as it is.
    """

    dense: dict[str, Tensor]
    rows: dict[str, tuple[Tensor, Tensor]]
    read: int
    ticket: tuple[int, int] | None = None
    delta: bool = False
    take: bool = False
    coded: tuple[list[str], Tensor] | None = None
    coded_bytes: int = 0

    def gradients(self) -> dict[str, Gradient]:
        """All of it by name."""
        return {**self.dense, **{name: Rows(*rows) for name, rows in self.rows.items()}}


class Take(_Action, frozen=True, tag="take"):
    """Ask for a ticket."""


class GiveBack(_Action, frozen=True, tag="give_back"):
    """Return a ticket that was not computed."""

    number: int
    attempt: int


class Open(_Action, frozen=True, tag="open"):
    """Allow tickets of more global batches."""

    until: int


class Load(_Action, frozen=True, tag="load"):
    """Restore the parameters of a checkpoint, after so many global batches."""

    parameters: dict[str, Any]
    batches: int


Action = Join | Leave | Initialize | Push | Take | GiveBack | Open | Load


class Operation(NamedTuple):
    """An action with its client and the number that this client gave it.

    Attributes:
        name: of the client, as people read it.
        identity: random, of this one process.
    """

    name: str
    identity: str
    sequence: int
    action: Action


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of an operation.

    Attributes:
        version: of the parameters, after it.
        accepted: False: the ticket was dealt to another client meanwhile, and the push was dropped.
        stepped: the optimizer took a step.
        staleness: steps since the version that the push was computed with.
        ticket: number, batch, piece, attempt and needs of the ticket that was dealt.
    """

    version: int
    accepted: bool = True
    stepped: bool = False
    staleness: int = 0
    ticket: Ticket | None = None


def plain(action: Action) -> dict[str, Any]:
    """The action as nested plain values and tensors."""
    return {"type": type(action).__struct_config__.tag, **msgspec.structs.asdict(action)}


def read_action(values: Any) -> Action:
    """The action that `plain` wrote. Raises ServerRefused where it is none."""
    try:
        action: Action = msgspec.convert(values, Action)
        return action
    except (msgspec.ValidationError, TypeError) as error:
        raise ServerRefused(f"a client asked for something that is no action of a server: {error}") from None


def nbytes(value: Any) -> int:
    """Memory of all tensors in nested values."""
    if isinstance(value, dict):
        return sum(nbytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(nbytes(item) for item in value)
    return int(getattr(value, "nbytes", 0))


_MOST_KEPT = 2**14  # records of clients that have left


@dataclass
class Client:
    """Record of one client.

    Attributes:
        pushes: that were applied, or are in a sum that will be.
        late: whose ticket had been dealt to another client.
        bounded: that were scaled down to the norm bound.
        read: version that its last push was computed with.
        staleness: how often a push was so many steps late.
        clock: pushes, counted from the slowest member's when it joined.
        replaced: another client has joined under its name.
    """

    name: str
    sequence: int = 0
    reply: Reply | None = None
    pushes: int = 0
    late: int = 0
    bounded: int = 0
    bytes: int = 0
    read: int = -1
    clock: int = 0
    replaced: bool = False
    staleness: Counter[int] = field(default_factory=Counter)

    def note_push(self, read: int, behind: int) -> None:
        """Count a push."""
        self.pushes += 1
        self.clock += 1
        self.read = read
        self.staleness[behind] += 1


class Clients:
    """All clients by their identity, and the members among them by name."""

    def __init__(self, most_members: int) -> None:
        self._most = most_members
        self._all: dict[str, Client] = {}
        self._members: dict[str, str] = {}

    @property
    def members(self) -> Set[str]:
        """Names of the members."""
        return self._members.keys()

    def identities(self) -> Mapping[str, str]:
        """The members' identities by name."""
        return self._members

    def answered(self, identity: str, sequence: int) -> Reply | None:
        """The answer to an operation that was applied; None if it is new. Raises ServerRefused where it is older."""
        client = self._all.get(identity)
        if client is None or sequence > client.sequence:
            return None
        if sequence < client.sequence:
            raise ServerRefused(
                f"{client.name} repeated operation {sequence} after {client.sequence}: it was applied, or given up"
            )
        return client.reply

    def know(self, name: str, identity: str) -> None:
        """Have a record of a client, member or not."""
        self._all.setdefault(identity, Client(name))

    def answer(self, identity: str, sequence: int, reply: Reply) -> None:
        """Keep the answer to a client's last operation, for when it is asked again."""
        client = self._all[identity]
        client.sequence, client.reply = sequence, reply

    def must_be_free(self, name: str, identity: str) -> None:
        """Refuse one more member than allowed, and one whose place another has taken. Raises ServerRefused."""
        if identity in self._all and self._all[identity].replaced:
            raise ServerRefused(f"another process has joined as {name} since, and has taken this one's place")
        if len(self._members) >= self._most and name not in self._members:
            raise ServerRefused(f"{name} joins as one too many: {self._most:,} members are allowed (most_members)")

    def must_be_member(self, name: str, identity: str) -> None:
        """Refuse a client that is none. Raises ServerRefused."""
        if self._members.get(name) != identity:
            gone = "was lost to the others, or has left" if identity in self._all else "has not joined"
            raise ServerRefused(f"{name} is no member of this server: it {gone}. Call join first")

    def member(self, name: str) -> Client:
        """The record of a member."""
        return self._all[self._members[name]]

    def replace(self, name: str, identity: str) -> bool:
        """True if another member has the name, and is to leave. None that has had it may come again."""
        for other, client in self._all.items():
            client.replaced |= client.name == name and other != identity
        return self._members.get(name, identity) != identity

    def join(self, name: str, identity: str) -> None:
        """Add a member, whose clock begins at the slowest one's."""
        clocks = [self._all[member].clock for member in self._members.values()]
        client = self._all[identity]
        client.name, client.clock = name, min(clocks, default=client.clock)
        self._members[name] = identity

    def leave(self, name: str, identity: str | None) -> bool:
        """Remove a member, this identity or any; returns whether it was one. Its record stays a while."""
        if name not in self._members or identity not in (None, self._members[name]):
            return False
        left = self._members.pop(name)
        self._all[left] = self._all.pop(left)  # the newest of those that have left
        gone = [identity for identity in self._all if identity not in self._members.values()] if self._full() else []
        for oldest in gone[: len(self._all) - len(self._members) - _MOST_KEPT]:
            del self._all[oldest]
        return True

    def ahead(self, name: str) -> tuple[int, str]:
        """Pushes by which a member is ahead of the slowest, and who that is. (0 for one that is no member.)"""
        if name not in self._members:
            return 0, name
        slowest = min(self._members, key=lambda member: self.member(member).clock)
        return self.member(name).clock - self.member(slowest).clock, slowest

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Counts of each client by name; those of clients of one name are added."""
        counts: dict[str, dict[str, Any]] = {}
        for client in self._all.values():
            of = counts.setdefault(
                client.name, dict.fromkeys(("pushes", "late", "bounded", "bytes"), 0) | {"staleness": {}}
            )
            for key in ("pushes", "late", "bounded", "bytes"):
                of[key] += getattr(client, key)
            for behind, count in client.staleness.items():
                of["staleness"][behind] = of["staleness"].get(behind, 0) + count
            of["read"], of["member"] = client.read, client.name in self._members
        return counts

    def state(self) -> dict[str, Any]:
        """Everything here, as plain values."""
        return {
            "all": {
                identity: {
                    **asdict(client),
                    "reply": client.reply and msgspec.to_builtins(client.reply),
                    "staleness": dict(client.staleness),
                }
                for identity, client in self._all.items()
            },
            "members": dict(self._members),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._members = dict(state["members"])
        self._all = {
            identity: Client(
                **{
                    **values,
                    "reply": values["reply"] and msgspec.convert(values["reply"], Reply),
                    "staleness": Counter(values["staleness"]),
                }
            )
            for identity, values in state["all"].items()
        }

    def _full(self) -> bool:
        return len(self._all) - len(self._members) > _MOST_KEPT


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
