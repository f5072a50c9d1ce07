"""A parameter that several pipeline stages hold stays the same on all of them, under every combination of axes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import SyncError
from ranks import Ranks

WIDTH, ROWS, STEPS = 16, 8, 6


def inner() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Isomorphism(nn.Module):
    """A graph isomorphism layer. It uses its own parameter, then calls the child with which a stage begins."""

    def __init__(self) -> None:
        super().__init__()
        self.nn, self.eps = inner(), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.nn((1 + self.eps) * x)
        return y


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = Isomorphism(), Isomorphism()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.a(x))
        return y


class Codebook(nn.Module):
    """The first stage chooses an entry without a gradient, and the second stage looks it up."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d, self.entries = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Embedding(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.e(x)
        chosen = torch.cdist(z, self.entries.weight).argmin(-1)
        y: Tensor = self.d(z + self.entries(chosen))
        return y


class Unused(nn.Module):
    """Both stages read a weight that gets no gradient, so it must not decay."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.extra = inner(), inner(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x + self.extra.detach())
        z: Tensor = self.c(y * self.extra.detach())
        return z


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "isomorphism": (TwoLayers, "c.nn"),
    "codebook": (Codebook, "d"),
    "unused": (Unused, "c"),
}


def engine_of(name: str, plan: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = MODELS[name][0]().double()
    drawn = torch.Generator().manual_seed(2)
    inputs = torch.randn(ROWS * STEPS, WIDTH, generator=drawn, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    loader = DataLoader(TensorDataset(inputs, inputs.tanh()), batch_size=ROWS)
    return model, paceline.setup(model, optimizer, loss=F.mse_loss, loader=loader, plan=plan)


def trained(name: str, plan: str, exported: Path) -> list[float]:
    """Train, export the model, and return the losses of the steps."""
    _, engine = engine_of(name, plan)
    found = [engine.step(batch).loss for batch in engine.loader]
    engine.export(exported)
    engine.close()
    return found


def each_trained(splits: list[str], folder: Path) -> dict[tuple[str, str], list[float]]:
    """Each model divided by each plan, one after the other in the same processes."""
    return {
        (split, name): trained(name, f"{split} cut={cut} microbatches=2", folder / f"{split}-{name}")
        for split in splits
        for name, (_, cut) in MODELS.items()
    }


@pytest.mark.parametrize(
    ("size", "splits"),
    [(2, ["pp=2"]), (4, ["fsdp=2 pp=2", "fsdp=2 zero=1 pp=2", "fsdp=2 zero=2 pp=2", "dp=2 pp=2"])],
)
def test_a_stage_without_a_gradient_for_a_shared_parameter_is_updated_too(
    ranks: Ranks, tmp_path: Path, size: int, splits: list[str]
) -> None:
    alone = {name: trained(name, "dp=1", tmp_path / f"alone-{name}") for name in MODELS}
    for found in ranks(size, each_trained, splits, tmp_path):
        for case, losses in found.items():
            assert losses == pytest.approx(alone[case[1]], rel=1e-9), case
    for split, name in product(splits, MODELS):
        expected = load_file(tmp_path / f"alone-{name}")
        for key, tensor in load_file(tmp_path / f"{split}-{name}").items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-9, atol=1e-12)


def written_by_one_stage() -> bool:
    """True if the comparison before an update finds a parameter that only one stage has changed."""
    _, engine = engine_of("isomorphism", "pp=2 cut=c.nn microbatches=2")
    if engine.group.rank == 1:
        with torch.no_grad():
            engine.named_parameters()["c.eps"].add_(1.0)
    try:
        engine.step(next(iter(engine.loader)))
    except SyncError as error:
        return "c.eps" in str(error)
    return False


def test_a_shared_parameter_that_differs_between_stages_is_noticed_before_the_first_update(ranks: Ranks) -> None:
    assert ranks(2, written_by_one_stage) == [True, True]
