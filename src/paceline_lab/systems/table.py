"""All systems that can be compared: how each is installed, started, and measured."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from paceline.files import write_whole
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.run.record.run import Run
from paceline_lab.systems.system import JOB, Command, Start, Steps, System, steps_of_one

_SCRIPTS = "paceline_lab.systems.scripts"
_TF_SCRIPT = Path(__file__).with_name("tensorflow_scripts") / "strategies.py"
_TF_MODELS = ("mlp", "cifar_cnn", "gpt")
_TF_DOCUMENTATION = "https://www.tensorflow.org/guide/distributed_training"
_TUNED_DDP = {"gradient_as_bucket_view": True, "static_graph": True}


def _paceline(start: Start) -> list[Command]:
    """Return the `paceline train` command, which starts the ranks itself, even on emulated hosts."""
    where = start.folder / "cluster.yaml"
    write_whole(where, start.cluster.to_yaml())
    train = [sys.executable, "-m", "paceline", "train", str(start.folder / JOB), "--cluster", str(where)]
    return [Command([*train, "--plan", str(start.task.settings["plan"]), "--run", str(start.folder / "run")])]


def _recorded(start: Start) -> Steps:
    """Read the steps that a run of paceline recorded, with losses of the global batch."""
    run = Run(start.folder / "run")
    links = [event["links"].values() for event in run.events() if event["event"] == "links"]
    wire = [max(link["sent_bytes"], link["received_bytes"]) for each in links for link in each]
    return Steps(run.losses, [line["time"] for line in run.steps(0)], max(wire, default=None))


def _alone(start: Start) -> list[Command]:
    """Return the command of a single process, regardless of the number of ranks."""
    return [Command(start.program, start.places[0])]


def _horovodrun(start: Start) -> list[Command]:
    ranks = str(start.task.ranks)
    launcher = ["-m", "horovod.runner.launch", "--gloo", "-np", ranks, "-H", f"localhost:{ranks}"]
    return [Command([str(start.python), *launcher, *start.program])]


def _driver_of_ray(start: Start) -> list[Command]:
    """Return the command of a Ray driver, which starts its own cluster on this machine."""
    environment = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(start.scratch)}
    write_whole(token := start.folder / "token", secrets.token_hex(32))
    # without this variable, Ray writes a token to the user's home directory
    environment["RAY_AUTH_TOKEN_PATH"] = str(token)
    return [Command(start.program, environment=environment)]


def _groups_of_torchft(start: Start) -> list[Command]:
    """Return the commands of a torchft lighthouse, and of one torchrun for each rank.

    The lighthouse runs on the first host. Every rank is a replica group of its own.
    """
    python, *program = start.program
    port, bind = start.port + 1, start.address
    binary = str(start.python.with_name("torchft_lighthouse"))
    options = ["--min_replicas", str(start.task.ranks), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    commands = [Command([binary, "--bind", f"{bind}:{port}", *options], start.places[0], serves=True)]
    for rank in range(start.task.ranks):
        host = start.places[rank // start.ranks_per_host]
        address = host.address if host else "127.0.0.1"
        words = [python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
        words += [f"--master-addr={address}", f"--master-port={port + 1 + rank}", *program]
        variables = {"TORCHFT_LIGHTHOUSE": f"http://{bind}:{port}", "REPLICA_GROUP_ID": str(rank)}
        commands.append(Command(words, host, {**variables, "REPLICA_HOST": address}))
    return commands


def _simulation_of_flower(start: Start) -> list[Command]:
    """Return the command of a Flower simulation, in which the server records the steps."""
    environment = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_TMPDIR": str(start.scratch), "FLWR_HOME": str(start.folder)}
    return [Command(start.program, environment=environment)]


def _refusal_of_flower(job: Job) -> str | None:
    if job.optimizer.name != "sgd" or job.optimizer.momentum or job.clip_norm is not None:
        return "averaged weights are those of synchronous training only for sgd without momentum and clipping"
    return None


# TensorFlow


def _refusal_of_tensorflow(job: Job) -> str | None:
    """Return the reason why the TensorFlow script cannot train the job; None if it can."""
    if job.model.zoo not in _TF_MODELS:
        return f"the model would have to be written again for TensorFlow; here that are {', '.join(_TF_MODELS)}"
    if job.loss.name != "cross_entropy" or job.loss.args:
        return "the loss would have to be written again for TensorFlow; here that is plain cross_entropy"
    if job.model.args.get("dropout"):
        return "its dropout draws other numbers than torch's"
    if job.model.freeze:
        return "model.freeze names parameters of a torch model"
    if job.clip_norm is not None:
        return "Keras clips the gradient of each replica before they are summed, which is another computation"
    name, decays = job.optimizer.name, bool(job.optimizer.weight_decay)
    if name not in ("sgd", "adam", "adamw") or (name != "adamw" and decays):
        return f"Keras has no {name} of these settings"
    return None


def _strategy(
    start: Start, name: str, place: int = 0, config: dict[str, Any] | None = None, *, serves: bool = False
) -> Command:
    """Return the command that runs a strategy's script on a host. A given configuration is set as TF_CONFIG."""
    words = [str(start.python), str(_TF_SCRIPT), name, str(start.folder)]
    return Command(words, start.places[place], {"TF_CONFIG": json.dumps(config)} if config else {}, serves=serves)


