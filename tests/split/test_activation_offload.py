"""Activations of blocks in host memory: the same gradients from less memory of the device."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PlanError
from paceline.split.activation_offload import LEAST_BYTES, offload_activations
from paceline.split.remat import rematerialise
from simulated.environment import Order, Simulated

BLOCKS, ROWS, WIDTH = 6, 8192, 64  # 2 MiB at the width of a block's input


class Block(nn.Module):
    """A residual block whose branch has a dropout; all blocks share a mask that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        branch: Tensor = self.down(F.dropout(torch.tanh(self.up(x * mask)), 0.1, self.training))
        return x + branch


class Stack(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mask = torch.ones_like(hidden)
        for block in self.blocks:
            hidden = block(hidden, mask)
        output: Tensor = self.last(hidden)
        return output


def trained(offload: bool, remat: str, steps: int = 2) -> tuple[list[Tensor], int, int]:
    """Gradients of some steps; the memory that the last one takes, and its copies to the host."""
    torch.manual_seed(0)
    device, module = torch.device("sim", 0), torch.get_device_module("sim")
    module.manual_seed(0)
    model = Stack().to(device)
    blocks = list(model.blocks)
    if remat == "block":
        rematerialise(blocks, "block")
    undo = offload_activations(blocks, device) if offload else lambda: None
    gradients = []
    for step in range(steps):
        gc.collect()
        module.synchronize()
        module.reset_peak_memory_stats()
        module.reset_counts()
        before = module.memory_allocated()
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step)).to(device)
        model(x).square().mean().backward()
        copies, peak = module.counts()["copies_to_host"], module.max_memory_allocated() - before
        gradients += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    undo()
    return gradients, peak, copies


def both(remat: str) -> tuple[bool, int, int, int]:
    plain, plain_peak, _ = trained(False, remat)
    moved, peak, copies = trained(True, remat)
    same = len(plain) == len(moved) and all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    return same, plain_peak, peak, copies


@pytest.mark.parametrize("order", ["late", "random"])
@pytest.mark.parametrize(("remat", "tensors"), [("none", 4), ("block", 1)])
def test_gradients_are_the_same_and_the_device_needs_less_memory(
    simulated: Simulated, order: Order, remat: str, tensors: int
) -> None:
    same, plain, peak, copies = simulated.ranks(1, both, remat, order=order)[0]
    assert same
    assert copies == tensors * BLOCKS, "each tensor goes to the host once; weights and masks do not"
    saved = BLOCKS - 2  # two blocks are on the device
    assert peak < plain - (saved - 2) * tensors * LEAST_BYTES


def copies_of_weights(bf16: bool) -> int:
    device, module = torch.device("sim", 0), torch.get_device_module("sim")
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()).to(device) for _ in range(3)]
    offload_activations(blocks, device)
    x = torch.ones(4, 1024, device=device, requires_grad=True)
    module.reset_counts()
    with torch.autocast("sim", torch.bfloat16, enabled=bf16):
        nn.Sequential(*blocks)(x).sum().backward()
    return int(module.counts()["copies_to_host"])


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_and_their_casts_stay_on_the_device(simulated: Simulated, bf16: bool) -> None:
    assert simulated.ranks(1, copies_of_weights, bf16) == [0]


def is_right_without_waits(remat: str) -> bool:
    module = torch.get_device_module("sim")
    plain, *_ = trained(False, remat)
    module.forget_waits(True)
    moved, *_ = trained(True, remat)
    module.forget_waits(False)
    return all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))


def test_gradients_without_waits_between_streams_are_wrong(simulated: Simulated) -> None:
    """The simulation shows what the waits are for."""
    assert simulated.ranks(1, is_right_without_waits, "none") == [False]


class Overwrites(nn.Module):
    """A block that overwrites the result of tanh, which the backward pass of tanh needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).mul_(2)


def refusal(rows: int) -> str:
    device = torch.device("sim", 0)
    blocks = [Overwrites().to(device) for _ in range(3)]
    offload_activations(blocks, device)
    loss = nn.Sequential(*blocks)(torch.ones(rows, WIDTH, device=device)).sum()
    try:
        loss.backward()
    except PlanError as error:
        return error.code
    return ""


@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_tensor_that_is_changed_in_place_is_refused_as_by_autograd(simulated: Simulated, rows: int) -> None:
    assert simulated.ranks(1, refusal, rows) == ["plan.saved_tensor_changed"]


def steps(plan: str, count: int = 2) -> tuple[list[float], int]:
    """Losses of some steps of a plan, and the copies to the host of the last step."""
    torch.manual_seed(0)
    model = Stack(4)
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(4 * ROWS * count, 8, generator=draw)
    data = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(dim=1)), batch_size=4 * ROWS)
    for block in model.blocks:
        block.eval()  # ranks draw other dropout masks than one rank
    engine = paceline.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy, loader=data, plan=plan
    )
    losses, module = [], torch.get_device_module()
    for batch in engine.loader:
        module.reset_counts()
        losses.append(float(engine.step(batch).loss))
    copies = module.counts()["copies_to_host"]
    engine.close()
    return losses, copies


def with_and_without(plan: str) -> tuple[list[float], list[float], int]:
    (plain, before), (moved, copies) = steps(plan), steps(f"{plan} offload_activations=on")
    return plain, moved, copies - before


@pytest.mark.parametrize(
    "plan",
    [
        "fsdp=2 remat=block precision=bf16",
        "tp=2 microbatches=2",
        "pp=2 microbatches=4",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                "dp=2 remat=block",
                "fsdp=2",
                "tp=2 remat=block",
                "pp=2 microbatches=4 remat=block",
                "pp=2 schedule=zero-bubble cut=blocks.1,blocks.2,blocks.3 microbatches=4",
            )
        ),
    ],
)
def test_every_plan_trains_as_without_offload(simulated: Simulated, plan: str) -> None:
    for plain, moved, copies in simulated.ranks(2, with_and_without, plan, deadline_s=120):
        assert moved == plain
        assert copies > 0
