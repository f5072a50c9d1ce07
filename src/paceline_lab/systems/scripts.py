"""Training scripts of the PyTorch-based systems, written as in each system's documentation.

The table of a comparison counts the lines in which each script differs from `plain` and `take_steps`. Each function
contains its own imports, so that they are counted as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from paceline.job.batch import rows
from paceline_lab.systems.work import Work


def plain(work: Work) -> None:
    """Train in one process, as in PyTorch's tutorials."""
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    take_steps(work, model, optimizer, schedule, work.batches())


def take_steps(work: Work, model: nn.Module, optimizer: Any, schedule: LambdaLR, batches: Iterable[Any]) -> None:
    """Run the training loop of PyTorch's tutorials, which several scripts share."""
    for batch in batches:
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(loss)


def reference(work: Work) -> None:
    """Train in one process; split each batch into parts if replicas compute batch normalization separately."""
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    for batch in work.batches():
        optimizer.zero_grad()
        parts = work.parts(batch)
        losses = [work.loss(model, part) * (rows(part) / rows(batch)) for part in parts]
        for loss in losses:
            loss.backward()
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(torch.stack(losses).sum())


def ddp(work: Work) -> None:
    """Train as in PyTorch's notes on DistributedDataParallel."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(work.model(), **work.settings)
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    take_steps(work, model, optimizer, schedule, work.batches(dist.get_rank(), dist.get_world_size()))
    dist.destroy_process_group()


def fsdp(work: Work) -> None:
    """Train as in the tutorial on `fully_shard`: shard each repeated block, then the whole model."""
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
    # torch 2.13 does not support fused SGD for sharded parameters
    optimizer = work.optimizer(model.parameters(), fused=work.job.optimizer.name != "sgd")
    schedule = work.schedule(optimizer)
    take_steps(work, model, optimizer, schedule, work.batches(dist.get_rank(), dist.get_world_size()))
    dist.destroy_process_group()


def accelerate(work: Work) -> None:
    """Train as in Accelerate's quick tour."""
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


def lightning(work: Work) -> None:
    """Train a LightningModule as in "Lightning in 15 minutes"."""
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
        use_distributed_sampler=False,  # the batches already contain only this rank's samples
    )
    trainer.fit(Module(), work.batches(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))


def deepspeed(work: Work) -> None:
    """Train as in DeepSpeed's getting-started guide, with ZeRO stage 1."""
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


def horovod(work: Work) -> None:
    """Train as in Horovod's guide for PyTorch."""
    import horovod.torch as hvd

    hvd.init()
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    parameters = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=parameters, **work.settings)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for batch in work.batches(hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.synchronize()
        work.clip(model)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        work.took(loss)


def ray_train(work: Work) -> None:
    """Start the workers as in Ray Train's guide for PyTorch."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ranks = work.task.ranks
    ray.init(num_cpus=ranks + 1, include_dashboard=False, log_to_driver=False, address="local")
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"folder": str(work.folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(storage_path=str(work.folder / "ray")),
    )
    trainer.fit()
    ray.shutdown()


def train_in_worker(config: dict[str, str]) -> None:
    """Train in a Ray worker, with the model wrapped by `prepare_model`."""
    import ray.train
    from ray.train.torch import prepare_model

    work = Work(Path(config["folder"]))
    context = ray.train.get_context()
    model = prepare_model(work.model(), parallel_strategy_kwargs=work.settings)
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    take_steps(work, model, optimizer, schedule, work.batches(context.get_world_rank(), context.get_world_size()))
    work.write()


def torchft(work: Work) -> None:
    """Train as in torchft's DDP example."""
    import os
    from datetime import timedelta

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    number = int(os.environ["REPLICA_GROUP_ID"])
    model = work.model()
    inner = work.optimizer(model.parameters())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(held: dict[str, Any]) -> None:
        model.load_state_dict(held["model"])
        inner.load_state_dict(held["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=work.task.ranks,
        replica_id=f"replica_{number}_",
        init_sync=False,  # all ranks start with the same weights
        hostname=os.environ["REPLICA_HOST"],
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    schedule = work.schedule(inner)
    for batch in work.batches(number, work.task.ranks):
        optimizer.zero_grad()
        loss = work.loss(wrapped, batch)
        loss.backward()
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(loss)
    manager.shutdown()


def flower(work: Work) -> None:
    """Run Flower's simulation as in its quickstart for PyTorch."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    ranks, folder = work.task.ranks, work.folder
    client_app, server_app = ClientApp(), ServerApp()

    def take(message: Message, context: Context) -> Message:
        rank, step = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        state, loss = _one_step(folder, message.content["arrays"].to_torch_state_dict(), rank, step)
        metrics = MetricRecord({"loss": loss, "num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)

    def serve(grid: Grid, context: Context) -> None:
        ended_s: list[float] = []
        everyone = {"fraction_train": 1.0, "min_train_nodes": ranks, "min_available_nodes": ranks}
        strategy = FedAvg(**everyone, fraction_evaluate=0.0)

        def note(of_round: int, arrays: ArrayRecord) -> MetricRecord:
            ended_s.append(time.time())
            return MetricRecord({"round": of_round})

        found = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(work.model().state_dict()),
            num_rounds=work.task.steps,
            train_config=ConfigRecord({}),
            evaluate_fn=note,
        )
        losses = [float(found.train_metrics_clientapp[step + 1]["loss"]) for step in range(work.task.steps)]
        work.record(losses, ended_s[-work.task.steps :])

    client_app.train()(take)
    server_app.main()(serve)
    backend = {"init_args": {"num_cpus": ranks}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=ranks, backend_config=backend)


@cache
def _work(folder: Path) -> Work:
    return Work(folder)


def _one_step(folder: Path, state: dict[str, Any], rank: int, step: int) -> tuple[dict[str, Any], float]:
    """Train one step from the server's weights. Return the new weights and the loss."""
    work = _work(folder)
    model = work.model()
    model.load_state_dict(state)
    optimizer = work.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= work.job.schedule.factor_at(step, work.job.stop.steps)
    loss = work.loss(model, work.batch(step, rank, work.task.ranks))
    loss.backward()
    optimizer.step()
    return model.state_dict(), loss.item()
