"""TensorFlow's strategies: the job laid out as arrays for scripts without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.files import write_whole
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline_lab.systems.system import Command, Start, System
from paceline_lab.systems.task import JOB, Steps

SCRIPTS = Path(__file__).with_name("tensorflow_scripts")
MODELS = ("mlp", "cifar_cnn", "gpt")
DOCUMENTATION = "https://www.tensorflow.org/guide/distributed_training"


@dataclass(frozen=True, kw_only=True)
class TensorFlowSystem(System):
    """A `System` whose `program`, the name of a script, runs in TensorFlow's own environment."""

    program: str
    requirements: Sequence[str] = ("tensorflow.txt",)
    apart: bool = True

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """The first thing of the job that has no counterpart here."""
        if job.model.zoo not in MODELS:
            return f"the model would have to be written again for TensorFlow; here that are {', '.join(MODELS)}"
        if job.loss.name != "cross_entropy" or job.loss.args:
            return "the loss would have to be written again for TensorFlow; here that is plain cross_entropy"
        if job.model.args.get("dropout"):
            return "its dropout draws other numbers than torch's"
        if job.clip_norm is not None:
            return "Keras clips the gradient of each replica before they are summed, which is another computation"
        if job.optimizer.name not in ("sgd", "adam", "adamw") or (
            job.optimizer.name != "adamw" and job.optimizer.weight_decay
        ):
            return f"Keras has no {job.optimizer.name} of these settings"
        return None

    def commands(self, start: Start) -> Sequence[Command]:
        """The script once, on this machine."""
        lay_out(start)
        return [self.command(start)]

    def command(
        self, start: Start, place: int = 0, config: dict[str, Any] | None = None, *, serves: bool = False
    ) -> Command:
        """The script in a place, with the configuration of a cluster where there is one."""
        words = [str(start.python), str(SCRIPTS / self.program), str(start.folder)]
        environment = {"TF_CONFIG": json.dumps(config)} if config else {}
        return Command(words, start.places[place], environment, serves=serves)

    def steps(self, start: Start) -> Steps:
        """Steps that the script left; losses are of the whole batch."""
        return Steps.of_ranks(start.folder, 1)


def addresses(start: Start, ranks: int, first: int = 0) -> list[str]:
    """An address and a port for each of so many ranks, host by host."""
    each = start.ranks_per_host
    hosts = [host.address if host else "127.0.0.1" for host in start.places for _ in range(each)]
    return [f"{hosts[rank % len(hosts)]}:{start.port + first + rank}" for rank in range(ranks)]


def lay_out(start: Start) -> None:
    """Write samples, their order, first weights and settings where the scripts read them."""
    from paceline.run.build import load_published, seed_all

    job = Job.load(start.folder / JOB)
    seed_all(job.seed)
    data: Any = job.data.build(input_shape=job.model.input_shape(), seed=job.seed).train
    order = np.asarray(list(islice(_batches(job, len(data)), start.task.steps)))
    inputs, target = data.__getitems__(list(range(len(data))))
    if inputs.dim() == 4:
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
    np.save(start.folder / "inputs.npy", inputs.numpy())
    np.save(start.folder / "target.npy", target.numpy())
    np.save(start.folder / "order.npy", order)
    seed_all(job.seed)
    model = job.model.build()
    load_published(job, model)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    np.savez(start.folder / "weights.npz", **weights)
    write_whole(start.folder / "tensorflow.json", json.dumps(_about(start, job)))


def _batches(job: Job, samples: int) -> Any:
    part = Partition(
        job.partition,
        samples=samples,
        global_batch=job.global_batch,
        seed=job.seed,
        replica=0,
        replicas=1,
        drop_last=True,
    )
    return (batch for epoch in count() for batch in part.batches(epoch))


def _about(start: Start, job: Job) -> dict[str, Any]:
    spec = job.optimizer
    arguments: dict[str, Any] = {"momentum": spec.momentum, "nesterov": spec.nesterov}
    if spec.name != "sgd":
        # Keras adds epsilon before it corrects the second moment's bias, torch after it: a tenth is nearly the same
        # over the first hundred steps
        arguments = {"beta_1": spec.betas[0], "beta_2": spec.betas[1], "epsilon": spec.eps / 10}
    if spec.name == "adamw":
        arguments["weight_decay"] = spec.weight_decay
    rates = [spec.lr * job.schedule.factor_at(step, job.stop.steps) for step in range(start.task.steps + 1)]
    return {
        "ranks": start.task.ranks,
        "steps": start.task.steps,
        "threads": start.task.threads,
        "model": job.model.zoo,
        "args": job.model.args,
        "optimizer": {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[spec.name],
        "optimizer_args": arguments,
        "rates": rates,
    }
