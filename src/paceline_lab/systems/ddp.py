"""PyTorch's DistributedDataParallel over gloo."""

from __future__ import annotations

from paceline_lab.systems.torch_system import TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Train as the notes on DistributedDataParallel do."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(work.model(), **work.settings)
    optimizer = work.optimizer(model.parameters())
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
    name="ddp",
    title="PyTorch DDP",
    documentation="https://docs.pytorch.org/docs/stable/notes/ddp.html",
    train=f"{__name__}:train",
    tuned={"gradient_as_bucket_view": True, "static_graph": True},
)
