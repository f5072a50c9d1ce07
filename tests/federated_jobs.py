"""Small federated jobs for tests, and clients trained on one task in both ways."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.job.job import Job
from paceline_federated.rules import Task
from paceline_federated.server import Cohort
from paceline_federated.simulated_clients import Kept
from paceline_federated.simulation import Simulation, Trainer
from small_jobs import FEATURES, small_job


def federated_job(federate: dict[str, Any] | None = None, **changes: Any) -> Job:
    """70 points over 5 clients, in float64, for 4 rounds of plain SGD."""
    values = {
        "optimizer": {"name": "sgd", "lr": 0.1},
        "precision": "fp64",
        "stop": {"steps": 4},
        "federate": {"clients": 5, **(federate or {})},
    }
    return small_job(**(values | changes))


def trainer_of(simulation: Simulation, folder: Path, *, batched: bool) -> Trainer:
    """Trains the clients of a simulation in one of the two ways."""
    kept = Kept(simulation.training, len(simulation.deal), folder)
    behaviour, server = simulation.behaviour, simulation.server
    return Trainer(
        simulation.training, simulation.data.train, simulation.deal, kept, server, behaviour, batched=batched
    )


def updates(trainer: Trainer, task: Task, clients: Sequence[int]) -> dict[int, Tensor]:
    """Each client's update and what its rule returns, as one tensor."""
    found = {}
    cohorts: list[Cohort] = list(trainer.train(task, clients))
    for cohort in cohorts:
        for place, client in enumerate(cohort.clients):
            returned = [tensor[place] for tensor in cohort.returned.values()]
            found[client] = torch.cat([cohort.deltas[place], *returned, torch.tensor([cohort.losses[place]])])
    return found


class TwoParts(nn.Module):
    """A body that clients share, and a head that each may keep to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.body(x)))
        return y


class Normalised(nn.Module):
    """A model with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Dropping(nn.Module):
    """A model with dropout of half of its features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Branching(nn.Module):
    """A model whose forward pass depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if x.sum() > 0 else 2 * y


def two_parts() -> nn.Module:
    return TwoParts()


def normalised() -> nn.Module:
    return Normalised()


def dropping() -> nn.Module:
    return Dropping()


def branching() -> nn.Module:
    return Branching()


class Opposed(Dataset[tuple[Tensor, Tensor]]):
    """Points of two users who give the same points opposite labels."""

    def __init__(self) -> None:
        self.inputs = torch.randn(120, FEATURES, generator=torch.Generator().manual_seed(5))
        self.users = [sample % 2 for sample in range(120)]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        positive = bool(self.inputs[index, 0] > 0)
        return self.inputs[index], torch.tensor(int(positive == bool(self.users[index])))
