"""Process of a parameter server, which handles clients' calls through the log, and sums."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch import Tensor

from paceline.errors import ChannelError, DeadlineError, ServerRefused
from paceline.wire.key import RunKey, name_of
from paceline_server.parameters.log import Address, Elsewhere, Log, Views, wait_for
from paceline_server.parameters.machine import Action, Leave, Machine, Operation, Push, Reply, read_action
from paceline_server.parameters.parameters import rows_must_be_owned
from paceline_server.parameters.settings import ServerSettings
from paceline_server.service import Caller, Limits, Service
from paceline_server.talk import LATER, Closing, at_once, quick

GRACE_S = 5.0  # grace time of a client without a connection
MOST_WAIT_S = 1.0  # longest wait in the server; the client then repeats the call, and thereby detects a hanging server
_MOST_SUM_S = 3600.0
# functions that may wait, with the index of the argument that limits the wait
_WAITS = {"act": 2, "pull": 2, "pull_rows": 4}
Decode = Callable[[Tensor, int], Tensor]
_LIMITS = Limits(message_bytes=2**22, attached_bytes=2**34, calls_at_once=256, callers=4096)


class ParameterServer(Closing):
    """Server of one part of the parameters, as the primary or as the backup.

    Args:
        where: see `Service`.
        key: see `Service`.
        part: index of this server. Only server 0 deals tickets.
        servers: number of servers.
        views: views that determine the primary. The first process with these views is the primary, and the next is its
            backup. None if this process is the only one.
        grace_s: time without a connection after which a client is lost, and its tickets are dealt again.
        threads: number of clients that may wait at the same time; see `Service`.
        decode: function that decodes tensors, given their bytes and the count of numbers. Raises ServerRefused.
    """

    def __init__(
        self,
        where: Any,
        key: RunKey | None,
        settings: ServerSettings,
        *,
        part: int = 0,
        servers: int = 1,
        views: Views | None = None,
        grace_s: float = GRACE_S,
        threads: int = 64,
        decode: Decode | None = None,
    ) -> None:
        self._settings, self._decode = settings, decode
        self._name, self._identity, self._sequence = f"parameter server {part}", secrets.token_hex(8), 0
        self._sums = Sums()
        self._traffic: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"sent_bytes": 0, "refused": 0})
        self._log = Log(
            lambda: Machine(settings, servers, part), views or Views(), key, self._name, self._expect_members
        )
        self._turn = self._log.turn
        self.ended = threading.Event()
        self._service = Service(
            where,
            key,
            self._functions(),
            threads=threads,
            limits=_LIMITS,
            grace_s=grace_s,
            on_lost=lambda caller: self._lose(caller.name, caller.identity),
        )
        self.address: Address = self._service.address
        self._log.start(name_of(self.address))

    @property
    def has_backup(self) -> bool:
        """True while another process also has every answered operation."""
        return self._log.has_backup

    @property
    def unauthenticated(self) -> int:
        """Number of connections without the run's key."""
        return self._service.unauthenticated

    @property
    def callers(self) -> int:
        """Number of active connections."""
        return self._service.callers

    def statistics(self) -> dict[str, Any]:
        """Return counters of each client and of the server, for the report."""
        with self._turn:
            machine = self._log.machine
            clients = machine.clients.statistics()
            for name, counts in clients.items():
                counts |= self._traffic[name]
            return {
                "clients": clients,
                "version": machine.parameters.version,
                "operations": self._log.index,
                "batches": machine.tickets.batches if machine.tickets else 0,
                "generation": self._log.generation,
                "backup": self.has_backup,
                "unauthenticated": self.unauthenticated,
            }

    def expel(self, name: str) -> None:
        """End the membership of a lost client. On the backup this has no effect."""
        self._lose(name)

    def close(self) -> None:
        """Stop serving. Waiting clients get an error."""
        self._log.close()
        self._service.close()
        self.ended.set()

    def _functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions for clients. Answers are ["ok", value], or the reason for a refusal."""
        functions: dict[str, Callable[..., Any]] = {
            "hello": self._hello,
            "act": self._act,
            "pull": self._pull,
            "pull_rows": self._pull_rows,
            "sum": self._sum,
            "statistics": lambda caller: self.statistics(),
            "state": self._state,
            "records": self._records,
            "attend": self._log.attend,
            "beat": self._log.beat,
        }
        ordered: dict[str, Callable[..., Any]] = {
            "install": self._log.install,
            "repeat": self._log.repeat,
            "alive": self._log.alive,
        }  # these functions never wait
        told = {name: self._told(function) for name, function in functions.items()}
        for name, place in _WAITS.items():
            at_once(told[name], self._trial(told[name], place))
        return told | {name: quick(self._told(function)) for name, function in ordered.items()}

    def _trial(self, told: Callable[..., list[Any]], place: int) -> Callable[..., Any]:
        """Make a trial of a function, which answers only if no wait is necessary."""

        def answer(caller: Caller, *args: Any) -> Any:
            if self._log.is_copied:
                return LATER
            found = told(caller, *args[:place], 0.0, *args[place + 1 :])
            return LATER if found[0] == "waits" else found

        return answer

    def _told(self, function: Callable[..., Any]) -> Callable[..., list[Any]]:
        """Wrap a function so that it returns refusals as values, without a traceback."""

        def answer(caller: Caller, *args: Any) -> list[Any]:
            try:
                return ["ok", function(caller, *args)]
            except Elsewhere:
                return self._elsewhere()
            except ServerRefused as error:
                return self._refused(caller, error)
            except ChannelError as error:  # the function waited for other clients, or the primary is unknown
                return ["waits", str(error)]

        return answer

    def _elsewhere(self) -> list[Any]:
        view = self._log.view
        return ["elsewhere", view.addresses() if view else []]

    def _refused(self, caller: Caller, error: ServerRefused) -> list[Any]:
        """Return a refusal, unless this process is deposed and its state is stale."""
        try:
            if self._log.primary:
                self._log.verify()
        except Elsewhere:
            return self._elsewhere()
        except ChannelError as unknown:
            return ["waits", str(unknown)]
        with self._turn:
            self._traffic[caller.name]["refused"] += 1
        return ["refused", [error.code, str(error)]]

    def _hello(self, caller: Caller, fingerprint: str, digest: str) -> list[str]:
        """Return the addresses of this server's processes to a client with the same settings."""
        if fingerprint != self._settings.fingerprint:
            raise ServerRefused(
                "server.other_model",
                "the model of {caller} ({fingerprint}) differs from the model of this server ({own}). Start both "
                "from the same job.",
                caller=caller.name,
                fingerprint=fingerprint[:16],
                own=self._settings.fingerprint[:16],
            )
        if digest != self._settings.digest:
            raise ServerRefused(
                "server.settings_differ",
                "{caller} and this parameter server have different settings. Start both from the same job.",
                caller=caller.name,
            )
        with self._turn:
            self._log.must_be_primary()
        self._log.verify()
        with self._turn:
            assert self._log.view is not None
            return self._log.view.addresses()

    def _act(self, caller: Caller, sequence: int, values: Any, wait_s: float, pull: Sequence[int] = ()) -> list[Any]:
        """Apply an operation once, even if it is repeated, and then pull if requested."""
        operation = Operation(caller.name, caller.identity, sequence, self._decoded(read_action(values)))
        self._log.machine.must_fit(operation)
        until = time.monotonic() + min(wait_s, MOST_WAIT_S)
        with self._turn:
            reply = wait_for(self._turn, lambda: self._attempt(operation), until)
            mark = self._log.mark()
        self._log.confirm(mark)
        if not pull:
            return _as_list(reply)
        try:
            return [*_as_list(reply), *self._pull(caller, pull[0], pull[1], until - time.monotonic())]
        except DeadlineError:  # the push itself is answered, and the client pulls separately
            return _as_list(reply)

    def _decoded(self, action: Action) -> Action:
        """Decode the tensors of a push. Raises ServerRefused."""
        if not isinstance(action, Push) or action.coded is None:
            return action
        names, coded = action.coded
        specs = self._log.machine.parameters.specs
        if self._decode is None or not set(names) <= specs.keys() or len(set(names)) < len(names):
            raise ServerRefused(
                "server.coded_tensors_unowned",
                "a push contains encoded tensors, but this server does not own these tensors or has no codec",
            )
        sizes = [math.prod(specs[name].shape) for name in names]
        parts = self._decode(coded, sum(sizes)).split(sizes)
        dense = {
            name: part.view(specs[name].shape).to(specs[name].torch_dtype)
            for name, part in zip(names, parts, strict=True)
        }
        return replace(action, dense={**action.dense, **dense}, coded=None, coded_bytes=coded.nbytes)

    def _attempt(self, operation: Operation) -> Reply | str:
        self._log.must_be_primary()
        machine = self._log.machine
        if (reply := machine.known(operation)) is not None:
            return reply
        machine.check(operation)
        return machine.waits(operation) or self._log.commit(operation)

    def _pull(self, caller: Caller, since: int, batches: int, wait_s: float) -> list[Any]:
        """Return the version, and the dense tensors that changed after `since`."""
        with self._turn:
            self._wait_until_readable(batches, wait_s)
            parameters = self._log.machine.parameters
            tensors = {name: parameters.snapshot(name) for name in parameters.changed_since(since)}
            if since > parameters.version:
                raise ServerRefused(
                    "server.version_ahead",
                    "{caller} has seen version {seen}, but this server is at version {version}",
                    caller=caller.name,
                    seen=since,
                    version=parameters.version,
                )
            version, mark = parameters.version, self._log.mark()
            self._traffic[caller.name]["sent_bytes"] += sum(tensor.nbytes for tensor in tensors.values())
        self._log.confirm(mark)
        return [version, tensors]

    def _pull_rows(
        self, caller: Caller, name: str, rows: Tensor | None, since: int, batches: int, wait_s: float
    ) -> list[Any]:
        """Return the version, and the requested sparse rows or all rows changed after `since`."""
        spec = self._log.machine.parameters.specs.get(name)
        if spec is None or not spec.sparse:
            raise ServerRefused(
                "server.rows_of_dense",
                "{caller} pulled rows of {tensor!r}, which is not sparse on this server. Set sparse=True, or use pull.",
                caller=caller.name,
                tensor=name,
            )
        if rows is not None:
            rows_must_be_owned(rows, spec, caller.name)
        with self._turn:
            self._wait_until_readable(batches, wait_s)
            parameters = self._log.machine.parameters
            numbers = parameters.rows_since(name, since) if rows is None else rows
            values, version, mark = parameters.rows(name, numbers), parameters.version, self._log.mark()
            self._traffic[caller.name]["sent_bytes"] += values.nbytes + (numbers.nbytes if rows is None else 0)
        self._log.confirm(mark)
        return [version, numbers if rows is None else None, values]

    def _sum(
        self,
        caller: Caller,
        place: list[int],
        index: int,
        members: int,
        tensor: Tensor,
        numel: int,
        wait_s: float,
    ) -> Tensor:
        """Contribute a tensor to a sum.

        Args:
            numel: number of elements of an encoded tensor; 0 if the tensor is not encoded.
        """
        if numel:
            if self._decode is None:
                raise ServerRefused(
                    "server.sum_coded", "a sum contains encoded tensors, but this server has no codec to decode them"
                )
            tensor = self._decode(tensor, numel)
        total = self._sums.add(Place(*place), index, members, tensor, min(wait_s, _MOST_SUM_S))
        with self._turn:
            self._traffic[caller.name]["sent_bytes"] += total.nbytes
        return total

    def _state(self, caller: Caller) -> dict[str, Any]:
        with self._turn:
            self._log.must_be_primary()
            machine = self._log.machine
            state, mark = machine.parameters.state(), self._log.mark()
            batches = machine.tickets.batches if machine.tickets else 0
        self._log.confirm(mark)
        return {"parameters": state, "batches": batches}

    def _records(self, caller: Caller, number: int) -> list[Any]:
        with self._turn:
            self._log.must_be_primary()
            records, mark = self._log.machine.records_since(number), self._log.mark()
        self._log.confirm(mark)
        return records

    def _wait_until_readable(self, batches: int, wait_s: float) -> None:
        def readable() -> bool | str:
            self._log.must_be_primary()
            return self._log.machine.read_waits(batches) or True

        wait_for(self._turn, readable, time.monotonic() + min(wait_s, MOST_WAIT_S))

    def _expect_members(self) -> None:
        """Treat members as lost if they do not connect to the new primary in time."""
        for name, identity in self._log.machine.clients.members.items():
            self._service.presence.expect(Caller(name, identity, ""))

    def _lose(self, name: str, identity: str | None = None) -> None:
        with self._turn:
            member = self._log.machine.clients.members.get(name)
            if self._log.primary and member is not None and identity in (None, member):
                self._sequence += 1
                self._log.commit(Operation(self._name, self._identity, self._sequence, Leave(name)))


