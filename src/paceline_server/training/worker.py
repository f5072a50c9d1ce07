"""A worker: takes a piece, pushes its gradient, and takes the next piece.

A worker is one rank, or several ranks that share the model. With several ranks, only the first rank connects to the
servers (`whole.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from paceline.engine.engine import RankEngine, StepResult
from paceline.errors import PlanError
from paceline_server.parameters.client import NoMember, ServerClient
from paceline_server.parameters.machine import Ticket
from paceline_server.parameters.settings import ServerSettings, Slice, slices_of
from paceline_server.sync.server import Served, ServedDeltas
from paceline_server.training.pieces import Pieces, Rounds
from paceline_server.training.whole import Whole


class PartRecord(msgspec.Struct, array_like=True, frozen=True):
    """Record of a worker's part of a global batch.

    The server that applies the part stores the record. If the part has no samples, loss and norm are None.
    """

    batch: int
    samples: int
    loss: float | None
    norm: float | None


class Worker:
    """Worker with its own engine and group. All ranks of the worker call each method.

    Args:
        client: this worker's connections to the servers on its first rank; None on other ranks.
        rounds: function that returns the rounds. It is called when the first ticket arrives, or when the initial
            parameters are set.

    Attributes:
        whole: collector of the parts of the worker's ranks.
    """

    def __init__(
        self,
        engine: RankEngine,
        client: ServerClient | None,
        pieces: Pieces,
        whole: Whole,
        rounds: Callable[[], Rounds],
    ) -> None:
        if not isinstance(engine.rule, Served):
            raise PlanError(
                "server.rule_without_servers",
                "sync={sync} has no servers that own parameters. Use sync=server:staleness=inf.",
                sync=engine.plan.sync,
            )
        self.engine, self.client, self.pieces, self.whole, self.rule = engine, client, pieces, whole, engine.rule
        self._rounds, self._alone = rounds, isinstance(self.rule, ServedDeltas)
        self.rule.has_servers = True
        self.trained: dict[str, nn.Parameter] = {n: p for n, p in engine.named_parameters().items() if p.requires_grad}
        # destination of pulls: the parameters themselves, or whole tensors, which are then distributed to the ranks
        self.values: Mapping[str, Tensor] = {name: p.data for name, p in self.trained.items()}
        if whole.divides:
            here = whole.shapes.items() if client is not None else ()
            self.values = {name: torch.empty(shape, dtype=whole.dtypes[name]) for name, shape in here}
        self._rows = [spec.name for spec in client.settings.tensors if spec.sparse] if client is not None else []
        # True if the last push returned parameters; number of batches in these parameters
        self._fresh, self._has = False, 0
        self._next: Ticket | None = None  # ticket dealt with the last push

    @cached_property
    def rounds(self) -> Rounds:
        """Return the global batches of each ticket."""
        return self._rounds()

    def advance(self) -> list[StepResult] | None:
        """Compute and push the next piece: a part of each global batch in a round.

        Returns:
            The results of this worker's steps, or None if all batches up to the boundary are applied.
        """
        self.engine.on_phase("sync", self.engine.step_count)
        ticket = None
        if self.client is not None:
            ticket, self._next = self._next or self._taken(self.client), None
        pulls = ticket is not None and (not self._fresh or self._has < ticket.needs)
        ticket, pulls = self.whole.share([ticket, pulls])
        return None if ticket is None else self._computed(Ticket(*ticket), pulls=pulls)

    def _taken(self, client: ServerClient) -> Ticket | None:
        try:
            return client.take()
        except NoMember:  # the servers declared this worker lost
            client.join()
            return client.take()

    def pull(self, at_least: int = 0) -> None:
        """Wait until `at_least` global batches are applied, and pull changed parameters."""
        if self.client is not None:
            self.client.pull(self.values, at_least=at_least)
            self._pull_rows(self.client, at_least)
        self._spread()
        self._has = max(self._has, at_least)

    def hand_over(self, batches: int, servers: int) -> None:
        """Send the engine's parameters, optimizer state and batch count to the servers."""
        values, rounds = self.whole.gather(self.trained), self.rounds.until(batches)
        optimizer = self._optimizer_state() if batches else {}
        if self.client is None:
            pass
        elif batches == 0:
            self.client.initialize(values)
        else:
            settings = self.client.settings
            self.client.load_state(for_servers(TrainedState(values, optimizer), settings, servers, rounds))
        self.pull(rounds)

    def take_over(self) -> None:
        """Load the servers' parameters and optimizer state into the engine."""
        found = TrainedState({}, {})
        if self.client is not None:
            found = of_servers(self.client.state(), self.client.settings)
        with torch.no_grad():
            self.whole.spread(found.values, self.trained)
            self._put_optimizer_state(found.optimizer)

    def _computed(self, ticket: Ticket, *, pulls: bool) -> list[StepResult]:
        batches = self.rounds.batches(ticket.batch)
        if pulls:
            self.pull(ticket.needs)  # the phase is still "sync", because the pull may wait for other workers
        self.engine.on_phase("data", batches.start + 1)
        before = self._copied() if self._alone else {}
        parts = [self._step(batch, ticket.piece) for batch in batches]
        results = [result for _, result in parts if result is not None]
        record = [msgspec.to_builtins(part) for part, _ in parts]
        if self._alone and results:
            self._push(ticket, self._change_since(before), record)
        elif results and results[0].problem is None:
            gradients = {name: p.grad for name, p in self.trained.items()}
            self._push(ticket, self.whole.gather(gradients), record)
        elif self.client is not None:
            # the piece has no samples, or non-finite numbers that the job skips
            self.client.push({}, ticket=ticket, record=record)
        return results

    def _step(self, batch: int, piece: int) -> tuple[PartRecord, StepResult | None]:
        """Compute this worker's part of a global batch; None without samples."""
        engine = self.engine
        samples, position = self.pieces.samples(batch, piece)
        engine.step_count = batch
        engine.on_phase("data", batch + 1)
        if not position.total:
            return PartRecord(batch, 0, None, None), None
        result = engine.step(engine.loader.read(samples, position))
        return PartRecord(batch, position.total, result.loss, result.grad_norm), result

    def _copied(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.values.items()}

    def _change_since(self, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the change of the parameters, on the first rank only.

        The parameters are reset, because the servers may drop the push and send no new parameters.
        """
        change = {name: value - before[name] for name, value in self.whole.gather(self.trained).items()}
        for name, value in self.values.items():
            value.copy_(before[name])
        return change

    def _push(self, ticket: Ticket, tensors: Mapping[str, Tensor], record: list[Any]) -> None:
        self._fresh = True
        if self.client is not None:
            pushed = self.client.push(tensors, self.values, ticket=ticket, delta=self._alone, take=True, record=record)
            self._next = pushed.next
            if self._next is not None and len(self.client.lines) == 1:
                # the ticket was dealt before the parameters were read, so they include the batches that the ticket
                # needs
                self._has = max(self._has, self._next.needs)
            self._pull_rows(self.client)
        self._spread()

    def _pull_rows(self, client: ServerClient, at_least: int = 0) -> None:
        for name in self._rows:
            client.pull_changed_rows(name, self.values[name], at_least=at_least)

    def _spread(self) -> None:
        if self.whole.divides:
            self.whole.spread(self.values, self.trained)

    def _optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the whole state of the servers' optimizer, on the first rank only."""
        if isinstance(self.rule, ServedDeltas):
            return dict(self.rule.outer)
        states = {name: self.engine.optimizer.state.get(p, {}) for name, p in self.trained.items()}
        if not self.whole.divides:
            return states
        found: dict[str, dict[str, Any]] = {name: {} for name in self.whole.shapes}
        keys = [{name: _numbers_of(state) for name, state in states.items()}]
        for of_rank in self.whole.group.gather_json(keys):
            for name, numbers in of_rank[0].items():
                found[name] |= {key: _value(told) for key, told in numbers.items()}
        for key in sorted({key for state in found.values() for key, value in state.items() if value is None}):
            for name, tensor in self.whole.gather({name: state.get(key) for name, state in states.items()}).items():
                found[name][key] = tensor
        return found

    def _put_optimizer_state(self, whole: Mapping[str, Mapping[str, Any]]) -> None:
        """Distribute the state of the servers' optimizer to the ranks."""
        if isinstance(self.rule, ServedDeltas):
            self.rule.outer = {name: dict(state) for name, state in whole.items()}
            return
        optimizer = self.engine.optimizer
        if not self.whole.divides:
            for name, p in self.trained.items():
                optimizer.state[p] = {
                    key: value.to(p.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in whole[name].items()
                }
            return
        told = self.whole.share({name: _numbers_of(state) for name, state in whole.items()})
        for name, p in self.trained.items():
            optimizer.state[p] = {
                key: torch.zeros_like(p.detach()) if number is None else _value(number)
                for key, number in told.get(name, {}).items()
            }
        for key in sorted({key for numbers in told.values() for key, number in numbers.items() if number is None}):
            names = [name for name, numbers in told.items() if key in numbers]
            into = {name: optimizer.state[p][key] for name, p in self.trained.items() if name in names}
            self.whole.spread({name: state[key] for name, state in whole.items() if key in state}, into, names)


def _numbers_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers in an optimizer's state, with None for tensors divided like their parameter."""
    told: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            told[key] = None if value.dim() else {"tensor": value.item()}
        elif value is not None:
            told[key] = {"number": value}
    return told


def _value(told: dict[str, Any] | None) -> Any:
    if told is None:
        return None
    return torch.tensor(told["tensor"]) if "tensor" in told else told["number"]


class TrainedState(NamedTuple):
    """Whole parameters and their optimizer state, by parameter name."""

    values: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Any]]


