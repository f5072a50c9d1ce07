"""Hugging Face Accelerate."""

from __future__ import annotations

from paceline_lab.systems.torch_system import TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Train as Accelerate's quick tour does."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    handlers = [DistributedDataParallelKwargs(**work.settings)] if work.settings else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in work.batches(accelerator.process_index, accelerator.num_processes):
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        accelerator.backward(loss)
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(loss)
    accelerator.end_training()


SYSTEM = TorchSystem(
    name="accelerate",
    title="Accelerate",
    documentation="https://huggingface.co/docs/accelerate/quicktour",
    train=f"{__name__}:train",
    requirements=["accelerate.txt"],
    tuned={"gradient_as_bucket_view": True, "static_graph": True},
)
