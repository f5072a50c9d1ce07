"""State machine of one parameter server, apart from sockets, threads and clocks.

The same operations in the same order make the same state, so a replica, or a journal played again, is the server
itself. Each operation is applied once: one that comes again gets the answer of the first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.errors import ServerRefused
from paceline_server.parameters.clients import Clients
from paceline_server.parameters.operations import (
    GiveBack,
    Initialize,
    Join,
    Leave,
    Load,
    Open,
    Operation,
    Push,
    Reply,
    Take,
    nbytes,
)
from paceline_server.parameters.parameters import Gradient, Parameters, Rows
from paceline_server.parameters.settings import ServerSettings, slices_of
from paceline_server.parameters.sums import Sum, bounded, combined, must_fit, once_each, scaled
from paceline_server.parameters.tickets import Tickets


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
