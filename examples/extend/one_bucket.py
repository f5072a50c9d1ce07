from paceline_lab.systems.system import System, SystemInfo
from paceline_lab.systems.work import Work

INFO = SystemInfo("one_bucket:SYSTEM")
SYSTEM = System(
    name="ddp-bucket",
    title="DDP, one bucket",
    documentation="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    train="one_bucket:train",
)


def train(work: Work) -> None:
    """Train as DDP's page does, with all gradients in one bucket."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(work.model(), bucket_cap_mb=1000)
    optimizer = work.optimizer(model.parameters())
    for batch in work.batches(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()
        work.took(loss)
    dist.destroy_process_group()
