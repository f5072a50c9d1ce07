"""A model divided by tensor parallelism trained beside the whole one, for tests on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.comm import Group
from paceline.job.batch import Batch
from paceline.planning.model.tensor import degrees as unpaired
from paceline.split.layout import Part, whole_parts
from paceline.split.tensor_parallel import TensorReport, shard_tensors

Made = tuple[nn.Module, Batch]


def call(model: nn.Module, batch: Batch) -> Any:
    """The model as an engine calls it: a tuple's last item is the target."""
    return model(**batch) if isinstance(batch, Mapping) else model(*batch[:-1])


def output_of(model: nn.Module, batch: Batch) -> Tensor:
    """The first tensor of the result, or its logits."""
    found = call(model, batch)
    tensor: Tensor = found.logits if hasattr(found, "logits") else tree_leaves(found)[0]
    return tensor


def seeded(make: Callable[[], Made]) -> Made:
    """The same float64 model on every rank, with no zero parameters.

    So biases and norms take part.
    """
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    model, batch = make()
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model.double(), batch


def own_group() -> Group:
    """All ranks of the test."""
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that weighs every number of the output differently."""
    out = output_of(model, batch)
    uneven = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).sin()
    return (out * uneven).square().mean()


def gradients_agree(
    make: Callable[[], Made],
    loss: Callable[[nn.Module, Batch], Tensor] = loss_of,
    *,
    sequence: bool = False,
    large: int = 1 << 40,
) -> TensorReport:
    """Compare a divided model's loss, gradients and buffers with the whole one's.

    Over two steps; returns what was divided.
    """
    unpaired.LARGE = large
    group = own_group()
    full, batch = seeded(make)
    own, _ = seeded(make)
    parts = whole_parts(own)
    report = shard_tensors(own, parts, group, batch, call, sequence=sequence)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (full, own)]
    for _ in range(2):
        losses = []
        for model, optimizer in zip((full, own), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(7)  # of what the model draws
            found = loss(model, batch)
            found.backward()
            losses.append(found.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
        compare_gradients(own, full, parts, group)
        for name, buffer in own.named_buffers():
            torch.testing.assert_close(buffer, dict(full.named_buffers())[name], rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    return report


def compare_gradients(own: nn.Module, full: nn.Module, parts: dict[str, Part], group: Group) -> None:
    """Check that every gradient is its part of the whole model's.

    After the sums that the engine makes.
    """
    expected = dict(full.named_parameters())
    for name, p in own.named_parameters():
        wanted = expected[name].grad
        assert (p.grad is None) == (wanted is None), name
        if p.grad is not None and wanted is not None:
            if "tp" in parts[name].summed:
                group.all_reduce(p.grad)
            part = parts[name].layout.take(wanted)
            torch.testing.assert_close(p.grad, part, rtol=1e-7, atol=1e-10, msg=partial(_named, name))


def _named(name: str, message: str) -> str:
    return f"{name}: {message}"
