"""The state machine: whatever is repeated, reordered or lost, and whoever dies, each push is applied once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from paceline.errors import ServerRefused
from paceline_server.parameters.machine import (
    Action,
    Initialize,
    Join,
    Leave,
    Load,
    Machine,
    Open,
    Operation,
    Push,
    Reply,
    Take,
    Ticket,
    plain,
    read_action,
)
from paceline_server.parameters.settings import ServerSettings, TensorSpec, slices_of
from paceline_server.training.worker import TrainedState, for_servers, of_servers
from refusals import raises

SGD = {"name": "sgd", "lr": 1.0}


def settings_of(*tensors: TensorSpec, optimizer: dict[str, Any] = SGD, **values: Any) -> ServerSettings:
    tensors = tensors or (TensorSpec("w", (4,), "float64"),)
    return ServerSettings(tensors, optimizer, **values)


class Asker:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name, self.identity, self.sequence = machine, name, f"{name}'s", 0

    def ask(self, action: Action, sequence: int | None = None) -> Reply:
        self.sequence = self.sequence + 1 if sequence is None else sequence
        return asked(self.machine, Operation(self.name, self.identity, self.sequence, action))


def asked(machine: Machine, operation: Operation) -> Reply:
    machine.must_fit(operation)
    if (reply := machine.known(operation)) is not None:
        return reply
    machine.check(operation)
    assert (waits := machine.waits(operation)) is None, waits
    return machine.apply(operation)


def started(settings: ServerSettings, *names: str) -> list[Asker]:
    machine = Machine(settings)
    askers = [Asker(machine, name) for name in names or ("a",)]
    for asker in askers:
        asker.ask(Join())
    askers[0].ask(Initialize({spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in settings.tensors}))
    return askers


def push(values: list[float], read: int = 0, **more: Any) -> Push:
    return Push({"w": torch.tensor(values, dtype=torch.float64)}, {}, read, **more)


def weights(machine: Machine) -> list[float]:
    return machine.parameters.tensors["w"].tolist()


def test_a_push_that_comes_again_is_applied_once_and_answered_as_before() -> None:
    (a,) = started(settings_of())
    first = a.ask(push([1, 2, 3, 4]))
    again = a.ask(push([1, 2, 3, 4]), sequence=a.sequence)
    assert first == again
    assert weights(a.machine) == [-1, -2, -3, -4]


def test_a_push_that_was_overtaken_by_the_clients_next_one_is_refused() -> None:
    (a,) = started(settings_of())
    a.ask(push([1, 0, 0, 0]))
    with raises(ServerRefused, "server.operation_repeated", newest=3, sequence=2):
        a.ask(push([9, 0, 0, 0]), sequence=2)
    assert weights(a.machine)[0] == -1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (push([1, 2, 3]), r"w with shape \(3,\) instead of \(4,\)"),
        (push([1, 2, math.nan, 4]), "NaN or Inf in w"),
        (push([1, 2, math.inf, 4]), "NaN or Inf in w"),
        (push([1e308] * 3 + [-math.inf]), "NaN or Inf in w"),
        (Push({"v": torch.zeros(4)}, {}, 0), "'v', which this server does not own; it owns w"),
        (Push({"w": torch.zeros(4)}, {}, 0), "torch.float32 instead of torch.float64"),
        (Push({}, {}, 0), "sent an empty push"),
        (Push({}, {"w": (torch.tensor([0]), torch.zeros(1, dtype=torch.float64))}, 0), "rows of w, which is dense"),
        (push([1, 2, 3, 4], read=7), "version 7, but this server is only at version 1"),
        (push([1, 2, 3, 4], read=-1), "version -1"),
        (push([1, 2, 3, 4], ticket=(0, 0)), "this server gives none"),
        (Take(), "does not issue any. Set pieces"),
        (Leave("a"), ""),
    ],
)
def test_a_wrong_push_is_refused_and_changes_nothing(wrong: Action, told: str) -> None:
    (a,) = started(settings_of())
    a.ask(push([1, 1, 1, 1]))
    if told:
        with pytest.raises(ServerRefused, match=told):
            a.ask(wrong)
    else:  # who has left, or was lost, is told so
        a.ask(wrong)
        with raises(ServerRefused, "server.not_a_member"):
            a.ask(push([1, 1, 1, 1]))
    assert weights(a.machine) == [-1, -1, -1, -1]
    assert a.machine.parameters.version == 1


def test_finite_values_whose_sum_overflows_are_no_nan() -> None:
    (a,) = started(settings_of())
    assert a.ask(push([1e308, 1e308, 1e308, 1e308])).accepted


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (-1, "server.row_out_of_range"),
        (3, "server.row_out_of_range"),
        (0.5, "server.rows_type"),
        (None, "server.rows_shape"),
    ],
)
def test_a_row_that_does_not_exist_is_refused(row: float | None, code: str) -> None:
    (a,) = started(settings_of(TensorSpec("e", (3, 2), sparse=True)))
    rows = torch.tensor([0] if row is None else [row], dtype=torch.float64 if row == 0.5 else torch.int64)
    with raises(ServerRefused, code):
        a.ask(Push({}, {"e": (rows, torch.ones(1, 3 if row is None else 2))}, 0))


def test_a_late_push_takes_a_smaller_step() -> None:
    (a,) = started(settings_of())
    for _ in range(3):
        reply = a.ask(push([1, 0, 0, 0], read=0))
    assert reply.staleness == 2
    assert weights(a.machine)[0] == -(1 + 1 + 1 / 2)
    assert a.machine.clients.statistics()["a"]["staleness"] == {0: 1, 1: 1, 2: 1}


def test_a_delta_is_added_to_the_parameters() -> None:
    (a,) = started(settings_of())
    a.ask(push([1, 2, 3, 4], delta=True))
    assert weights(a.machine) == [1, 2, 3, 4]


def test_a_worker_that_comes_back_under_its_name_takes_the_place_of_the_former_one() -> None:
    (a,) = started(settings_of(pieces=2))
    a.ask(Open(1))
    a.ask(Take())
    again = Asker(a.machine, "a")
    again.identity = "another process"
    again.ask(Join())
    assert again.ask(Take()).ticket == (0, 0, 0, 1, 0)
    with raises(ServerRefused, "server.not_a_member"):
        a.ask(push([1, 0, 0, 0], ticket=(0, 0)))


@pytest.mark.parametrize("expelled", [False, True])
def test_the_former_one_may_not_take_its_place_back(expelled: bool) -> None:
    (a,) = started(settings_of(pieces=2))
    a.ask(Open(1))
    a.ask(Take())
    if expelled:  # its host was taken for lost
        Asker(a.machine, "another").ask(Leave("a"))
    again = Asker(a.machine, "a")
    again.identity = "another process"
    again.ask(Join())
    kept = Machine(a.machine.settings)
    kept.load(a.machine.state())
    for machine in (a.machine, kept):
        a.machine = machine
        with raises(ServerRefused, "server.replaced", name="a"):
            a.ask(Join())
        assert machine.clients.members == {"a": "another process"}


def test_tickets_wait_for_the_batches_that_the_staleness_asks_for() -> None:
    a, b = started(settings_of(pieces=2, staleness=0), "a", "b")
    a.ask(Open(2))
    tickets = [a.ask(Take()).ticket, b.ask(Take()).ticket]
    assert tickets == [(0, 0, 0, 0, 0), (1, 0, 1, 0, 0)]
    more = Operation("a", a.identity, 9, Take())
    assert a.machine.waits(more) == "ticket 2 would run more than 0 global batches ahead of 0 (a), 1 (b)"
    a.ask(push([1, 0, 0, 0], ticket=(0, 0)))
    assert a.machine.waits(more) is not None
    b.ask(push([1, 0, 0, 0], ticket=(1, 0)))
    assert a.ask(Take()).ticket == (2, 1, 0, 0, 1)
    assert a.machine.read_waits(1) is None
    assert a.machine.read_waits(2) == "1 global batches are applied"


def test_the_boundary_is_told_when_every_ticket_is_applied() -> None:
    (a,) = started(settings_of(pieces=1))
    assert a.ask(Take()).ticket is None
    a.ask(Open(1))
    assert a.ask(Take()).ticket == (0, 0, 0, 0, 0)
    assert a.machine.waits(Operation("a", a.identity, 9, Take())) == "tickets 0 (a) are not applied yet"
    a.ask(push([1, 0, 0, 0], ticket=(0, 0)))
    assert a.ask(Take()).ticket is None


def test_a_ticket_of_a_lost_client_is_dealt_again_and_a_push_for_the_first_attempt_is_dropped() -> None:
    a, b = started(settings_of(pieces=2), "a", "b")
    a.ask(Open(1))
    a.ask(Take())
    a.ask(Leave())
    assert b.ask(Take()).ticket == (0, 0, 0, 1, 0)
    a.ask(Join())
    assert not a.ask(push([1, 0, 0, 0], ticket=(0, 0), record=["late"])).accepted
    assert b.ask(push([0, 1, 0, 0], ticket=(0, 1), record=["in time"])).accepted
    assert weights(a.machine) == [0, -1, 0, 0]
    assert a.machine.clients.statistics()["a"]["late"] == 1
    assert a.machine.records_since(0) == [1, [[0, ["in time"]]]]


def test_records_of_applied_pieces_are_kept_in_order_until_they_are_needed_no_more() -> None:
    (a,) = started(settings_of(pieces=2))
    a.ask(Open(2))
    for number in range(4):
        a.ask(Take())
        a.ask(push([1, 0, 0, 0], ticket=(number, 0), record=[number]))
    a.ask(push([1, 0, 0, 0], ticket=(3, 0), record=[3]), sequence=a.sequence)
    standby = Machine(a.machine.settings)
    standby.load(a.machine.state())
    assert standby.records_since(0) == [4, [[n, [n]] for n in range(4)]]
    assert standby.records_since(3) == [4, [[3, [3]]]]
    a.ask(Open(3, recorded=1))
    assert a.machine.records_since(0) == [4, [[2, [2]], [3, [3]]]]


def test_more_members_than_allowed_are_refused() -> None:
    askers = started(settings_of(most_members=2), "a", "b")
    with raises(ServerRefused, "server.too_many_members", limit=2, name="c"):
        Asker(askers[0].machine, "c").ask(Join())


@pytest.mark.parametrize("optimizer", [{"name": "sgd", "lr": 0.5, "momentum": 0.9}, {"name": "adam", "lr": 0.1}])
def test_sparse_rows_are_stepped_alone_as_a_dense_tensor_of_these_rows(optimizer: dict[str, Any]) -> None:
    (a,) = started(settings_of(TensorSpec("e", (5, 2), "float64", sparse=True), optimizer=optimizer))
    dense = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    reference = (torch.optim.SGD if optimizer["name"] == "sgd" else torch.optim.Adam)(
        [dense], **{key: value for key, value in optimizer.items() if key != "name"}
    )
    for step in range(3):
        rows, values = torch.tensor([3, 1, 3]), torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + step
        a.ask(Push({}, {"e": (rows, values)}, step))
        dense.grad = torch.stack([values[1], values[0] + values[2]])
        reference.step()
    table = a.machine.parameters.tensors["e"].detach()
    assert torch.equal(table[[1, 3]], dense.detach())
    assert not table[[0, 2, 4]].any()
    assert a.machine.parameters.rows_since("e", 2).tolist() == [1, 3]


def test_what_goes_over_the_wire_comes_back_the_same_and_nonsense_is_refused() -> None:
    sent = Push({"w": torch.ones(2)}, {"e": (torch.tensor([1]), torch.ones(1, 2))}, 3, (4, 1), True)
    got = read_action(plain(sent))
    assert isinstance(got, Push)
    assert (got.read, got.ticket, got.delta) == (3, (4, 1), True)
    assert got.dense["w"] is sent.dense["w"]
    for wrong in (None, 3, {}, {"type": "pull"}, {**plain(sent), "more": 1}, {**plain(sent), "dense": {"w": [1.0]}}):
        with raises(ServerRefused, "server.not_an_action"):
            read_action(wrong)


def test_a_checkpoint_goes_on_as_if_nothing_had_been() -> None:
    adam = {"name": "adam", "lr": 0.1}
    (a,) = started(settings_of(optimizer=adam, pieces=1))
    a.ask(Open(9))
    for step in range(3):
        a.ask(Take())
        a.ask(push([1, -2, 3, step], step, ticket=(step, 0)))
    (b,) = started(settings_of(optimizer=adam, pieces=1))
    b.ask(Load(a.machine.parameters.state(), 3))
    b.ask(Open(9))
    for asker in (a, b):
        assert asker.ask(Take()).ticket == (3, 3, 0, 0, 0)
        asker.ask(push([1, 2, 3, 4], 3, ticket=(3, 0)))
    assert weights(a.machine) == weights(b.machine)
    with raises(ServerRefused, "server.state_of_other_tensors"):
        b.ask(Load(Machine(settings_of(TensorSpec("v", (1,)))).parameters.state(), 0))


PIECES, BATCHES = 3, 4


class AnyInterleaving(RuleBasedStateMachine):
    """Workers, a primary, its backup, and a network that repeats, reorders and loses what is sent.

    A push for ticket t adds 1 to element t, so that the weights count how often each ticket was applied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings = settings_of(
            TensorSpec("w", (PIECES * BATCHES,), "float64"), pieces=PIECES, staleness=1, staleness_aware=False
        )
        self.primary, self.backup = Machine(self.settings), Machine(self.settings)
        self.workers = [Worker(f"rank {n}") for n in range(3)]
        self.network: list[Operation] = []
        self.version, self.accepted = 0, 0
        start = Worker("launcher")
        self.deliver(start.next(Initialize({"w": torch.zeros(PIECES * BATCHES, dtype=torch.float64)})))

    def deliver(self, operation: Operation) -> Reply | None:
        try:
            if (reply := self.primary.known(operation)) is None:
                self.primary.check(operation)
                if self.primary.waits(operation):
                    return None
                reply = self.primary.apply(operation)
                self.backup.apply(operation)
        except ServerRefused:
            return Reply(-1)
        return reply

    @rule(n=st.integers(0, 2))
    def a_worker_goes_on(self, n: int) -> None:
        """It sends its next operation, or again the one that has no answer yet."""
        worker = self.workers[n]
        worker.sent = worker.sent or worker.next(worker.wish())
        self.network.append(worker.sent)

    @precondition(lambda self: self.network)
    @rule(data=st.data(), again=st.booleans(), answered=st.booleans())
    def the_network_delivers(self, data: st.DataObject, again: bool, answered: bool) -> None:
        """Anything that was sent, in any order; it may come again, and its answer may be lost."""
        at = data.draw(st.integers(0, len(self.network) - 1))
        operation = self.network[at] if again else self.network.pop(at)
        reply = self.deliver(operation)
        for worker in self.workers:
            if reply and answered and worker.sent is operation:
                worker.note(reply)

    @rule(n=st.integers(0, 2))
    def a_worker_dies_and_another_takes_its_place(self, n: int) -> None:
        self.workers[n] = Worker(f"rank {n}")

    @rule(n=st.integers(0, 2), by=st.integers(0, 2))
    def a_worker_is_taken_for_dead(self, n: int, by: int) -> None:
        self.network.append(Worker("launcher").next(Leave(f"rank {n}")))

    @rule(until=st.integers(0, BATCHES))
    def a_boundary_is_opened(self, until: int) -> None:
        for worker in self.workers:
            if worker.joined and not worker.sent:
                self.network.append(worker.next(Open(until)))
                worker.sent = self.network[-1]
                return

    @rule()
    def the_primary_is_lost_and_its_backup_gets_a_new_one(self) -> None:
        self.primary, self.backup = self.backup, Machine(self.settings)
        self.backup.load(self.primary.state())

    @invariant()
    def each_ticket_is_applied_once_or_is_to_be_dealt(self) -> None:
        machine = self.primary
        assert machine.tickets is not None
        counts = machine.parameters.tensors["w"].neg()
        assert set(counts.tolist()) <= {0.0, 1.0}
        assert int(counts.sum()) == machine.parameters.version >= self.version
        assert torch.equal(self.backup.parameters.tensors["w"], machine.parameters.tensors["w"])
        recorded = [[ticket, note] for _, ticket, note in machine.records]
        assert sorted(recorded) == [[ticket, [ticket]] for ticket in counts.nonzero().flatten().tolist()]
        self.version = machine.parameters.version
        floor = machine.tickets.batches * PIECES
        assert counts[:floor].all()
        assert not counts[floor + 2 * PIECES :].any()  # nobody ran more than one batch ahead

    def teardown(self) -> None:
        """Whatever has happened, one worker alone can end the run, and every ticket is applied then."""
        last = Worker("rank 0")
        self.deliver(last.next(Join()))
        for name in ("rank 1", "rank 2"):
            self.deliver(last.next(Leave(name)))
        self.deliver(last.next(Open(BATCHES)))
        while (reply := self.deliver(last.next(Take()))) and reply.ticket:
            number, *_, attempt, _ = reply.ticket
            self.deliver(last.next(one_for(number, attempt)))
        assert self.primary.parameters.tensors["w"].tolist() == [-1.0] * (PIECES * BATCHES)


