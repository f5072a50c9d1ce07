"""DeepSpeed on CPUs, over gloo."""

from __future__ import annotations

from paceline_lab.systems.torch_system import TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Train as DeepSpeed's getting-started page does, with ZeRO's first stage."""
    import os

    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {
        "train_batch_size": work.job.global_batch,
        "gradient_clipping": work.job.clip_norm or 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **work.settings,
    }
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    for batch in work.batches(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()):
        loss = work.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        work.took(loss)
    deepspeed.comm.destroy_process_group()


SYSTEM = TorchSystem(
    name="deepspeed",
    title="DeepSpeed",
    documentation="https://www.deepspeed.ai/getting-started/",
    train=f"{__name__}:train",
    requirements=["build.txt", "deepspeed.txt"],
    tuned={"zero_optimization": {"stage": 0}},
    takes_channels_last=False,  # it fails where it broadcasts them
)
