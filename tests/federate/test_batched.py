"""Clients that train side by side get what each would get by itself, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from federated_jobs import federated_job, trainer_of, updates
from paceline_federated.simulation import Simulation, simulate

DIRICHLET = {"partition": {"kind": "dirichlet", "alpha": 0.5}, "clients": 8}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "uneven": ({**DIRICHLET, "local_epochs": 3}, {}),
    "steps": ({**DIRICHLET, "local_steps": 7, "batch": 3}, {}),
    "momentum": (DIRICHLET, {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}),
    "nesterov": (DIRICHLET, {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}}),
    "adamw": ({**DIRICHLET, "local_epochs": 2}, {"optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}}),
    "clipped": (DIRICHLET, {"clip_norm": 0.1}),
    "fedprox": ({**DIRICHLET, "rule": "fedprox:0.5", "local_epochs": 2}, {}),
    "scaffold": ({**DIRICHLET, "rule": "scaffold", "local_epochs": 2}, {}),
    "personal": ({**DIRICHLET, "personal": ["head.*"]}, {"model": {"factory": "federated_jobs:two_parts"}}),
    "weighted loss": ({}, {"loss": {"name": "cross_entropy", "args": {"weight": [1.0, 2.0, 0.5]}}}),
    "smoothed loss": ({}, {"loss": {"name": "cross_entropy", "args": {"label_smoothing": 0.1}}}),
}


QUICK = {"uneven", "momentum", "scaffold", "personal"}


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_batch_of_clients_is_equal_to_clients_one_by_one(case: str, tmp_path: Path) -> None:
    federate, changes = CASES[case]
    found = []
    for batched in (True, False):
        simulation = Simulation(federated_job(federate, **changes))
        folder = tmp_path / str(batched)
        folder.mkdir()
        trainer, clients = trainer_of(simulation, folder, batched=batched), simulation.available.tolist()
        rounds = []
        for number in (1, 2):  # the second begins with what clients kept
            rounds.append(updates(trainer, simulation.server.task(number), clients))
            simulation.server.weights += rounds[-1][clients[0]][: len(simulation.server.weights)]
        assert (trainer.why_in_turn is None) == batched
        found.append(rounds)
    for side_by_side, in_turn in zip(*found, strict=True):
        assert side_by_side.keys() == in_turn.keys()
        for client, update in side_by_side.items():
            torch.testing.assert_close(update, in_turn[client], rtol=1e-9, atol=1e-12)
            assert update.abs().max() > 0


@pytest.mark.parametrize(
    ("model", "reason"),
    [("normalised", "BatchNorm1d, which mixes the samples of a batch"), ("branching", "torch.func.vmap refuses it")],
)
def test_a_model_that_cannot_be_batched_trains_in_turn_and_says_why(model: str, reason: str, tmp_path: Path) -> None:
    said: list[str] = []
    job = federated_job(model={"factory": f"federated_jobs:{model}"}, stop={"steps": 2})
    run = simulate(job, tmp_path / "run", say=said.append)
    [told] = [line for line in said if line.startswith("clients train one by one")]
    assert reason in told
    [event] = [event for event in run.events() if event["event"] == "sync"]
    assert event["said"] == [told]
    assert len(run.steps()) == 2


def test_dropout_differs_between_clients_and_steps(tmp_path: Path) -> None:
    job = federated_job({"clients": 2}, model={"factory": "federated_jobs:dropping"}, global_batch=35)
    simulation = Simulation(job)
    trainer = trainer_of(simulation, tmp_path, batched=True)
    task = simulation.server.task(1)
    first, again = (updates(trainer, task, [0, 1]) for _ in range(2))
    other = updates(trainer, simulation.server.task(2), [0, 1])
    assert trainer.why_in_turn is None
    torch.testing.assert_close(first[0], again[0], rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])
    in_turn = updates(trainer_of(simulation, tmp_path, batched=False), task, [0, 1])
    assert not torch.allclose(first[0], in_turn[0])  # dropped features are drawn for the batch