def _as_list(reply: Reply) -> list[Any]:
    ticket = None if reply.ticket is None else list(reply.ticket)
    return [reply.version, reply.accepted, reply.staleness, ticket]


_MOST_MEMBERS = 2**16
_MOST_UNDER_WAY = 4096  # maximum number of sums in progress


class Place(NamedTuple):
    """Identity of a sum. A step has one sum per bucket."""

    number: int
    bucket: int


class Sums:
    """Sums over clients, which are neither stored nor replicated.

    Each client contributes a tensor and receives the sum. Tensors are added in the order of the clients' indices, so
    the sum is the same in every run and bit-equal on all clients. The threads of the callers add the tensors.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._under_way: dict[Place, _Sum] = {}

    def add(self, place: Place, index: int, members: int, tensor: Tensor, wait_s: float) -> Tensor:
        """Contribute a tensor, and wait for the sum.

        Raises:
            ServerRefused: the tensor differs in shape or dtype from the tensors of other clients.
            DeadlineError: some clients did not contribute in time; the error lists their indices. Repeat the call with
                the same tensor.
        """
        until = time.monotonic() + wait_s
        with self._turn:
            if place not in self._under_way:
                if not 0 < members <= _MOST_MEMBERS or len(self._under_way) >= _MOST_UNDER_WAY:
                    raise ServerRefused(
                        "server.too_many_sums",
                        "a sum over {members} clients cannot start: a server accepts 1 to {most_members} clients per "
                        "sum and {most_sums} sums at a time, and {others} sums are in progress",
                        members=members,
                        most_members=_MOST_MEMBERS,
                        most_sums=_MOST_UNDER_WAY,
                        others=len(self._under_way),
                    )
                self._under_way[place] = _Sum(members)
            held = self._under_way[place]
            held.take(index, members, tensor)
            if held.missing == []:
                self._turn.notify_all()
            while held.missing:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(
                        "server.sum_deadline",
                        "no tensor arrived from clients {missing} for sum {number}.{bucket}",
                        missing=held.missing[:8],
                        number=place.number,
                        bucket=place.bucket,
                    )
                self._turn.wait(left_s)
            assert held.total is not None
            self._forget_before(place)
            return held.total

    def _forget_before(self, place: Place) -> None:
        """Remove sums of two steps ago. Members of a step already have the previous step's sums."""
        for old in [p for p in self._under_way if p.number < place.number - 1]:
            del self._under_way[old]


