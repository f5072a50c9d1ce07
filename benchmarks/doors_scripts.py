"""Training scripts of DDP, Lightning and Accelerate as their own pages write them, for doors.py.

    doors_scripts.py ddp|lightning|accelerate plain|shm|int8

`plain` imports nothing of paceline; the others have its line. All train `cifar_cnn` of ddp_loop.py on invented images,
and answer questions on stdin, as `ddp_loop.answer` says.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_loop import answer, cifar_cnn

SAMPLES, BATCH, LR = 4096, 32, 0.01  # the batch is a rank's


def images() -> TensorDataset:
    """Invented images whose class is the brightest of ten squares."""
    inputs = torch.randn(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :, :30, :6].reshape(SAMPLES, 10, -1).mean(2).argmax(1))


def ddp(way: str) -> None:
    """DDP's tutorial."""
    if way == "shm":
        from paceline.frameworks.pytorch import init_process_group

        init_process_group()
    else:
        dist.init_process_group("gloo")
    model = DistributedDataParallel(cifar_cnn())
    if way == "int8":
        from paceline.frameworks.pytorch import CodecState, codec_hook

        model.register_comm_hook(CodecState("int8"), codec_hook)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    data = images()
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))

    def steps() -> Iterator[float]:
        for _ in count():
            for inputs, target in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), target)
                loss.backward()
                optimizer.step()
                yield float(loss.detach())

    answer(steps(), iter(()))
    dist.destroy_process_group()


def accelerate(way: str) -> None:
    """Accelerate's quick tour."""
    if way == "shm":
        from paceline.frameworks.pytorch import init_process_group

        init_process_group()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network = cifar_cnn()
    model, optimizer, loader = accelerator.prepare(
        network, torch.optim.SGD(network.parameters(), LR, momentum=0.9), DataLoader(images(), BATCH)
    )

    def steps() -> Iterator[float]:
        for _ in count():
            for inputs, target in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), target)
                accelerator.backward(loss)
                optimizer.step()
                yield float(loss.detach())

    answer(steps(), iter(()))
    accelerator.end_training()


def lightning(way: str) -> None:
    """Lightning's first example."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module = cifar_cnn()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), LR, momentum=0.9)

    class Answering(pl.Callback):
        """Trains as far as the questions on stdin ask, as `ddp_loop.answer`."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.next_question(trainer)

        def next_question(self, trainer: Any) -> None:
            line = sys.stdin.readline()
            self.question: str
            self.left: int
            self.question, self.left = json.loads(line) if line else ("", 0)
            trainer.should_stop = trainer.should_stop or not line
            self.asked, self.losses, self.started = self.left, list[float](), time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.left -= 1
            self.losses.append(float(outputs["loss"].detach()))
            if self.left == 0:
                step_s = (time.perf_counter() - self.started) / self.asked
                print(json.dumps(self.losses if self.question == "losses" else step_s), flush=True)
                self.next_question(trainer)

    strategy: Any = "ddp"
    if way == "shm":
        from paceline.frameworks.lightning import PacelineStrategy

        strategy = PacelineStrategy()
    settings: Any = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=-1, callbacks=[Answering()], **settings
    )
    trainer.fit(Net(), DataLoader(images(), BATCH, shuffle=False))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    {"ddp": ddp, "lightning": lightning, "accelerate": accelerate}[sys.argv[1]](sys.argv[2])