class Worker:
    made = 0

    def __init__(self, name: str) -> None:
        Worker.made += 1
        self.name, self.identity = name, f"{Worker.made}"
        self.sequence, self.joined = 0, False
        self.ticket: Ticket | None = None
        self.sent: Operation | None = None

    def next(self, action: Action) -> Operation:
        self.sequence += 1
        return Operation(self.name, self.identity, self.sequence, action)

    def wish(self) -> Action:
        if not self.joined:
            return Join()
        return one_for(self.ticket[0], self.ticket[3]) if self.ticket else Take()

    def note(self, reply: Reply) -> None:
        assert self.sent is not None
        refused = reply.version < 0
        self.joined = not refused
        self.ticket = None if refused else reply.ticket
        self.sent = None


def one_for(number: int, attempt: int) -> Push:
    gradient = torch.zeros(PIECES * BATCHES, dtype=torch.float64)
    gradient[number] = 1.0
    return Push({"w": gradient}, {}, 0, (number, attempt), record=[number])


AnyInterleaving.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=60, deadline=None)
test_any_interleaving_applies_each_ticket_once = AnyInterleaving.TestCase


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"staleness": 0.5}, "server.settings_invalid"),
        ({"staleness": math.nan}, "server.settings_invalid"),
        ({"staleness": 1}, "server.settings_invalid"),
        ({"pieces": -1}, "server.settings_invalid"),
        ({"optimizer": {"name": "sgd", "server.settings_refused": 0.9}}, "server.settings_refused"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], code: str) -> None:
    with raises(ServerRefused, code):
        settings_of(**values)