def _mirrored(start: Start) -> list[Command]:
    _lay_out(start)
    return [_strategy(start, "mirrored")]


def _workers(start: Start) -> list[Command]:
    """Return one command for each worker, each with its own TF_CONFIG."""
    _lay_out(start)
    cluster = {"worker": _addresses(start, start.task.ranks)}
    configs = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(start.task.ranks)]
    return [
        _strategy(start, "multiworker", rank // start.ranks_per_host, config) for rank, config in enumerate(configs)
    ]


def _workers_and_server(start: Start) -> list[Command]:
    """Return the commands of all workers, a parameter server and the coordinator.

    The server and the coordinator run on the first host.
    """
    _lay_out(start)
    ranks = start.task.ranks
    server, chief = (f"{start.address}:{start.port + ranks + number}" for number in (0, 1))
    cluster = {"worker": _addresses(start, ranks), "ps": [server], "chief": [chief]}

    def task(kind: str, number: int, place: int) -> Command:
        config = {"cluster": cluster, "task": {"type": kind, "index": number}}
        return _strategy(start, "server", place, config, serves=kind != "chief")

    workers = [task("worker", rank, rank // start.ranks_per_host) for rank in range(ranks)]
    return [*workers, task("ps", 0, 0), task("chief", 0, 0)]


def _addresses(start: Start, ranks: int) -> list[str]:
    """Return the `address:port` of each rank, in rank order."""
    hosts = [host.address if host else "127.0.0.1" for host in start.places for _ in range(start.ranks_per_host)]
    return [f"{hosts[rank]}:{start.port + rank}" for rank in range(ranks)]


def _lay_out(start: Start) -> None:
    """Write the samples, their order, the initial weights and the settings to the run's folder."""
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
        # Keras adds epsilon before the bias correction of the second moment, but torch adds it after the correction.
        # In the first hundred steps, a tenth of torch's epsilon has nearly the same effect in Keras.
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


_TF: dict[str, Any] = {
    "requirements": ["tensorflow.txt"],
    "apart": True,
    "steps": steps_of_one,
    "refusal": _refusal_of_tensorflow,
}
_GCC = {
    "CXX": str(Path(__file__).with_name("cxx20")),
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "MAKEFLAGS": "-j2",
}
PACELINE = System(
    name="paceline", title="paceline", documentation="docs/tutorials/first_run.md", commands=_paceline, steps=_recorded
)
PLAIN = System(
    name="plain",
    title="PyTorch, one process",
    documentation="https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html",
    train=f"{_SCRIPTS}:plain",
    commands=_alone,
    steps=steps_of_one,
)
# The losses of every system are compared with the losses of this reference.
REFERENCE = replace(PLAIN, name="reference", train=f"{_SCRIPTS}:reference")
DDP = System(
    name="ddp",
    title="PyTorch DDP",
    documentation="https://docs.pytorch.org/docs/stable/notes/ddp.html",
    train=f"{_SCRIPTS}:ddp",
    tuned=_TUNED_DDP,
)
FSDP = System(
    name="fsdp",
    title="PyTorch FSDP2",
    documentation="https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html",
    train=f"{_SCRIPTS}:fsdp",
    tuned={"reshard_after_forward": False},
    takes_channels_last=False,  # FSDP2 refuses parameters that are not contiguous
)
ACCELERATE = System(
    name="accelerate",
    title="Accelerate",
    documentation="https://huggingface.co/docs/accelerate/quicktour",
    train=f"{_SCRIPTS}:accelerate",
    requirements=["accelerate.txt"],
    tuned=_TUNED_DDP,
)
LIGHTNING = System(
    name="lightning",
    title="Lightning",
    documentation="https://lightning.ai/docs/pytorch/stable/starter/introduction.html",
    train=f"{_SCRIPTS}:lightning",
    requirements=["lightning.txt"],
    tuned=_TUNED_DDP,
)
DEEPSPEED = System(
    name="deepspeed",
    title="DeepSpeed",
    documentation="https://www.deepspeed.ai/getting-started/",
    train=f"{_SCRIPTS}:deepspeed",
    requirements=["build.txt", "deepspeed.txt"],
    tuned={"zero_optimization": {"stage": 0}},
    takes_channels_last=False,  # DeepSpeed fails when it broadcasts channels-last parameters
)
HOROVOD = System(
    name="horovod",
    title="Horovod",
    documentation="https://horovod.readthedocs.io/en/stable/pytorch.html",
    train=f"{_SCRIPTS}:horovod",
    commands=_horovodrun,
    one_machine="its launcher starts ranks on other hosts by ssh, which emulated hosts lack",
    is_killed=False,  # see benchmarks/faults.py
    requirements=["build.txt", "horovod.txt"],
    takes_channels_last=False,  # Horovod refuses tensors that are not contiguous
    build_environment=_GCC,
)
RAY_TRAIN = System(
    name="ray-train",
    title="Ray Train",
    documentation="https://docs.ray.io/en/latest/train/getting-started-pytorch.html",
    train=f"{_SCRIPTS}:ray_train",
    commands=_driver_of_ray,
    one_machine="its driver starts a cluster of Ray on one machine alone",
    requirements=["ray-train.txt"],
    tuned=_TUNED_DDP,
)
TORCHFT = System(
    name="torchft",
    title="torchft",
    documentation="https://github.com/meta-pytorch/torchft",
    train=f"{_SCRIPTS}:torchft",
    commands=_groups_of_torchft,
    one_machine="its ranks find each other by the host's name, which emulated hosts share",
    is_killed=False,  # see benchmarks/faults.py
    requirements=["torchft.txt"],
)
FLOWER = System(
    name="flower",
    title="Flower",
    documentation="https://flower.ai/docs/framework/tutorial-quickstart-pytorch.html",
    train=f"{_SCRIPTS}:flower",
    commands=_simulation_of_flower,
    steps=steps_of_one,
    refusal=_refusal_of_flower,
    one_machine="its simulation runs on one machine",
    requirements=["flower.txt"],
)
TF_MIRRORED = System(
    name="tf-mirrored",
    title="TF Mirrored",
    documentation=f"{_TF_DOCUMENTATION}#mirroredstrategy",
    commands=_mirrored,
    **_TF,
    one_machine="MirroredStrategy is for one host",
)
TF_MULTIWORKER = System(
    name="tf-multiworker",
    title="TF MultiWorker",
    documentation=f"{_TF_DOCUMENTATION}#multiworkermirroredstrategy",
    commands=_workers,
    **_TF,
)
TF_SERVER = System(
    name="tf-server",
    title="TF ParameterServer",
    documentation=f"{_TF_DOCUMENTATION}#parameterserverstrategy",
    commands=_workers_and_server,
    **_TF,
)
