"""Batch norm over the global batch under plans that divide, cut or compile the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import JobError
from ranks import Ranks


class Residual(nn.Module):
    """Four alike blocks with a batch norm each."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), norm(8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.head(x)
        return y


def losses(plan: str, norm: type[nn.Module] = nn.BatchNorm1d, batch_norm: str = "sync") -> list[float]:
    torch.manual_seed(1)
    model = Residual(norm).double()
    data = TensorDataset(torch.randn(32, 6).double(), torch.randint(0, 3, (32,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(
        model,
        optimizer,
        F.cross_entropy,
        DataLoader(data, batch_size=8),
        plan=plan,
        precision="fp64",
        batch_norm=batch_norm,
    )
    found = [engine.step(batch).loss for batch in engine.loader]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("ranks_of", "plan", "alike"),
    [
        (4, "dp=2 pp=2 microbatches=2", "dp=2 microbatches=2"),  # the statistics are of a microbatch of all replicas
        pytest.param(4, "dp=2 fsdp=2 remat=block", "dp=1", marks=pytest.mark.slow),
        (4, "dp=2 tp=2", "dp=1"),
    ],
)
def test_statistics_are_global_however_the_model_is_divided(ranks: Ranks, ranks_of: int, plan: str, alike: str) -> None:
    expected = losses(alike) if alike == "dp=1" else ranks(2, losses, alike, backend="shm")[0]
    for found in ranks(ranks_of, losses, plan, backend="shm"):
        assert found == pytest.approx(expected, rel=1e-9)


def told(plan: str, norm: type[nn.Module], batch_norm: str) -> list[float] | str:
    try:
        return losses(plan, norm, batch_norm)
    except JobError as error:
        return str(error)


def test_torchs_own_synchronised_layers_train_on_cpus_and_need_the_setting_that_says_so(ranks: Ranks) -> None:
    assert ranks(2, told, "dp=2", nn.SyncBatchNorm, "sync", backend="shm")[0] == pytest.approx(losses("dp=1"), rel=1e-9)
    assert all(
        "Set batch_norm: sync" in text for text in ranks(2, told, "dp=2", nn.SyncBatchNorm, "local", backend="shm")
    )
    assert losses("dp=1", nn.SyncBatchNorm, "local") == pytest.approx(losses("dp=1"), rel=1e-12)