def of_servers(state: Mapping[str, Any], settings: ServerSettings) -> TrainedState:
    """Combine the state of all servers.

    Args:
        state: state that `ServerClient.state` returned.
    """
    values: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    owned = slices_of(settings, len(state["parts"]))
    for spec in settings.tensors:
        parts = [
            (piece, part)
            for pieces, part in zip(owned, state["parts"], strict=True)
            for piece in pieces
            if piece.name == spec.name
        ]
        whole = torch.empty(spec.shape, dtype=spec.torch_dtype)
        for piece, part in parts:
            piece.cut(whole).copy_(part["tensors"][spec.name])
        values[spec.name] = whole
        of_parts = [(piece, part["optimizer"].get(spec.name, {})) for piece, part in parts]
        optimizer[spec.name] = {
            key: _together(whole, [(piece, values[key]) for piece, values in of_parts]) for key in of_parts[0][1]
        }
    return TrainedState(values, optimizer)


def for_servers(trained: TrainedState, settings: ServerSettings, servers: int, batches: int) -> dict[str, Any]:
    """Return the state for `ServerClient.load_state` and its number of global batches."""
    pushes = batches * (settings.pieces or 1)
    specs = {spec.name: spec for spec in settings.tensors}
    parts = []
    for pieces in slices_of(settings, servers):
        state = {
            piece.name: {
                key: _part_of(trained.values[piece.name], value, piece)
                for key, value in trained.optimizer.get(piece.name, {}).items()
            }
            for piece in pieces
        }
        parts.append(
            {
                "version": pushes,
                "ready": True,
                "tensors": {piece.name: piece.cut(trained.values[piece.name].detach()).cpu() for piece in pieces},
                "versions": {piece.name: pushes for piece in pieces},
                "row_versions": {
                    piece.name: torch.full((piece.stop - piece.first,), pushes)
                    for piece in pieces
                    if specs[piece.name].sparse
                },
                "optimizer": state,
                "steps": pushes,
            }
        )
    return {"parts": parts, "batches": batches}


def _together(whole: Tensor, parts: list[tuple[Slice, Any]]) -> Any:
    """Join one value of an optimizer's state; an undivided value comes from the first server."""
    piece, first = parts[0]
    if not isinstance(first, Tensor) or first.shape != piece.cut(whole).shape:
        return first
    together = torch.empty_like(whole, dtype=first.dtype)
    for piece, value in parts:
        piece.cut(together).copy_(value)
    return together


def _part_of(whole: Tensor, value: Any, piece: Slice) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (piece.cut(value) if value.shape == whole.shape else value).detach().cpu().clone()
