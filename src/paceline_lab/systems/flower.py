"""Flower's simulation: every rank a client that takes one step a round.

The server averages the weights. For SGD without momentum that is synchronous training. Federated jobs are compared by
`benchmarks/federated.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline_lab.systems.system import Command, Start
from paceline_lab.systems.task import Steps
from paceline_lab.systems.torch_system import RUN, TorchSystem
from paceline_lab.systems.work import Work


def train(work: Work) -> None:
    """Run Flower's simulation as its quickstart for PyTorch does."""
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
    """A client's step from the weights that the server sent; its weights and loss."""
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


class _Flower(TorchSystem):
    """One command, which starts Ray and the clients in it."""

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """Averaged weights are those of synchronous training for plain SGD alone."""
        if cluster.emulate:
            return "its simulation runs on one machine"
        if job.optimizer.name != "sgd" or job.optimizer.momentum or job.clip_norm is not None:
            return "averaged weights are those of synchronous training only for sgd without momentum and clipping"
        return None

    def steps(self, start: Start) -> Steps:
        """Steps that the server saw: losses are means over the clients."""
        return Steps.of_ranks(start.folder, 1)

    def commands(self, start: Start) -> Sequence[Command]:
        """The simulation."""
        environment = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_TMPDIR": str(start.scratch), "FLWR_HOME": str(start.folder)}
        return [Command([str(start.python), "-m", RUN, self.train, str(start.folder)], environment=environment)]


SYSTEM = _Flower(
    name="flower",
    title="Flower",
    documentation="https://flower.ai/docs/framework/tutorial-quickstart-pytorch.html",
    train=f"{__name__}:train",
    requirements=["flower.txt"],
)
