"""Client of a run's parameter servers: pull, push, take tickets, and sum.

Each operation gets a number before it is sent, and keeps this number if it is sent again, even to another process of
the server. Therefore the server applies each operation once. `settings.slices_of` divides large tensors between the
servers.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from paceline.errors import ChannelError, DeadlineError, ServerLost, ServerRefused
from paceline.wire.key import RunKey, name_of
from paceline_server.client import Client, Pending, place_of
from paceline_server.parameters.log import Address, Views
from paceline_server.parameters.machine import (
    SLOWEST_BYTES_PER_S,
    Action,
    Initialize,
    Join,
    Leave,
    Load,
    Open,
    Push,
    Take,
    Ticket,
    nbytes,
    plain,
)
from paceline_server.parameters.process import MOST_WAIT_S
from paceline_server.parameters.settings import ServerSettings, Slice, slices_of
from paceline_server.talk import Closing

Encode = Callable[[str, Tensor], Tensor | None]
_Place = tuple[weakref.ref[Tensor], int]  # a tensor, and the version counter of its last change


class Pushed(NamedTuple):
    """Result of a push.

    Attributes:
        version: version of the parameters on the first server after the push.
        staleness: number of steps since the version with which the push was computed.
        accepted: False if the ticket was dealt to another client in the meantime, so that nothing was applied.
        next: the next ticket if the push requested it and a ticket was available, otherwise None.
    """

    version: int
    staleness: int
    accepted: bool
    next: Ticket | None = None


class Pulled(NamedTuple):
    """Result of a pull: version of the first server, and number of received bytes."""

    version: int
    nbytes: int


class ServerClient(Closing):
    """Client of all servers of a run. Only sums may run in several threads.

    Args:
        servers: addresses of each server's processes, in any order. Each connection may add further addresses.
        views: views of each server, which give the addresses of processes that start later.
        name: unique name of this client. A client that connects under the same name replaces the earlier client.
        deadline_s: longest wait of each call for an answer from the server.
        patience_s: longest wait of each call for other clients; None means `deadline_s`.
        encode: function that encodes the dense numbers of a push, given a name; None sends unencoded numbers.

    Raises:
        ServerRefused: the servers have a different model or different settings.
        ServerLost: a server cannot be reached in time.
    """

    def __init__(
        self,
        servers: Sequence[Sequence[Address]],
        key: RunKey | None,
        *,
        name: str,
        settings: ServerSettings,
        deadline_s: float = 60.0,
        patience_s: float | None = None,
        views: Sequence[Views] = (),
        encode: Encode | None = None,
    ) -> None:
        self._encode = encode
        self.settings, self.name, self.deadline_s = settings, name, deadline_s
        identity = secrets.token_hex(16)
        self._specs = {spec.name: spec for spec in settings.tensors}
        self.lines = [
            Line(addresses, key, name, identity, settings, deadline_s, views[part] if views else None, patience_s)
            for part, addresses in enumerate(servers)
        ]
        for line, owned in zip(self.lines, slices_of(settings, len(servers)), strict=True):
            line.owned = owned
        self._places: dict[str, _Place] = {}  # tensors of the last pull
        self._tables: dict[str, _Place] = {}  # tensors of the last pulls of changed rows
        self._sequence = 0

    def join(self) -> int:
        """Become a member, and return the version of the parameters."""
        return int(self._act_everywhere(Join())[0][0])

    def leave(self) -> None:
        """End the membership. The client's tickets are dealt again."""
        self._act_everywhere(Leave())

    def initialize(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the initial parameters, unless another client has already set them."""
        parts = [{piece.name: piece.cut(tensors[piece.name]) for piece in line.owned} for line in self.lines]
        self._act([Initialize(part) for part in parts])

    def pull(self, into: Mapping[str, Tensor], *, at_least: int = 0) -> Pulled:
        """Copy the dense parameters into tensors of the same names.

        If the tensors are the unmodified tensors of the last pull, the servers send only changed tensors.

        Args:
            into: all dense parameters.
            at_least: number of global batches; the pull waits until they are applied (`Ticket.needs`).
        """
        self._note(into)
        asked = [line.ask("pull", line.since, at_least, waits_s=MOST_WAIT_S) for line in self.lines]
        return self._received([one.result() for one in asked], into)

    def pull_rows(self, name: str, rows: Tensor, *, at_least: int = 0) -> Tensor:
        """Return rows of a sparse tensor, in the requested order."""
        found: list[tuple[Tensor, Asked]] = []
        for line, piece in self._pieces(name):
            at = torch.nonzero((rows >= piece.first) & (rows < piece.stop)).flatten()
            if len(at):
                found.append(
                    (at, line.ask("pull_rows", name, rows[at] - piece.first, -1, at_least, waits_s=MOST_WAIT_S))
                )
        if sum(len(at) for at, _ in found) < len(rows):
            raise ServerRefused(
                "server.rows_unknown",
                "{client} requested rows that {tensor} does not have; {tensor} has {rows} rows",
                client=self.name,
                tensor=name,
                rows=self._specs[name].rows,
            )
        values = torch.empty((len(rows), *self._specs[name].shape[1:]), dtype=self._specs[name].torch_dtype)
        for at, asked in found:
            version, _, values[at] = asked.result()
            self._note_rows(asked.line, version)
        return values

    def pull_changed_rows(self, name: str, into: Tensor, *, at_least: int = 0) -> int:
        """Copy the rows of a sparse tensor that changed since the last call.

        If `into` is not the tensor of the last call or was modified, all rows are copied. Returns the number of copied
        rows.
        """
        count = 0
        as_it_was = _as_it_was(self._tables.get(name), into)
        for line, piece in self._pieces(name):
            since = line.rows_since.get(name, -1) if as_it_was else -1
            version, numbers, values = line.ask("pull_rows", name, None, since, at_least, waits_s=MOST_WAIT_S).result()
            into.detach().index_copy_(0, numbers + piece.first, values.to(into.dtype))
            line.rows_since[name] = version
            self._note_rows(line, version)
            count += len(numbers)
        self._tables[name] = _place(into)
        return count

    def push(
        self,
        gradients: Mapping[str, Tensor],
        into: Mapping[str, Tensor] | None = None,
        *,
        ticket: Ticket | None = None,
        delta: bool = False,
        take: bool = False,
        record: list[Any] | None = None,
    ) -> Pushed:
        """Push dense or sparse (COO) gradients, or with `delta`, parameter changes.

        Args:
            into: tensors into which changed parameters are pulled in the same round trip.
            take: True to receive the next ticket with the answer, if a ticket is available now.
            record: plain values about the ticket's piece, which `records` returns.

        Raises:
            ServerRefused: the push contains NaN, wrong shapes or wrong names. Nothing was applied.
        """
        if into is not None:
            self._note(into)
        if unknown := gradients.keys() - self._specs.keys():
            raise ServerRefused(
                "server.tensors_unowned",
                "{client} pushed {tensors}, which no server owns",
                client=self.name,
                tensors=list(sorted(unknown)[:8]),
            )
        pushes = [self._push_for(part, gradients, ticket, delta) for part in range(len(self.lines))]
        actions: list[Action] = [msgspec.structs.replace(pushes[0], take=take, record=record), *pushes[1:]]
        try:
            replies = self._act(actions, pull=into is not None, first_last=ticket is not None)
        except NoMember:
            self.join()
            if ticket is None:
                raise
            # some servers may already have applied the push; these servers ignore the repetition
            replies = self._act(actions, pull=into is not None, first_last=True)
        if into is not None:
            if all(len(reply) > 4 for reply in replies):
                self._received([reply[4:] for reply in replies], into)
            else:  # other clients have not pushed yet
                self.pull(into)
        version, accepted, staleness, dealt = replies[0][:4]
        return Pushed(version, staleness, accepted, None if dealt is None else Ticket(*dealt))

    def take(self) -> Ticket | None:
        """Wait for a ticket; return None if all tickets up to the boundary are applied."""
        (reply,) = self._act([Take()])
        return None if reply[3] is None else Ticket(*reply[3])

    def open(self, until_batch: int, recorded: int = 0) -> None:
        """Allow tickets of global batches below `until_batch`; the largest value of all calls counts.

        Args:
            recorded: number of global batches whose records are no longer needed.
        """
        self._act([Open(until_batch, recorded)])

    def records(self, number: int) -> tuple[int, list[tuple[int, list[Any]]]]:
        """Return the next record number, and all tickets and records since a given number."""
        behind, found = self.lines[0].ask("records", number).result()
        return behind, [(ticket, record) for ticket, record in found]

    def begin_sum(
        self,
        number: int,
        tensor: Tensor,
        *,
        index: int,
        members: int,
        bucket: int = 0,
        coded: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Begin a sum over all members.

        The returned function waits for the sum, and writes the sum into the tensor.

        Args:
            number: number of the step.
            bucket: number of the gradient bucket. `number` and `bucket` identify the sum.
            coded: encoded bytes to send instead of the tensor.
            index: index of this member among `members`. Tensors are added in this order, so every run gets the same
                sum.

        Raises:
            DeadlineError: some members did not contribute; the error lists their indices.
            ServerRefused: the members' tensors differ in shape or dtype.
        """
        line = self.lines[bucket % len(self.lines)]
        sent, numel = (tensor, 0) if coded is None else (coded, tensor.numel())
        asked = line.ask("sum", [number, bucket], index, members, sent, numel, waits_s=self.deadline_s)

        def result() -> Tensor:
            tensor.copy_(asked.result())
            return tensor

        return result

    def statistics(self) -> list[dict[str, Any]]:
        """Return the counters of each server and its clients."""
        return [asked.result() for asked in [line.ask("statistics") for line in self.lines]]

    def state(self) -> dict[str, Any]:
        """Return each server's state, and the number of applied global batches, for a checkpoint."""
        parts = [asked.result() for asked in [line.ask("state") for line in self.lines]]
        return {"parts": [part["parameters"] for part in parts], "batches": parts[0]["batches"]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. One client calls this at a boundary."""
        if len(state["parts"]) != len(self.lines):
            raise ServerRefused(
                "server.state_of_other_servers",
                "the state was saved by {saved} servers, but this run has {here} servers",
                saved=len(state["parts"]),
                here=len(self.lines),
            )
        self._act([Load(part, state["batches"]) for part in state["parts"]])
        self._places.clear()
        self._tables.clear()

    def close(self) -> None:
        """Close the connections. The membership continues for the grace time; `leave` ends it immediately."""
        for line in self.lines:
            line.close()

    def _push_for(self, part: int, gradients: Mapping[str, Tensor], ticket: Ticket | None, delta: bool) -> Push:
        dense, rows = {}, {}
        for piece in self.lines[part].owned:
            if (gradient := gradients.get(piece.name)) is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                numbers = gradient.indices()[0]
                mine = (numbers >= piece.first) & (numbers < piece.stop)
                rows[piece.name] = (numbers[mine] - piece.first, gradient.values()[mine])
            else:
                dense[piece.name] = piece.cut(gradient)
        push = Push(dense, rows, self.lines[part].read, ticket and (ticket.number, ticket.attempt), delta)
        return push if self._encode is None or not dense else self._coded(part, push, self._encode)

    def _coded(self, part: int, push: Push, encode: Encode) -> Push:
        names = list(push.dense)
        numbers = torch.cat([push.dense[name].reshape(-1) for name in names])
        coded = encode(f"{part}/{','.join(names)}", numbers)
        return push if coded is None else msgspec.structs.replace(push, dense={}, coded=(names, coded))

    def _note(self, into: Mapping[str, Tensor]) -> None:
        """Request a full pull if tensors differ from the last pulled values."""
        if missing := {spec.name for spec in self._specs.values() if not spec.sparse} - into.keys():
            raise ServerRefused(
                "server.pull_incomplete",
                "{client} pulled without a tensor for {missing}. Pass tensors for all dense parameters.",
                client=self.name,
                missing=list(sorted(missing)[:8]),
            )
        if not all(_as_it_was(self._places.get(name), tensor) for name, tensor in into.items()):
            for line in self.lines:
                line.since = -1

    def _note_rows(self, line: Line, version: int) -> None:
        """Record the version of pulled rows if there are no dense tensors."""
        if all(spec.sparse for spec in self._specs.values()):
            line.read = version

    def _received(self, answers: Sequence[Sequence[Any]], into: Mapping[str, Tensor]) -> Pulled:
        nbytes = 0
        for line, (version, tensors) in zip(self.lines, answers, strict=True):
            for piece in line.owned:
                if piece.name in tensors:
                    piece.cut(into[piece.name].detach()).copy_(tensors[piece.name])
                    nbytes += tensors[piece.name].nbytes
            line.read = line.since = version
        self._places = {name: _place(tensor) for name, tensor in into.items()}
        return Pulled(self.lines[0].read, nbytes)

    def _pieces(self, name: str) -> list[tuple[Line, Slice]]:
        if name not in self._specs or not self._specs[name].sparse:
            raise ServerRefused(
                "server.rows_of_dense_pulled",
                "{client} pulled rows of {tensor!r}, which is not sparse. Set sparse=True, or use pull.",
                client=self.name,
                tensor=name,
            )
        return [(line, piece) for line in self.lines for piece in line.owned if piece.name == name]

    def _act_everywhere(self, action: Action) -> list[list[Any]]:
        return self._act([action] * len(self.lines))

    def _act(self, actions: Sequence[Action], pull: bool = False, first_last: bool = False) -> list[list[Any]]:
        """Send one action to each of the first servers, and return their replies.

        Args:
            first_last: True to send the action to the first server, which deals tickets, after all other servers. If
                the client dies in between, no ticket counts as applied before all servers have applied it.
        """
        self._sequence += 1

        def asked(lines: Sequence[tuple[Line, Action]]) -> list[list[Any]]:
            begun = [
                line.ask(
                    "act", self._sequence, plain(action), waits_s=MOST_WAIT_S, more=[[line.since, 0]] if pull else ()
                )
                for line, action in lines
            ]
            return [one.result() for one in begun]

        lines = list(zip(self.lines, actions, strict=False))
        if first_last:
            others = asked(lines[1:])
            return asked(lines[:1]) + others
        return asked(lines)


def _place(tensor: Tensor) -> _Place:
    return weakref.ref(tensor), tensor._version


def _as_it_was(place: _Place | None, tensor: Tensor) -> bool:
    """Return True if a tensor is the recorded tensor and was not modified."""
    return place is not None and place[0]() is tensor and place[1] == tensor._version


_CONNECT_S = (0.1, 2.0)  # first and longest timeout for each process
_PAUSE_S = 0.02


class NoMember(ServerRefused):
    """The server no longer counts this client as a member, so the client joins again."""


class Line:
    """Connection to one server, which may have several processes. Any thread may call it.

    Args:
        addresses: addresses of the server's processes, with the likely primary first.
        deadline_s: longest wait of a call for an answer from any process of the server.
        patience_s: longest wait of a call for other clients while the server answers; None means `deadline_s`.
        views: source of further addresses if no given address is the primary.

    Attributes:
        owned: rows of tensors that the server owns.
        read: version of the parameters with which the next push is computed.
        since: version that the last pull returned.
        rows_since: version that the last pull of changed rows returned, for each table.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        key: RunKey | None,
        name: str,
        identity: str,
        settings: ServerSettings,
        deadline_s: float,
        views: Views | None = None,
        patience_s: float | None = None,
    ) -> None:
        self.addresses = [name_of(address) for address in addresses]
        self._key, self.name, self._identity, self._settings = key, name, identity, settings
        self.deadline_s, self._views = deadline_s, views
        self.patience_s = deadline_s if patience_s is None else patience_s
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self.owned: list[Slice] = []
        self.read = self.since = -1
        self.rows_since: dict[str, int] = {}
        self.connected(time.monotonic() + deadline_s)

    def ask(self, function: str, *args: Any, waits_s: float | None = None, more: Sequence[Any] = ()) -> Asked:
        """Begin a call.

        Args:
            waits_s: seconds that the function may wait per request, passed after `args`.
            more: arguments that follow the seconds.
        """
        return Asked(self, function, args, waits_s, more)

    def connected(self, until: float) -> Client:
        """Return a connection to the primary, and connect if necessary. Raises ServerLost after the deadline."""
        with self._lock:
            problem: Exception | None = None
            attempt_s = _CONNECT_S[0]
            while self._client is None:
                if self._closed:
                    raise ServerLost("server.closed", "{name} has closed its connections", name=self.name)
                for text in list(self.addresses):
                    try:
                        if self._tried(text, attempt_s):
                            break
                    except (ChannelError, OSError) as error:
                        problem = error
                else:
                    if time.monotonic() > until:
                        raise ServerLost(
                            "server.lost",
                            "no process of the parameter server answers at {addresses}: {problem}",
                            addresses=list(self.addresses),
                            problem=problem or "none of them is the primary",
                        )
                    with suppress(ChannelError):
                        if self._views and (view := self._views.read()):
                            self._learn(view.addresses())
                    attempt_s = min(2 * attempt_s, _CONNECT_S[1])
                    time.sleep(_PAUSE_S)
            return self._client

    def moved(self, client: Client, addresses: Sequence[str]) -> None:
        """Look for the primary again, first at these addresses, and last at the old address."""
        with self._lock:
            if self._client is client:
                self._client = None
                client.close()
                self.addresses.remove(client.peer)
                self.addresses.append(client.peer)
            self._learn(addresses)

    def close(self) -> None:
        """Close the connection."""
        self._closed = True  # set before taking the lock, because a thread that looks for the primary holds it
        with self._lock:
            if self._client:
                self._client.close()
            self._client = None

    def _tried(self, text: str, attempt_s: float) -> bool:
        client = Client(place_of(text), self._key, name=self.name, identity=self._identity, deadline_s=attempt_s)
        try:
            status, value = client.call("hello", self._settings.fingerprint, self._settings.digest)
            if status == "refused":
                code, text = value
                raise ServerRefused.of_json({"code": code, "text": text})
            if status in ("ok", "elsewhere"):
                self._learn(value)
            if status == "ok":
                self._client = client
            return bool(status == "ok")
        finally:
            if self._client is not client:
                client.close()

    def _learn(self, addresses: Sequence[str]) -> None:
        self.addresses = list(dict.fromkeys([*addresses, *self.addresses]))


class Asked:
    """Pending call, which is repeated unchanged until a primary answers."""

    def __init__(
        self, line: Line, function: str, args: Sequence[Any], waits_s: float | None, more: Sequence[Any]
    ) -> None:
        self.line, self._function, self._args, self._waits_s, self._more = line, function, args, waits_s, more
        now = time.monotonic()
        self._until, self._waits_until = now + line.deadline_s, now + line.patience_s
        self._client: Client | None = None
        self._pending: Pending | None = None
        self._begin()

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            ServerRefused: the server refused the call; the message gives the reason.
            NoMember: this client is no longer a member of the server.
            DeadlineError: other clients did not arrive in time; the message names these clients.
            ServerLost: no process of the server answered.
        """
        while True:
            status, value = self._answer()
            match status:
                case "ok":
                    return value
                case "refused":
                    code, text = value
                    kind = NoMember if code == "server.not_a_member" else ServerRefused
                    raise kind.of_json({"code": code, "text": text})
                case "waits" if time.monotonic() > self._waits_until:
                    raise DeadlineError(
                        "server.deadline",
                        "{server} gave up after {patience_s:g} s: {reason}",
                        server=self.line.name,
                        patience_s=self.line.patience_s,
                        reason=value,
                    )
                case "waits":
                    self._until = time.monotonic() + self.line.deadline_s  # the server has answered
                    time.sleep(_PAUSE_S)
                case "elsewhere":
                    assert self._client is not None
                    self.line.moved(self._client, value)
            self._begin()

    def _begin(self) -> None:
        """Send the call. Errors are raised later, when the answer is requested."""
        self._client = self.line.connected(self._until)
        now = time.monotonic()
        left_s = max(0.0, self._until - now)
        wait = [] if self._waits_s is None else [min(self._waits_s, max(0.0, self._waits_until - now))]
        try:
            self._pending = self._client.begin(
                self._function, *self._args, *wait, *self._more, deadline_s=min(self._attempt_s(), left_s + MOST_WAIT_S)
            )
        except ChannelError:
            self._pending = None

    def _answer(self) -> Any:
        """Return the answer of the server, or "elsewhere" if the server does not answer."""
        if self._pending is None:
            return "elsewhere", []
        try:
            return self._pending.result()
        except ChannelError as error:
            if isinstance(error, DeadlineError) and time.monotonic() > self._until:
                raise ServerLost("server.unreachable", "{error}", error=error) from None
            return "elsewhere", []

    def _attempt_s(self) -> float:
        return 2 * MOST_WAIT_S + (self._waits_s or 0.0) + nbytes(self._args) / SLOWEST_BYTES_PER_S
