"""Several servers with tickets: only the first deals them, and each takes every ticket once, whoever brings it."""

from __future__ import annotations

import torch
from torch import nn

from paceline_server.parameters.machine import Action, Initialize, Join, Machine, Operation, Push
from paceline_server.parameters.settings import GroupSettings, ServerSettings, TensorSpec, slices_of
from paceline_server.training.worker import TrainedState, for_servers, of_servers

SETTINGS = ServerSettings(
    (GroupSettings((TensorSpec("w", (6, 2)), TensorSpec("b", ())), {"name": "adam", "lr": 0.1}),), "model", pieces=2
)


class Second:
    def __init__(self) -> None:
        self.machine, self.sequence = Machine(SETTINGS, servers=2, part=1), 0
        specs = self.machine.parameters.specs
        self.first = {name: torch.ones(spec.shape) for name, spec in specs.items()}

    def ask(self, name: str, action: Action) -> bool:
        self.sequence += 1
        operation = Operation(name, name, self.sequence, action)
        self.machine.must_fit(operation)
        self.machine.check(operation)
        return self.machine.apply(operation).accepted


def test_a_ticket_that_two_workers_push_is_applied_once_by_a_server_that_deals_none() -> None:
    server = Second()
    for name in ("a", "b"):
        server.ask(name, Join())
    server.ask("a", Initialize(server.first))
    assert server.ask("a", Push(server.first, {}, 0, (0, 0)))
    before = {name: tensor.detach().clone() for name, tensor in server.machine.parameters.tensors.items()}
    assert not server.ask("b", Push(server.first, {}, 0, (0, 1))), "dealt again, as its first holder seemed lost"
    assert all(torch.equal(tensor, before[name]) for name, tensor in server.machine.parameters.tensors.items())
    assert server.machine.read_waits(1) is not None
    assert server.ask("b", Push({}, {}, 0, (1, 0))), "a piece without samples"
    assert server.machine.read_waits(1) is None


def test_state_that_was_handed_over_to_some_servers_is_taken_over_from_others_as_it_was() -> None:
    model = nn.ParameterDict({"w": torch.arange(12.0).view(6, 2), "b": torch.tensor(3.0)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    states = {name: optimizer.state[parameter] for name, parameter in model.items()}
    state = for_servers(TrainedState(dict(model.items()), states), SETTINGS, 2, batches=4)
    machines = [Machine(SETTINGS, servers=2, part=part) for part in range(len(slices_of(SETTINGS, 2)))]
    for machine, part in zip(machines, state["parts"], strict=True):
        machine.parameters.load(part)
    found = of_servers({"parts": [machine.parameters.state() for machine in machines]}, SETTINGS)
    for name, parameter in model.items():
        assert torch.equal(found.values[name], parameter)
        assert found.optimizer[name].keys() == states[name].keys()
        for key, value in states[name].items():
            assert torch.equal(torch.as_tensor(found.optimizer[name][key]), torch.as_tensor(value)), key
    assert machines[0].parameters.version == 8
