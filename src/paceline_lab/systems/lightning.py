"""PyTorch Lightning with its strategy `ddp`."""

from __future__ import annotations

import os
from typing import Any

from paceline_lab.systems.torch_system import TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Train a LightningModule as Lightning in 15 minutes does."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            return self.model(*inputs, **keywords)

        def training_step(self, batch: Any, number: int) -> Any:
            return work.loss(self, batch)

        def configure_optimizers(self) -> Any:
            optimizer = work.optimizer(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": work.schedule(optimizer), "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            work.took(outputs["loss"])

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=work.task.hosts,
        strategy=DDPStrategy(process_group_backend="gloo", **work.settings),
        max_steps=work.task.steps,
        gradient_clip_val=work.job.clip_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the batches are this rank's already
    )
    trainer.fit(Module(), work.batches(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))


SYSTEM = TorchSystem(
    name="lightning",
    title="Lightning",
    documentation="https://lightning.ai/docs/pytorch/stable/starter/introduction.html",
    train=f"{__name__}:train",
    requirements=["lightning.txt"],
    tuned={"gradient_as_bucket_view": True, "static_graph": True},
)
