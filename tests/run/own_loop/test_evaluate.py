"""`engine.evaluate`: the numbers of one process, and no trace in the training that follows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import paceline
from paceline.errors import DataError
from ranks import Ranks
from refusals import raises

FEATURES, CLASSES, SAMPLES = 6, 3, 22

pytestmark = pytest.mark.usefixtures("loader_processes_end")


def points(samples: int = SAMPLES) -> TensorDataset:
    inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, torch.arange(samples) % CLASSES)


def engine_of(model: nn.Module, loader: DataLoader[Any] | None = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return paceline.setup(model, optimizer, loss=F.cross_entropy, loader=loader or DataLoader(points(), batch_size=8))


def training(evaluates: bool, shuffle: bool, workers: int) -> list[float]:
    """Losses with dropout, and what each random generator draws afterwards."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))
    engine = engine_of(model)
    validation = DataLoader(points(30), batch_size=7, shuffle=shuffle, num_workers=workers)

    def measure(batch: list[Tensor]) -> dict[str, Tensor]:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"loss": F.cross_entropy(model(batch[0]) + noise, batch[1])}

    losses = []
    for _ in range(2):
        losses += [engine.step(batch).loss for batch in engine.loader]
        if evaluates:
            engine.evaluate(validation, measure)
    return [*losses, random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize(("shuffle", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_training_is_the_same_with_and_without_evaluations(ranks: Ranks, shuffle: bool, workers: int) -> None:
    assert training(True, shuffle, workers) == training(False, shuffle, workers)
    assert ranks(2, training, True, shuffle, workers) == ranks(2, training, False, shuffle, workers)


class Noise(Dataset[Tensor]):
    """Samples drawn from all three generators."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([np.random.rand(), random.random(), float(torch.rand(()))])


def noise_measured(workers: int) -> list[dict[str, float]]:
    engine = engine_of(nn.Linear(FEATURES, CLASSES))
    validation = DataLoader(Noise(), batch_size=4, num_workers=workers)
    return [engine.evaluate(validation, lambda batch: dict(zip("abc", batch.T, strict=True))) for _ in range(2)]


def test_random_samples_are_the_same_in_every_evaluation_and_on_any_number_of_ranks(ranks: Ranks) -> None:
    first, second = noise_measured(0)
    assert first == second
    assert noise_measured(2) == [pytest.approx(first)] * 2
    assert ranks(2, noise_measured, 0)[1] == [pytest.approx(first)] * 2


class RandomBatches(Sampler[list[int]]):
    """A batch sampler that takes its order from the process."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[i : i + 3] for i in range(0, SAMPLES, 3)])

    def __len__(self) -> int:
        return -(-SAMPLES // 3)


def numbers_seen() -> float:
    engine = engine_of(nn.Linear(FEATURES, CLASSES))
    torch.manual_seed(engine.group.rank)
    numbers = TensorDataset(torch.arange(float(SAMPLES)) ** 2)
    found = engine.evaluate(DataLoader(numbers, batch_sampler=RandomBatches()), lambda batch: {"mean": batch[0]})
    return float(found["mean"])


def test_a_random_batch_sampler_is_drawn_once_for_all_ranks(ranks: Ranks) -> None:
    assert ranks(2, numbers_seen) == [sum(i**2 for i in range(SAMPLES)) / SAMPLES] * 2


def named(samples: list[Any]) -> dict[str, Any]:
    """A batch that ends with names; samples of class 1 count as damaged."""
    kept = [sample for sample in samples if sample is not None]
    return {"x": torch.stack([x for x, _ in kept]), "y": torch.stack([y for _, y in kept]), "names": ["n"] * len(kept)}


class Damaged(Dataset[Any]):
    """Some samples are None, for `collate_fn` to leave out."""

    def __init__(self) -> None:
        self.points = points(24)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return None if index % 5 == 1 or index == 8 else self.points[index]


def named_loss() -> float:
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, CLASSES)
    engine = engine_of(model)
    validation = DataLoader(Damaged(), batch_size=7, collate_fn=named)
    found = engine.evaluate(validation, lambda batch: {"loss": F.cross_entropy(model(batch["x"]), batch["y"])})
    return float(found["loss"])


def test_a_mean_counts_by_the_samples_of_a_batch_of_any_form(ranks: Ranks) -> None:
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, CLASSES)
    data = Damaged()
    whole = named([data[i] for i in range(len(data))])
    expected = float(F.cross_entropy(model(whole["x"]), whole["y"]).detach())
    assert named_loss() == pytest.approx(expected, rel=1e-6)
    assert ranks(2, named_loss) == [pytest.approx(expected, rel=1e-6)] * 2


@pytest.mark.parametrize(
    ("samples", "drop_last", "code"),
    [(0, False, "loop.nothing_to_evaluate"), (3, True, "loop.evaluation_dropped")],
)
def test_an_evaluation_of_nothing_is_refused(samples: int, drop_last: bool, code: str) -> None:
    engine = engine_of(nn.Linear(FEATURES, CLASSES))
    with raises(DataError, code):
        engine.evaluate(DataLoader(points(samples), batch_size=4, drop_last=drop_last))


class Epochs(Dataset[Any]):
    """Samples depend on the epoch."""

    def __init__(self) -> None:
        self.points, self.epoch = points(), -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.points[index][0] + self.epoch, self.points[index][1]


def test_an_evaluation_on_the_training_set_leaves_its_epoch_alone() -> None:
    data = Epochs()
    engine = engine_of(nn.Linear(FEATURES, CLASSES), DataLoader(data, batch_size=8))
    for epoch in range(2):
        for _ in engine.loader:
            engine.evaluate(DataLoader(data, batch_size=8))
            assert data.epoch == epoch


class Caching(nn.Module):
    """Makes a buffer and a plain tensor in its first pass, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("shift", torch.zeros(CLASSES))
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale, self.shift = torch.linspace(0.5, 1.5, CLASSES), torch.full((CLASSES,), 0.25)
        y: Tensor = self.layer(x) * self.scale + self.shift
        return y


def losses_after_an_evaluation() -> list[float]:
    torch.manual_seed(1)
    engine = engine_of(Caching())
    validation = DataLoader(points(30), batch_size=7)
    losses = [engine.evaluate(validation)["loss"]]
    losses += [engine.step(batch).loss for batch in engine.loader]
    return [*losses, engine.evaluate(validation)["loss"]]


def test_a_model_trains_on_with_what_it_made_during_an_evaluation(ranks: Ranks) -> None:
    torch.manual_seed(1)
    model, losses = Caching(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = points(30)[:]
    with torch.no_grad():
        losses.append(float(F.cross_entropy(model(x), y)))
    for inputs, labels in DataLoader(points(), batch_size=8):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(F.cross_entropy(model(x), y)))
    assert losses_after_an_evaluation() == pytest.approx(losses, rel=1e-5)
    assert ranks(2, losses_after_an_evaluation)[1] == pytest.approx(losses, rel=1e-5)


def averaged_statistics() -> list[float]:
    """The running mean of an averaged model, measured by a pass over the plain loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    loader = DataLoader(points(24), batch_size=8)
    engine = engine_of(model, loader)
    average: Any = AveragedModel(model)
    for batch in engine.loader:
        engine.step(batch)
        average.update_parameters(model)
    with torch.no_grad():  # the averaged layer before the norm decides
        average.module[0].load_state_dict({"weight": torch.ones(4, FEATURES), "bias": torch.zeros(4)})
    update_bn(loader, average)
    return [float(value) for value in average.module[1].running_mean]


def test_update_bn_over_the_plain_loader_gives_every_rank_the_statistics_of_one_process(ranks: Ranks) -> None:
    assert ranks(2, averaged_statistics) == [pytest.approx(averaged_statistics())] * 2
