"""Client of the parameter servers of a run: it pulls, pushes, takes tickets and sums.

An operation has its number before it is sent, and keeps it however often it is sent again, to whichever process of the
server answers: so it is applied once. Large tensors are cut between the servers by `settings.slices_of`.
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
_Place = tuple[weakref.ref[Tensor], int]  # a tensor, and which of its changes was the last


class Pushed(NamedTuple):
    """Result of a push.

    Attributes:
        version: of the first server's parameters, after it.
        staleness: steps since the version that the push was computed with.
        accepted: False: the ticket was dealt to another client meanwhile, and nothing was applied.
        next: a ticket that was dealt with the answer, where one was asked for and there was one.
    """

    version: int
    staleness: int
    accepted: bool
    next: Ticket | None = None


class Pulled(NamedTuple):
    """Result of a pull: the first server's version, and the bytes that came."""

    version: int
    nbytes: int


class ServerClient(Closing):
    """A client of all servers of a run. Except for sums, only one thread at a time may call it.

    Args:
        servers: for each server the addresses of its processes, in any order; more are learnt at each connection.
        views: views of each server, to find processes that were started later.
        name: unique among living clients; a client that connects under the same name replaces the earlier one.
        deadline_s: longest time of each call without an answer from the server.
        patience_s: longest time of each call that waits for other clients; None: the deadline.
        encode: codes the dense numbers of a push, given a name for them; None sends them uncoded.

    Raises:
        ServerRefused: the servers have another model or other settings.
        ServerLost: a server is not reached in time.
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
        self._places: dict[str, _Place] = {}  # of the last pull
        self._tables: dict[str, _Place] = {}  # of the last pulls of changed rows
        self._sequence = 0

    def join(self) -> int:
        """Become a member; returns the version."""
        return int(self._act_everywhere(Join())[0][0])

    def leave(self) -> None:
        """End the membership. Tickets that are held are dealt again."""
        self._act_everywhere(Leave())

    def initialize(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the parameters their first values; where another client has, nothing changes."""
        parts = [{piece.name: piece.cut(tensors[piece.name]) for piece in line.owned} for line in self.lines]
        self._act([Initialize(part) for part in parts])

    def pull(self, into: Mapping[str, Tensor], *, at_least: int = 0) -> Pulled:
        """Copy the dense parameters into tensors of the same names.

        Where these are the tensors of the last pull, as it left them, only what has changed since comes.

        Args:
            into: all of them.
            at_least: global batches that must be in them; wait until they are (`Ticket.needs`).
        """
        self._note(into)
        asked = [line.ask("pull", line.since, at_least, waits_s=MOST_WAIT_S) for line in self.lines]
        return self._received([one.result() for one in asked], into)

    def pull_rows(self, name: str, rows: Tensor, *, at_least: int = 0) -> Tensor:
        """Rows of a sparse tensor, in the order asked for."""
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
                "{client} named rows that {tensor} does not have; it has {rows}",
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

        All of them where this is another tensor, or was changed. Returns how many.
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
        """Push gradients, dense or sparse (COO), or with `delta` changes of the parameters.

        Args:
            into: tensors into which what has changed is pulled, in the same round trip.
            take: have the next ticket with the answer, where there is one now.
            record: plain values about the ticket's piece, kept with it for `records`.

        Raises:
            ServerRefused: NaN, wrong shapes or names. Nothing was applied.
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
            # which of the servers have it already is not known: those take it no second time
            replies = self._act(actions, pull=into is not None, first_last=True)
        if into is not None:
            if all(len(reply) > 4 for reply in replies):
                self._received([reply[4:] for reply in replies], into)
            else:  # others have not pushed yet
                self.pull(into)
        version, accepted, staleness, dealt = replies[0][:4]
        return Pushed(version, staleness, accepted, None if dealt is None else Ticket(*dealt))

    def take(self) -> Ticket | None:
        """Take a ticket, waited for; None: all tickets up to the boundary are applied."""
        (reply,) = self._act([Take()])
        return None if reply[3] is None else Ticket(*reply[3])

    def open(self, until_batch: int, recorded: int = 0) -> None:
        """Allow tickets of global batches below `until_batch`; the largest of all calls counts.

        Args:
            recorded: global batches whose records are needed no more.
        """
        self._act([Open(until_batch, recorded)])

    def records(self, number: int) -> tuple[int, list[tuple[int, list[Any]]]]:
        """Tickets and records of applied pieces from a number on; first, the number behind them."""
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
        """Begin a sum over all members; call the result for it. The tensor holds the sum then.

        Args:
            number, bucket: identity of the sum: number of the step, and of the bucket of gradients.
            coded: sent instead of the tensor.
            index: of this member among `members`. The sum is taken in this order, so it is the same in every run.

        Raises:
            DeadlineError: some members contributed nothing; the error names their indices.
            ServerRefused: the members' tensors do not fit together.
        """
        line = self.lines[bucket % len(self.lines)]
        sent, numel = (tensor, 0) if coded is None else (coded, tensor.numel())
        asked = line.ask("sum", [number, bucket], index, members, sent, numel, waits_s=self.deadline_s)

        def result() -> Tensor:
            tensor.copy_(asked.result())
            return tensor

        return result

    def statistics(self) -> list[dict[str, Any]]:
        """Counts of each server and its clients."""
        return [asked.result() for asked in [line.ask("statistics") for line in self.lines]]

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state of each server, and the global batches applied, for a checkpoint."""
        parts = [asked.result() for asked in [line.ask("state") for line in self.lines]]
        return {"parts": [part["parameters"] for part in parts], "batches": parts[0]["batches"]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, by one client and at a boundary."""
        if len(state["parts"]) != len(self.lines):
            raise ServerRefused(
                "server.state_of_other_servers",
                "the state is of {saved} servers, but there are {here}",
                saved=len(state["parts"]),
                here=len(self.lines),
            )
        self._act([Load(part, state["batches"]) for part in state["parts"]])
        self._places.clear()
        self._tables.clear()

    def close(self) -> None:
        """Hang up. The membership stays a while: `leave` ends it."""
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
        """Have everything pulled where tensors come that do not hold what was pulled last."""
        if missing := {spec.name for spec in self._specs.values() if not spec.sparse} - into.keys():
            raise ServerRefused(
                "server.pull_incomplete",
                "{client} pulled without a tensor for {missing}. Name all.",
                client=self.name,
                missing=list(sorted(missing)[:8]),
            )
        if not all(_as_it_was(self._places.get(name), tensor) for name, tensor in into.items()):
            for line in self.lines:
                line.since = -1

    def _note_rows(self, line: Line, version: int) -> None:
        """Note the version of rows, where there are no dense tensors that say which."""
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
                "{client} pulled rows of {tensor!r}, which has no rows. Set sparse=True, or use pull.",
                client=self.name,
                tensor=name,
            )
        return [(line, piece) for line in self.lines for piece in line.owned if piece.name == name]

    def _act_everywhere(self, action: Action) -> list[list[Any]]:
        return self._act([action] * len(self.lines))

    def _act(self, actions: Sequence[Action], pull: bool = False, first_last: bool = False) -> list[list[Any]]:
        """Have the first servers apply an action each; returns their replies.

        Args:
            first_last: the first server, which deals tickets, gets its action when all others have theirs. So a client
                that dies between leaves no ticket that counts as applied, and is not everywhere.
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
    """True if it is the tensor that was noted, and nobody has changed it."""
    return place is not None and place[0]() is tensor and place[1] == tensor._version


_CONNECT_S = (0.1, 2.0)  # for each process, at first and at most
_PAUSE_S = 0.02


class NoMember(ServerRefused):
    """The server has given up this client: it joins again."""


class Line:
    """Calls to one server, which may be several processes. Any thread may call.

    Args:
        addresses: of its processes, the likely primary first.
        deadline_s: longest time of a call without an answer from any process of the server.
        patience_s: longest time that a call waits for other clients while the server answers; None: the deadline.
        views: finds more addresses if none of these is the primary.

    Attributes:
        owned: rows of tensors that the server owns.
        read: version of the parameters with which the next push is computed.
        since: version of the tensors of the last pull.
        rows_since: version of each table in the last pull of changed rows.
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
            waits_s: the function takes, behind `args`, the seconds that it may wait: these, before it is asked again.
            more: arguments behind these.
        """
        return Asked(self, function, args, waits_s, more)

    def connected(self, until: float) -> Client:
        """A connection to the primary, made where there is none. Raises ServerLost when the time is over."""
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
        """Look for the primary anew, these addresses first, and last the one that was."""
        with self._lock:
            if self._client is client:
                self._client = None
                client.close()
                self.addresses.remove(client.peer)
                self.addresses.append(client.peer)
            self._learn(addresses)

    def close(self) -> None:
        """Hang up."""
        self._closed = True  # before the lock, which a thread holds that looks for the primary
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
    """A call under way, repeated as it is until a primary has answered it."""

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
        """The answer.

        Raises:
            ServerRefused, NoMember: the server says why.
            DeadlineError: others have not come in time; the server names them.
            ServerLost: no process of the server answers.
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
                        "{server} waited {patience_s:g} s: {reason}",
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
        """Send the call. A failure is looked at when the answer is asked for."""
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
        """Answer of the server; "elsewhere" where there is none."""
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
