"""Looks at a data set open nothing that loader processes would share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import paceline
from paceline.data.loader import Loader, Position
from paceline.job.partition import Partition, PartitionSpec
from paceline.run.record.run import Run
from ranks import Ranks
from small_jobs import new_run, small_job, train_as_rank, train_here

SAMPLES = 24
PLANS = [("dp=1", 1), ("dp=2", 2), ("tp=2", 2)]

pytestmark = pytest.mark.usefixtures("loader_processes_end")


class Reader:
    """Opens at the first use, as a reader of HDF5 or SQLite does, and remembers in which process."""

    def __init__(self) -> None:
        self.opened_by = 0

    def pid(self) -> int:
        self.opened_by = self.opened_by or os.getpid()
        return self.opened_by


class Lazy(Dataset[tuple[Tensor, Tensor]]):
    """Every sample is read from what the data set opened; an inherited handle raises."""

    def __init__(self, kept_in: str) -> None:
        self.kept_in, self.opened_by = kept_in, 0
        self.reader, self.handles = Reader(), dict[str, int]()
        self.read = self.from_method

    def __len__(self) -> int:
        return SAMPLES

    def from_method(self) -> int:
        self.opened_by = self.opened_by or os.getpid()
        return self.opened_by

    def pid(self) -> int:
        if self.kept_in == "dict":
            return self.handles.setdefault("file", os.getpid())
        return self.reader.pid() if self.kept_in == "reader" else self.read()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.pid() != os.getpid():
            raise OSError("the file of another process")
        return torch.full((6,), index / SAMPLES), torch.tensor(index % 3)


class LazyByBatches(Lazy):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


def lazy(kept_in: str = "attribute") -> Lazy:
    return Lazy(kept_in)


DATA: dict[str, Callable[[], Dataset[Any]]] = {
    "attribute": lazy,
    "reader": lambda: lazy("reader"),
    "dict": lambda: lazy("dict"),
    "batches": lambda: LazyByBatches("attribute"),
    "nested": lambda: ConcatDataset([Subset(lazy(), range(12)), Subset(lazy(), range(12, 24))]),
}


@pytest.mark.parametrize("kind", DATA)
def test_loader_processes_open_their_own_after_every_look(kind: str) -> None:
    partition = Partition(PartitionSpec(), samples=SAMPLES, global_batch=6, seed=0, replica=0, replicas=1)
    loader = Loader(DATA[kind](), partition, num_workers=2)
    loader.example(2)
    loader.fingerprint()
    loader.random_inputs()
    loader.read([3, 4], Position(0, 0, 2, 2))
    loader.digests()
    assert [len(batch[1]) for batch in loader] == [6] * 4


@pytest.mark.parametrize(("plan", "size"), PLANS)
def test_a_job_evaluates_between_epochs_and_starts_new_loader_processes(
    tmp_path: Path, ranks: Ranks, plan: str, size: int
) -> None:
    path = tmp_path / "run"
    data = {"kind": "dataset", "factory": f"{__file__}:lazy", "held_out": 0.25, "num_workers": 2}
    job = small_job(data=data, stop={"epochs": 2})
    if size == 1:
        train_here(path, job, plan)
    else:
        ranks(new_run(path, job, plan).plan.ranks, train_as_rank, path)
    assert Run(path).metrics["loss"] > 0


def losses_of_a_loop(plan: str) -> list[float]:
    """Two epochs and their evaluations, in which the same data set is read by this process and by others."""
    torch.manual_seed(1)
    data, model = lazy(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    engine = paceline.setup(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=F.cross_entropy,
        loader=DataLoader(data, batch_size=6, num_workers=2),
        plan=plan,
    )
    losses = []
    for _ in range(2):
        losses += [engine.step(batch).loss for batch in engine.loader]
        losses.append(engine.evaluate(DataLoader(data, batch_size=6, num_workers=1))["loss"])
    return losses


def test_a_loop_of_ones_own_shares_no_handle_either(ranks: Ranks) -> None:
    assert ranks(2, losses_of_a_loop, "pp=2 cut=2 microbatches=2")[0] == pytest.approx(losses_of_a_loop("dp=1"))