def test_servers_own_every_row_once_and_about_equally_many_bytes() -> None:
    settings = settings_of(TensorSpec("a", (1000, 64)), TensorSpec("b", ()), TensorSpec("c", (10, 2000)))
    owned = slices_of(settings, 3)
    sizes = {"a": 64, "b": 1, "c": 2000}
    loads = [sum((piece.stop - piece.first) * sizes[piece.name] for piece in pieces) for pieces in owned]
    assert max(loads) < 1.1 * sum(loads) / 3
    rows = sorted((piece.name, row) for pieces in owned for piece in pieces for row in range(piece.first, piece.stop))
    assert rows == [*(("a", row) for row in range(1000)), ("b", 0), *(("c", row) for row in range(10))]
    whole = settings_of(TensorSpec("a", (9, 9)), TensorSpec("b", (9, 9)), optimizer={"name": "lamb", "lr": 0.1})
    assert [[tuple(piece) for piece in pieces] for pieces in slices_of(whole, 2)] == [[("a", 0, 9)], [("b", 0, 9)]]
    with raises(ServerRefused, "server.too_many_servers"):
        slices_of(whole, 3)


def in_two() -> ServerSettings:
    """Settings of two servers: only the first deals tickets, and each takes every ticket once, whoever brings it."""
    return settings_of(TensorSpec("w", (6, 2)), TensorSpec("b", ()), optimizer={"name": "adam", "lr": 0.1}, pieces=2)