class _Sum:
    """One sum. A tensor is added as soon as all tensors with lower indices are added."""

    def __init__(self, members: int) -> None:
        self.members, self.total = members, None
        self._next = 0  # index to add next
        self._waiting: dict[int, Tensor] = {}

    total: Tensor | None

    @property
    def missing(self) -> list[int]:
        """Indices of the clients that have not contributed."""
        return [index for index in range(self._next, self.members) if index not in self._waiting]

    def take(self, index: int, members: int, tensor: Tensor) -> None:
        """Take over the tensor of one client with its memory. A repeated call has no effect."""
        if members != self.members or not 0 <= index < members:
            raise ServerRefused(
                "server.sum_members_differ",
                "client {index} of {members} sent a tensor for a sum over {expected} clients",
                index=index,
                members=members,
                expected=self.members,
            )
        if index < self._next or index in self._waiting:
            return
        first = self.total if self.total is not None else next(iter(self._waiting.values()), tensor)
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ServerRefused(
                "server.sum_shapes_differ",
                "client {client} sent {shape} {dtype} for a sum of {expected} {expected_dtype}",
                client=index,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                expected=tuple(first.shape),
                expected_dtype=first.dtype,
            )
        self._waiting[index] = tensor
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self.total = ready if self.total is None else self.total.add_(ready)
            self._next += 1
