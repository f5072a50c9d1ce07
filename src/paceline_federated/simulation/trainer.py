"""Training of simulated clients: side by side where the model allows, else in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from paceline.job.samples import Selection
from paceline_federated.client import LocalTraining
from paceline_federated.rule import Task
from paceline_federated.server import Cohort, Server
from paceline_federated.simulation.batched import Batched, CannotBatch, Samples
from paceline_federated.simulation.clients import POISON, Behaviour, Deal, Kept


class Trainer:
    """Trains the clients of a task, and gives their updates as the server gets them.

    Attributes:
        why_in_turn: reason for which clients train one by one; None where they train side by side.
    """

    def __init__(
        self,
        training: LocalTraining,
        dataset: Dataset[Any],
        deal: Deal,
        kept: Kept,
        server: Server,
        behaviour: Behaviour,
        *,
        batched: bool = True,
    ) -> None:
        self.training, self.dataset, self.deal, self.kept = training, dataset, deal, kept
        self.server, self.behaviour = server, behaviour
        self.why_in_turn: str | None = None if batched else "that was asked for"
        self._batched: Batched | None = None
        if batched:
            dtype = None if training.layout.dtype is torch.float32 else training.layout.dtype
            try:
                samples = Samples(dataset, training.job.seed, dtype)
                self._batched = Batched(training, samples, deal)
            except CannotBatch as error:
                self.why_in_turn = str(error)

    def train(self, task: Task, clients: Sequence[int]) -> Iterator[Cohort]:
        """Updates of the clients, as they reach the server."""
        if not clients:
            return
        for cohort in self._trained(task, clients):
            yield self._sent(task, cohort)

    def _trained(self, task: Task, clients: Sequence[int]) -> Iterator[Cohort]:
        if self._batched is not None:
            try:
                yield from self._batched.train(task, clients, self.kept)
                return
            except CannotBatch as error:  # at the first step, before anything was kept
                self.why_in_turn, self._batched = str(error), None
        for client in clients:
            state = self.kept.state(client)
            own = Selection(self.dataset, self.deal[client])
            update = self.training.train(task, client, own, state)
            self.kept.put(client, state)
            yield Cohort.of(update)

    def _sent(self, task: Task, cohort: Cohort) -> Cohort:
        """A cohort as the server gets it: poisoned, and coded."""
        poisoners = self.behaviour.poisons[np.asarray(cohort.clients, np.int64)]
        if poisoners.any():
            cohort.deltas[torch.from_numpy(poisoners)] *= POISON
        up = self.server.up
        if up.exact:
            return cohort
        rows = zip(cohort.deltas, cohort.clients, strict=True)
        return replace(cohort, deltas=torch.stack([up.round_trip(row, task.round, client) for row, client in rows]))
