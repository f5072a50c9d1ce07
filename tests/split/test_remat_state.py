"""State that a block writes in its forward pass is written once a step, also if the block is computed again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PlanError

WIDTH, ROWS, STEPS = 6, 4, 5


class Observed(nn.Module):
    """Writes buffers in place and anew, counts its calls, and computes with all of it."""

    seen: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("largest", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        y: Tensor = x + torch.tanh(self.norm(self.linear(x - self.seen))) / (1 + self.largest) / (self.calls + 1)
        return y


class Late(Observed):
    """Writes a buffer only after its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append(1)
        if len(self.passes) > 2:
            self.seen += 1.0
        y: Tensor = x + self.linear(x)
        return y


def trained(plan: str, block: type[nn.Module] = Observed) -> tuple[list[float], dict[str, Tensor], list[int]]:
    torch.manual_seed(1)
    model = nn.Sequential(*(block() for _ in range(3)), nn.Linear(WIDTH, 2)).double()
    drawn = torch.Generator().manual_seed(2)
    inputs = torch.randn(ROWS * STEPS, WIDTH, generator=drawn, dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs, torch.arange(len(inputs)) % 2), batch_size=ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup(model, optimizer, loss=F.cross_entropy, loader=loader, plan=plan)
    losses = [engine.step(batch).loss for batch in engine.loader]
    buffers = {name: b.clone() for name, b in engine.model.named_buffers()}
    calls = [module.calls for module in engine.model.modules() if isinstance(module, Observed)]
    engine.close()
    return losses, buffers, calls


@pytest.mark.parametrize("how", ["block", "selective"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_block_that_is_computed_again_writes_its_state_once(how: str, microbatches: int) -> None:
    losses, buffers, calls = trained(f"dp=1 microbatches={microbatches}")
    found = trained(f"dp=1 microbatches={microbatches} remat={how}")
    assert found[0] == pytest.approx(losses, rel=1e-12)
    for name, buffer in buffers.items():
        torch.testing.assert_close(found[1][name], buffer, rtol=1e-12, atol=0)
    assert found[2] == calls


def test_a_buffer_that_is_written_in_some_steps_only_is_refused() -> None:
    with pytest.raises(PlanError):
        trained("dp=1 remat=block", Late)
