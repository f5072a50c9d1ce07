"""Ray Train's TorchTrainer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from paceline.cluster.cluster import Cluster
from paceline.files import write_whole
from paceline.job.job import Job
from paceline_lab.systems.system import Command, Start
from paceline_lab.systems.torch_system import RUN, TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Start the workers as Ray's page on PyTorch does."""
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
    """Train in a worker, whose model `prepare_model` wraps."""
    import ray.train
    from ray.train.torch import prepare_model

    work = Work(Path(config["folder"]))
    context = ray.train.get_context()
    model = prepare_model(work.model(), parallel_strategy_kwargs=work.settings)
    optimizer = work.optimizer(model.parameters())
    schedule = work.schedule(optimizer)
    for batch in work.batches(context.get_world_rank(), context.get_world_size()):
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        work.clip(model)
        optimizer.step()
        schedule.step()
        work.took(loss)
    work.write()


class _RayTrain(TorchSystem):
    """A driver, which starts a cluster of its own on this machine."""

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """Its driver makes a cluster of one machine."""
        return "its driver starts a cluster of Ray on one machine alone" if cluster.emulate else None

    def commands(self, start: Start) -> Sequence[Command]:
        """The driver."""
        environment = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(start.scratch)}
        write_whole(token := start.folder / "token", secrets.token_hex(32))
        environment["RAY_AUTH_TOKEN_PATH"] = str(token)  # else Ray makes one in the user's home
        return [Command([str(start.python), "-m", RUN, self.train, str(start.folder)], environment=environment)]


SYSTEM = _RayTrain(
    name="ray-train",
    title="Ray Train",
    documentation="https://docs.ray.io/en/latest/train/getting-started-pytorch.html",
    train=f"{__name__}:train",
    requirements=["ray-train.txt"],
    tuned={"gradient_as_bucket_view": True, "static_graph": True},
)
