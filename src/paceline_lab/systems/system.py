"""Description of a training system: how it is installed, started, and measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import EmulatedHost
from paceline.errors import RunError
from paceline.extensions import ExtensionPoint
from paceline.files import write_whole
from paceline.job.job import Job

JOB, TASK = "job.yaml", "task.json"


@dataclass(frozen=True)
class Command:
    """Command that starts a process of a run, optionally in an emulated host.

    Attributes:
        serves: True if the process is a server, which runs until it is stopped at the end of the run.
    """

    words: Sequence[str]
    host: EmulatedHost | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    serves: bool = False


@dataclass(frozen=True)
class Start:
    """Everything that a system needs to start one run.

    Attributes:
        python: Python interpreter of the system's own environment.
        folder: folder from which all processes of the run read the task, and to which they write their results.
        hosts: emulated hosts in order of their ranks; empty if all processes run directly on this machine.
        port: first of several consecutive free ports.
        scratch: temporary folder with a short path, for sockets; it is removed after the run.
    """

    system: System
    python: Path
    folder: Path
    task: Task
    cluster: Cluster
    hosts: tuple[EmulatedHost, ...]
    port: int
    scratch: Path

    @property
    def places(self) -> Sequence[EmulatedHost | None]:
        """The emulated hosts, or a single None that represents this machine."""
        return self.hosts or (None,)

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host."""
        return self.task.ranks // len(self.places)

    @property
    def address(self) -> str:
        """IP address of the first host."""
        return self.hosts[0].address if self.hosts else "127.0.0.1"

    @property
    def program(self) -> list[str]:
        """Command line that runs the system's training script, starting with the Python interpreter."""
        return [str(self.python), "-m", "paceline_lab.systems.run", str(self.system.train), str(self.folder)]


def torchrun(start: Start) -> list[Command]:
    """Return commands that start torchrun on each host, with the rendezvous on the first host."""
    python, *program = start.program
    return [
        Command(
            [
                *(python, "-m", "torch.distributed.run"),
                *(f"--nnodes={len(start.places)}", f"--node-rank={number}"),
                f"--nproc-per-node={start.ranks_per_host}",
                *(f"--master-addr={start.address}", f"--master-port={start.port}"),
                *program,
            ],
            host,
        )
        for number, host in enumerate(start.places)
    ]


def steps_of_all(start: Start) -> Steps:
    """Read the steps that each rank wrote to the run's folder, and combine them."""
    return Steps.of_ranks(start.folder, start.task.ranks)


def steps_of_one(start: Start) -> Steps:
    """Read the steps of the whole batch, which one process wrote to the run's folder."""
    return Steps.of_ranks(start.folder, 1)


@dataclass(frozen=True, kw_only=True)
class System:
    """A training system that is compared with paceline.

    Attributes:
        name: name of the system in `--systems`.
        title: name of the system in tables.
        documentation: URL or path of the documentation page that the script and the commands follow.
        train: import path of the function that trains one rank; None if the system has no such function.
        commands: function that returns the commands of a run; by default, torchrun calls `train` in each rank.
        steps: function that reads the losses and times of a finished run.
        refusal: function that returns the reason why the system cannot train a job, or None if it can.
        requirements: names of the files that pin the system's packages, in the order of installation.
        build_environment: environment variables that are set while pip installs the system's packages.
        apart: True if the system's environment contains neither paceline nor torch.
        tuned: the system's own settings in its tuned variant, in addition to paceline's memory and data settings.
        takes_channels_last: True if the system can train weights in the channels-last memory format.
        is_killed: True if benchmarks may kill one of the system's ranks; False if the system's script cannot recover.
        one_machine: reason why the system cannot run on emulated hosts; None if it can.
    """

    name: str
    title: str
    documentation: str
    train: str | None = None
    commands: Callable[[Start], Sequence[Command]] = torchrun
    steps: Callable[[Start], Steps] = steps_of_all
    refusal: Callable[[Job], str | None] = lambda job: None
    requirements: Sequence[str] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    tuned: Mapping[str, object] = field(default_factory=dict)
    takes_channels_last: bool = True
    is_killed: bool = True
    one_machine: str | None = None

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """Return why the system cannot train this job on this cluster; None if it can."""
        return (self.one_machine if cluster.emulate else None) or self.refusal(job)


@dataclass(frozen=True)
class Task:
    """Settings of a run that all its processes read from a file.

    Attributes:
        ranks: number of processes that train.
        hosts: number of hosts on which these processes run.
        steps: number of training steps, including warm-up steps.
        threads: number of intra-op threads of torch in each rank.
        settings: additional keyword settings that the system's script passes to the system.
        tuned: True if the script loads data as paceline does and uses a fused optimizer. If the data set is in memory,
            each batch is copied in one call.
        channels_last: True if images and convolution weights have the channels-last memory format.
        num_workers: number of data loader processes in each rank.
        parts: number of parts into which a batch is split; batch normalization is computed separately in each part.
        disturbed: True if rounding errors are added to the initial weights.
        global_batch: global batch size of this run; None for the comparison's batch size.
    """

    ranks: int
    hosts: int
    steps: int
    threads: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    tuned: bool = False
    channels_last: bool = False
    num_workers: int = 0
    parts: int = 1
    disturbed: bool = False
    global_batch: int | None = None

    def write(self, folder: Path) -> None:
        """Write the task to a file in the folder of a run."""
        write_whole(folder / TASK, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Read the task from the folder of a run."""
        return cls(**json.loads((folder / TASK).read_text()))


@dataclass(frozen=True)
class Steps:
    """Losses and times of the steps of one rank, or of all ranks combined.

    Attributes:
        losses: loss of each step, averaged over the samples.
        ended_s: end time of each step, in Unix seconds.
        wire_bytes: bytes sent or received on the busiest link; None if the system does not count them.
    """

    losses: list[float]
    ended_s: list[float]
    wire_bytes: float | None = None

    def write(self, folder: Path, rank: int) -> None:
        """Write the steps of one rank to the folder of a run."""
        write_whole(folder / f"rank-{rank}.json", json.dumps(asdict(self)))

    @classmethod
    def of_ranks(cls, folder: Path, ranks: int) -> Steps:
        """Combine the steps of all ranks into mean losses and latest end times.

        Raises:
            FileNotFoundError: a rank did not write its steps.
        """
        each = [cls(**json.loads((folder / f"rank-{rank}.json").read_text())) for rank in range(ranks)]
        losses = [sum(of_ranks) / len(each) for of_ranks in zip(*(steps.losses for steps in each), strict=True)]
        return cls(losses, [max(of_ranks) for of_ranks in zip(*(steps.ended_s for steps in each), strict=True)])


@dataclass(frozen=True)
class SystemInfo:
    """Import path of a `System`, which is loaded on first use."""

    path: str

    def load(self) -> System:
        """Import the `System` from its path."""
        from paceline.job.spec import load_object

        system: System = load_object(self.path)
        return system


_TABLE = "paceline_lab.systems.table"
_NAMES = (
    *("paceline", "plain", "ddp", "fsdp", "horovod", "tf-mirrored", "tf-multiworker", "tf-server", "deepspeed"),
    *("accelerate", "lightning", "ray-train", "torchft", "flower"),
)
SYSTEMS = ExtensionPoint(
    "system",
    "paceline.systems",
    SystemInfo,
    {name: SystemInfo(f"{_TABLE}:{name.replace('-', '_').upper()}") for name in _NAMES},
    RunError,
)
