"""A user's project: every public name of paceline, as the documentation shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Cluster, Engine, Job, Loss, Metric, Plan, PlanProblem, Prediction, Run, StepResult
from paceline.sync import Reduction, Replica, SyncRule


class Huber:
    """A loss of one's own, with its own count of items."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.smooth_l1_loss(output, target)

    def items(self, target: Tensor) -> int:
        return len(target)


class WithinOne:
    """A metric of one's own: a ratio of two sums."""

    name = "within_one"

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return ((output - target).abs() < 1).sum(), len(target)

    def result(self, total: Tensor, count: int) -> float:
        return float(total) / count


class Summed(SyncRule):
    """A sync rule of one's own."""

    def attach(self, replica: Replica) -> None:
        self.replica = replica

    def after_backward(self, step: int, scalars: Tensor) -> Reduction:
        gradients = [p.grad for p in self.replica.trainable if p.grad is not None]
        for gradient in (*gradients, scalars):
            self.replica.dp.all_reduce(gradient)
        return Reduction(gradients, scalars)


def from_a_job() -> float:
    job: Job = Job.load("job.yaml")
    cluster: Cluster = Cluster.load(Path("cluster.yaml"))
    chosen: Plan = paceline.plan(job, cluster="2x8xH100-SXM, 400gbit")
    found: Prediction = paceline.estimate("job.yaml", chosen, cluster=cluster)
    factors = paceline.calibrate_on(["runs.csv", Path("runs")], cluster="8xH100-SXM")
    adjusted = paceline.estimate(job, "dp=2 tp=2", calibration=factors)
    problems = paceline.plan_errors(job, Plan(tp=3), cluster=cluster)
    first: PlanProblem = problems[0]
    nearest: Plan | None = problems.nearest
    values: dict[str, Any] = first.fields
    print(first.code, first.text, values, nearest, found.interval, adjusted.step_time_s)
    try:
        run: Run = paceline.train(job, "auto", cluster=cluster, run="runs/mine", resume=True)
    except paceline.PlanError as error:
        print(error.code, error.fields, [problem.code for problem in error.problems], error.nearest)
        raise
    except (paceline.JobError, paceline.DataError, paceline.LaunchError) as error:
        raise SystemExit(str(error)) from error
    parity = paceline.check(job, chosen, steps=3)
    if not parity.holds:
        print(parity.largest.gradient, parity.verdict)
    return run.losses[-1] + run.throughput


def own_loop() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data: DataLoader[Any] = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)
    loss: Loss = Huber()
    metric: Metric = WithinOne()
    log = paceline.tracker("tensorboard", folder="logs")
    engine: Engine = paceline.setup(model, optimizer, loss=loss, loader=data, plan="dp=1", on_step=[log, print])
    for batch in engine.loader:
        result: StepResult = engine.step(batch)
        engine.print(result.step, result.loss + result.grad_norm, result.problem)
    print(engine.evaluate(data, [metric]))
    engine.save("state", epoch=1)
    log.close()


def own_backward(model: nn.Module, loader: DataLoader[Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = paceline.setup([model], [optimizer], loader=loader, precision="bf16", clip_norm=1.0)
    for inputs, labels in engine.loader:
        with engine.autocast():
            loss = nn.functional.cross_entropy(model(inputs), labels)
        value: Tensor = engine.backward(loss)
        engine.update(clip_norm=0.5)
        print(float(value), engine.is_main, engine.mean(1.0))
    engine.close()


def errors() -> tuple[type[paceline.PacelineError], ...]:
    return (
        paceline.BatchError,
        paceline.ChannelError,
        paceline.CheckpointError,
        paceline.ClusterError,
        paceline.DeadlineError,
        paceline.FederateError,
        paceline.LoaderProcessError,
        paceline.NonFiniteError,
        paceline.RemoteError,
        paceline.RunError,
        paceline.ServerLost,
        paceline.ServerRefused,
        paceline.StorageError,
        paceline.SyncError,
    )
