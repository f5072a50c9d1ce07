"""PyTorch's fully sharded data parallel (`fully_shard`, FSDP2) over gloo."""

from __future__ import annotations

from paceline_lab.systems.torch_system import TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Train as the tutorial on `fully_shard` does: each repeated block, then the whole model."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = work.model()
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block, mesh=mesh, **work.settings)
    fully_shard(model, mesh=mesh, **work.settings)
    # torch 2.13 has no fused SGD for divided parameters
    optimizer = work.optimizer(model.parameters(), fused=work.job.optimizer.name != "sgd")
    schedule = work.schedule(optimizer)
    for batch in work.batches(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(loss)
    dist.destroy_process_group()


SYSTEM = TorchSystem(
    name="fsdp",
    title="PyTorch FSDP2",
    documentation="https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html",
    train=f"{__name__}:train",
    tuned={"reshard_after_forward": False},
    takes_channels_last=False,  # it refuses parameters that are not contiguous
)