def test_a_ticket_that_two_workers_push_is_applied_once_by_a_server_that_deals_none() -> None:
    machine = Machine(in_two(), servers=2, part=1)
    first = {name: torch.ones(spec.shape) for name, spec in machine.parameters.specs.items()}
    a, b = Asker(machine, "a"), Asker(machine, "b")
    for asker in (a, b):
        asker.ask(Join())
    a.ask(Initialize(first))
    assert a.ask(Push(first, {}, 0, (0, 0))).accepted
    before = {name: tensor.detach().clone() for name, tensor in machine.parameters.tensors.items()}
    assert not b.ask(Push(first, {}, 0, (0, 1))).accepted, "dealt again, as its first holder seemed lost"
    assert all(torch.equal(tensor, before[name]) for name, tensor in machine.parameters.tensors.items())
    assert machine.read_waits(1) is not None
    assert b.ask(Push({}, {}, 0, (1, 0))).accepted, "a piece without samples"
    assert machine.read_waits(1) is None


def test_state_that_was_handed_over_to_some_servers_is_taken_over_from_others_as_it_was() -> None:
    settings = in_two()
    model = nn.ParameterDict({"w": torch.arange(12.0).view(6, 2), "b": torch.tensor(3.0)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in model.items()}
    state = for_servers(TrainedState(dict(model.items()), states), settings, 2, batches=4)
    machines = [Machine(settings, servers=2, part=part) for part in range(len(slices_of(settings, 2)))]
    for machine, part in zip(machines, state["parts"], strict=True):
        machine.parameters.load(part)
    found = of_servers({"parts": [machine.parameters.state() for machine in machines]}, settings)
    for name, parameter in model.items():
        assert torch.equal(found.values[name], parameter)
        assert found.optimizer[name].keys() == states[name].keys()
        for key, value in states[name].items():
            assert torch.equal(torch.as_tensor(found.optimizer[name][key]), torch.as_tensor(value)), key
    assert machines[0].parameters.version == 8
