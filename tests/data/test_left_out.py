"""Samples that `collate_fn` leaves out, and batches that a data set reads at once, as a `DataLoader` treats them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import paceline
from paceline.errors import DataError
from paceline.run.record.run import Run
from ranks import RankError, Ranks
from refusals import raises
from small_jobs import small_job, train_here

SAMPLES, BATCH = 24, 8

pytestmark = pytest.mark.usefixtures("loader_processes_end")


def inputs() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))


class Damaged(Dataset[Any]):
    """Samples that could not be read are None."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return None if index % 5 == 1 or index in (8, 9) else (inputs()[index], index % 3)


class DamagedStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Damaged()[index] for index in range(SAMPLES))


def damaged() -> Damaged:
    return Damaged()


def without_damaged(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def loader(dataset: Dataset[Any], workers: int = 0) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH, collate_fn=without_damaged, num_workers=workers)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3)


def plain_losses() -> list[float]:
    model, losses = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader(Damaged()):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses(kind: str, workers: int = 0) -> list[float]:
    """Losses of a loop that weighs by samples, by items, or in `engine.step`."""
    model, dataset = network(), DamagedStream() if kind == "stream" else Damaged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy if kind == "step" else None
    engine = paceline.setup(model, optimizer, loss=loss, loader=loader(dataset, workers))
    found = []
    for batch in engine.loader:
        if kind == "step":
            found.append(engine.step(batch).loss)
            continue
        x, y = batch
        found.append(float(engine.backward(F.cross_entropy(model(x), y), items=len(x) if kind == "items" else None)))
        engine.update()
    return found


@pytest.mark.parametrize("kind", ["samples", "items", "step", "stream"])
def test_one_process_trains_on_the_samples_that_are_left(kind: str) -> None:
    assert losses(kind) == pytest.approx(plain_losses(), rel=1e-5)


@pytest.mark.parametrize("kind", ["items", "stream"])
def test_ranks_train_as_one_process_where_the_weights_are_known(ranks: Ranks, kind: str) -> None:
    assert ranks(2, losses, kind)[0] == pytest.approx(plain_losses(), rel=1e-5)


@pytest.mark.parametrize(("kind", "workers"), [("samples", 0), ("samples", 2), ("step", 0)])
def test_ranks_refuse_to_guess_the_weights(ranks: Ranks, kind: str, workers: int) -> None:
    with raises(RankError, "data.sample_none"):
        ranks(2, losses, kind, workers)


def job(**data: Any) -> Any:
    data = {"kind": "dataset", "factory": f"{__file__}:damaged", "held_out": 0, **data}
    return small_job(data=data, stop={"epochs": 1})


def test_a_job_on_one_process_leaves_them_out(tmp_path: Path) -> None:
    train_here(tmp_path / "run", job(collate=f"{__file__}:without_damaged"))
    losses = [step["loss"] for step in Run(tmp_path / "run").steps()]
    assert len(losses) == 3
    assert all(loss > 0 for loss in losses)


class InBatches(Dataset[Any]):
    """Reads a batch at once. `kind`: a tuple with a tensor per sample, or with a tensor per column."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        x = torch.arange(4.0) + index
        return x if self.kind == "samples" else (x, torch.tensor(index))

    def __getitems__(self, indices: list[int]) -> Any:
        if self.kind == "samples":
            return tuple(self[index] for index in indices)
        return torch.stack([self[index][0] for index in indices]), torch.tensor(indices)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["samples", "columns"])
def test_a_batch_that_is_read_at_once_is_what_torch_makes_of_its_samples(kind: str, batch: int) -> None:
    class OneByOne(InBatches):
        __getitems__ = None  # type: ignore[assignment]

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(model, optimizer, loader=DataLoader(InBatches(kind), batch))
    for found, expected in zip(engine.loader, DataLoader(OneByOne(kind), batch), strict=True):
        assert type(found) is Tensor if kind == "samples" else len(found) == 2
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_sample_that_is_none_needs_a_collate_function() -> None:
    model = network()
    engine = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=DataLoader(Damaged(), BATCH))
    with raises(DataError, "data.not_collated"):
        next(iter(engine.loader))
