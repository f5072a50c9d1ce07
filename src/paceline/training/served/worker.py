"""A worker of servers: takes a piece, pushes its gradient, and takes the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from paceline.data.loader import Position
from paceline.engine.engine import Engine, StepResult
from paceline.errors import PlanError
from paceline.remote.server.client import Pushed, ServerClient
from paceline.remote.server.line import NoMember
from paceline.remote.server.tickets import Ticket
from paceline.sync.served import Served
from paceline.training.served.pieces import Pieces
from paceline.training.served.state import handed_over, take_over


class Piece(NamedTuple):
    """One computed piece.

    Attributes:
        pushed: the servers' answer.
    """

    ticket: Ticket
    position: Position
    result: StepResult | None
    pushed: Pushed


class Worker:
    """Computes pieces with an engine of its own, in a group of its own.

    Attributes:
        client: this worker's connections to the servers.
    """

    def __init__(self, engine: Engine, client: ServerClient, pieces: Pieces) -> None:
        if not isinstance(engine.rule, Served):
            raise PlanError(f"sync={engine.plan.sync} has no servers that own parameters: sync=server:staleness=inf")
        self.engine, self.client, self.pieces, self.rule = engine, client, pieces, engine.rule
        self.rule.update = self._push
        self.trained: dict[str, nn.Parameter] = {n: p for n, p in engine.named_parameters().items() if p.requires_grad}
        self.values: Mapping[str, Tensor] = {name: p.data for name, p in self.trained.items()}
        self._rows = [spec.name for spec in client.settings.tensors() if spec.sparse]
        self._fresh, self._has = False, 0  # whether parameters came with the last push, and the batches they hold
        self._ticket: Ticket | None = None
        self._next: Ticket | None = None  # dealt with the last push
        self._pushed: Pushed | None = None

    def advance(self) -> Piece | None:
        """Compute and push the next piece; None where everything up to the border is applied."""
        self.engine.on_phase("sync", self.engine.step_count)
        ticket, self._next = self._next or self._taken(), None
        return None if ticket is None else self._computed(ticket)

    def _taken(self) -> Ticket | None:
        try:
            return self.client.take()
        except NoMember:  # it was taken for lost
            self.client.join()
            return self.client.take()

    def pull(self, at_least: int = 0) -> None:
        """Get the parameters that have changed, once they hold so many global batches."""
        self.client.pull(self.values, at_least=at_least)
        self._pull_rows(at_least)
        self._has = max(self._has, at_least)

    def hand_over(self, batches: int, servers: int) -> None:
        """Give the servers the engine's parameters and optimizer state, after so many global batches."""
        if batches == 0:
            self.client.initialize(self.values)
        else:
            state = handed_over(self.client.settings, servers, self.trained, self.engine.optimizer, batches)
            self.client.load_state(state)
        self.pull(batches)

    def take_over(self) -> None:
        """Put the servers' parameters and optimizer state into the engine."""
        take_over(self.client.state(), self.client.settings, self.trained, self.engine.optimizer)

    def _computed(self, ticket: Ticket) -> Piece:
        engine = self.engine
        samples, position = self.pieces.samples(ticket.batch, ticket.piece)
        engine.step_count, self._ticket, self._pushed = ticket.batch, ticket, None
        engine.on_phase("data", ticket.batch + 1)
        if not self._fresh or self._has < ticket.needs:
            self.pull(ticket.needs)
        result = None
        if samples:
            result = engine.step(engine.loader.read(samples, position))
        if self._pushed is None:
            # no samples, or numbers that are not finite and that the job skips
            self._pushed = self.client.push({}, ticket=ticket)
        return Piece(ticket, position, result, self._pushed)

    def _push(self) -> None:
        """Push the gradients, in the place of an optimizer step."""
        gradients = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        self._pushed = self.client.push_and_pull(gradients, self.values, ticket=self._ticket, take=True)
        self._next = self._pushed.next
        if self._next is not None and len(self.client.lines) == 1:
            # dealt before the parameters were read, which so hold what it needs
            self._has = max(self._has, self._next.needs)
        self._pull_rows()
        self._fresh = True

    def _pull_rows(self, at_least: int = 0) -> None:
        """Get the rows of sparse tables that have changed."""
        for name in self._rows:
            self.client.pull_changed_rows(name, self.values[name], at_least=at_least)
