"""What torch has for several devices trains on simulated ones as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from simulated.environment import Order, Simulated


@pytest.mark.parametrize("order", ["late", pytest.param("random", marks=pytest.mark.slow)])
def test_torchs_own_parallelism_trains_as_one_process(simulated: Simulated, order: Order) -> None:
    assert simulated.ranks(2, differences, order=order, deadline_s=100) == [[], []]


@pytest.mark.slow
def test_fsdp_without_waits_between_streams_is_wrong(simulated: Simulated) -> None:
    """The simulation shows what FSDP2's waits are for."""
    assert simulated.ranks(2, is_right_without_waits, deadline_s=100) == [False, False]


def differences() -> list[str]:
    """Each kind of parallelism whose parameters are not those of one process on the CPU."""
    found = []
    for kind in (data_parallel, fully_sharded, tensor_parallel, pipelined, synchronized_batch_norm):
        torch.manual_seed(0)
        difference = kind()
        if not difference < 1e-4:
            found.append(f"{kind.__name__}: {difference}")
    if not (difference := fully_sharded(bf16=True)) < 0.05:
        found.append(f"fully_sharded in bfloat16: {difference}")
    return found


def is_right_without_waits() -> bool:
    sim = torch.get_device_module("sim")
    sim.forget_waits(True)
    right = fully_sharded() < 1e-4
    sim.forget_waits(False)
    return right


def own_device() -> torch.device:
    return torch.device("sim", dist.get_rank())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)])


def samples() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(5))


def own_samples() -> Tensor:
    return samples().chunk(2)[dist.get_rank()].to(own_device())


def train(module: nn.Module, parameters: list[nn.Parameter], inputs: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(parameters, 1e-2, foreach=True, eps=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        module(inputs).pow(2).mean().backward()
        optimizer.step()


def expected() -> list[Tensor]:
    alone = model()
    train(alone, list(alone.parameters()), samples())
    return [parameter.detach() for parameter in alone.parameters()]


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max((one.detach().cpu() - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


def data_parallel() -> float:
    module = model().to(own_device())
    wrapped = nn.parallel.DistributedDataParallel(module, device_ids=[own_device().index])
    train(wrapped, list(wrapped.parameters()), own_samples())
    return worst(list(module.parameters()), expected())


def fully_sharded(*, bf16: bool = False) -> float:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module, mesh = model().to(own_device()), init_device_mesh("sim", (2,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in module:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    train(module, list(module.parameters()), own_samples())
    return worst([parameter.full_tensor() for parameter in module.parameters()], expected())  # type: ignore[attr-defined]


def tensor_parallel() -> float:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module, mesh = model().to(own_device()), init_device_mesh("sim", (2,))
    for layer in module:
        parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(module, list(module.parameters()), samples().to(own_device()))
    return worst([parameter.full_tensor() for parameter in module.parameters()], expected())  # type: ignore[attr-defined]


def pipelined() -> float:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).mean()

    rank, whole = dist.get_rank(), model()
    part: Callable[[nn.Sequential], nn.Module] = lambda m: m[0] if rank == 0 else m[1:]  # noqa: E731
    stage = part(whole).to(own_device())
    schedule = Schedule1F1B(PipelineStage(stage, rank, 2, own_device()), 4, loss_fn=loss)
    if rank == 0:
        schedule.step(samples().to(own_device()))
    else:
        schedule.step(target=torch.zeros(8, 8, device=own_device()), losses=[])
    alone = model()
    loss(alone(samples()), torch.zeros(8, 8)).backward()
    gradients = [parameter.grad for parameter in stage.parameters()]
    wanted = [parameter.grad for parameter in part(alone).parameters()]
    return worst([g for g in gradients if g is not None], [g for g in wanted if g is not None])


def synchronized_batch_norm() -> float:
    torch.manual_seed(0)
    inputs = torch.randn(6, 4, 5) * torch.arange(1.0, 7).view(6, 1, 1)
    alone = nn.BatchNorm1d(4)
    F.relu(alone(inputs)).square().sum().backward()
    layer = nn.SyncBatchNorm(4).to(own_device())
    F.relu(layer(inputs.chunk(2)[dist.get_rank()].to(own_device()))).square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    dist.all_reduce(layer.weight.grad)
    dist.all_reduce(layer.bias.grad)
    found = [layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]
    wanted = [alone.weight.grad, alone.bias.grad, alone.running_mean, alone.running_var]
    return worst([t for t in found if t is not None], [t for t in wanted if t is not None])
