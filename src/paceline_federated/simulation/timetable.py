"""Timetable of clients that train side by side: their steps, and the order of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_federated.order import keys
from paceline_federated.simulation.deal import Deal
from paceline_federated.work import Work

Ints = NDArray[np.int64]
_TABLE = 2**23  # numbers of a table of orders; larger ones are made client by client


@dataclass(frozen=True)
class Step:
    """One local step of several clients.

    Attributes:
        clients: so many of the first clients take it.
        rows: clients with those that only fill up the batch, whose samples count nothing.
        width: samples of a client, with padded ones.
        shares: share of each sample in its client's mean loss, (rows, width); 0 for padded ones.
    """

    clients: int
    rows: int
    width: int
    shares: Tensor


@dataclass(frozen=True)
class Block:
    """Some steps, whose samples are read together.

    Attributes:
        positions: of each sample in the orders of its epoch, step by step, row by row.
        starts: where the samples of its client begin in the deal.
        epochs: of the clients' own; with the samples in it, where there are several.
    """

    steps: list[Step]
    positions: Ints
    starts: Ints
    epochs: list[tuple[int, Ints | None]]

    @property
    def sizes(self) -> list[int]:
        """Samples of each step."""
        return [step.rows * step.width for step in self.steps]


class Timetable:
    """Steps of clients in a round, apart from the order of their samples.

    Args:
        clients: those with the most steps first.
        together: samples of a block, where a step has not more.
    """

    def __init__(self, work: Work, deal: Deal, clients: Ints, together: int, dtype: torch.dtype) -> None:
        self.deal, self._orders = deal, _Orders(work.seed, clients, deal.samples[clients])
        self.blocks = list(self._blocks(work, clients, together, dtype))

    def samples(self, block: Block, round: int) -> Ints:
        """Indices in the training set of a block's samples, in the order that `Work.batches` has."""
        if len(block.epochs) == 1:
            taken = self._orders.of(round, block.epochs[0][0])[block.positions]
        else:
            taken = np.empty_like(block.positions)
            for epoch, mine in block.epochs:
                taken[mine] = self._orders.of(round, epoch)[block.positions[mine]]
        found: Ints = self.deal.indices[block.starts + taken]
        return found

    def _blocks(self, work: Work, clients: Ints, together: int, dtype: torch.dtype) -> Iterator[Block]:
        held: list[tuple[Step, Ints, Ints, Ints]] = []
        for entry in self._steps(work, clients, dtype):
            if held and sum(positions.size for _, positions, _, _ in held) + entry[1].size > together:
                yield _joined(held)
                held = []
            held.append(entry)
        if held:
            yield _joined(held)

    def _steps(self, work: Work, clients: Ints, dtype: torch.dtype) -> Iterator[tuple[Step, Ints, Ints, Ints]]:
        """Each step with its samples' positions, starts and epochs."""
        samples, starts = self.deal.samples[clients], self.deal.ends[clients]
        per_epoch, totals = -(-samples // work.batch), work.step_counts(samples)
        for number in range(int(totals[0])):
            active = int(np.searchsorted(-totals, -number, side="left"))
            rows = min(padded(active), len(clients))
            who = np.where(np.arange(rows) < active, np.arange(rows), 0)
            epoch, within = np.divmod(number, per_epoch[who])
            begin = within * work.batch
            counts = np.where(np.arange(rows) < active, np.minimum(samples[who] - begin, work.batch), 0)
            width = padded(int(counts.max()))
            places = np.minimum(begin[:, None] + np.arange(width), samples[who, None] - 1)
            mean = np.where(np.arange(width) < counts[:, None], 1.0 / np.maximum(counts, 1)[:, None], 0.0)
            step = Step(active, rows, width, torch.from_numpy(mean).to(dtype))
            of_client = np.broadcast_to(starts[who, None], places.shape)
            yield step, self._orders.base[who, None] + places, of_client, np.broadcast_to(epoch[:, None], places.shape)


def padded(number: int) -> int:
    """The next number of a list of a few, at most an eighth above `number`."""
    unit = 1 << max(number.bit_length() - 4, 0)
    return -(-number // unit) * unit


def _joined(held: list[tuple[Step, Ints, Ints, Ints]]) -> Block:
    steps, *columns = zip(*held, strict=True)
    positions, starts, epochs = (np.concatenate([array.ravel() for array in column]) for column in columns)
    several = np.unique(epochs)
    chosen = [(int(epoch), None if len(several) == 1 else np.flatnonzero(epochs == epoch)) for epoch in several]
    return Block(list(steps), positions, starts, chosen)


class _Orders:
    """Orders of the samples of several clients, one after the other in a flat array.

    Attributes:
        base: place of each client's order in it.
    """

    def __init__(self, seed: int, clients: Ints, samples: Ints) -> None:
        self.seed, self.clients, self.samples = seed, clients, samples
        self._longest = int(samples.max())
        self._ragged = len(samples) * self._longest > _TABLE
        self.base = (
            np.concatenate([[0], np.cumsum(samples)[:-1]])
            if self._ragged
            else np.arange(len(samples), dtype=np.int64) * self._longest
        )
        self._made: dict[tuple[int, int], Ints] = {}

    def of(self, round: int, epoch: int) -> Ints:
        """The orders of one epoch of a round."""
        if (found := self._made.get((round, epoch))) is None:
            if len(self._made) >= 4:
                self._made.clear()
            found = self._made[round, epoch] = self._ordered(round, epoch)
        return found

    def _ordered(self, round: int, epoch: int) -> Ints:
        if self._ragged:
            each = zip(self.clients.tolist(), self.samples.tolist(), strict=True)
            drawn = [keys(self.seed, round, epoch, client, np.arange(count)) for client, count in each]
            return np.concatenate([np.argsort(one, kind="stable") for one in drawn])
        table = keys(self.seed, round, epoch, self.clients[:, None], np.arange(self._longest))
        table[np.arange(self._longest) >= self.samples[:, None]] = np.iinfo(np.uint64).max
        return np.argsort(table, axis=1, kind="stable").ravel()
