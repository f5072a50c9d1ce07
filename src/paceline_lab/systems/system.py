"""Description of a system: its installation, its commands, and its steps."""

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
    """A command of a run, in an emulated host where there is one.

    `serves`: it does not end by itself, and is ended when the others have.
    """

    words: Sequence[str]
    host: EmulatedHost | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    serves: bool = False


@dataclass(frozen=True)
class Start:
    """One run that is to be started.

    Attributes:
        python: the interpreter of the system's own environment.
        folder: of the task, which its processes read and write.
        hosts: emulated ones, in their order; none where all run on this machine as it is.
        port: a free one.
        scratch: folder of a short path, for sockets; it is removed after the run.
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
        """The hosts, or the one place that is this machine."""
        return self.hosts or (None,)

    @property
    def ranks_per_host(self) -> int:
        """Ranks of each host."""
        return self.task.ranks // len(self.places)

    @property
    def address(self) -> str:
        """Address of the first host."""
        return self.hosts[0].address if self.hosts else "127.0.0.1"

    @property
    def program(self) -> list[str]:
        """Command line that calls the system's `train`, from the interpreter on."""
        return [str(self.python), "-m", "paceline_lab.systems.run", str(self.system.train), str(self.folder)]


def torchrun(start: Start) -> list[Command]:
    """Start torchrun on each host. The first host serves the rendezvous."""
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
    """Read the steps that all ranks wrote to the run's folder."""
    return Steps.of_ranks(start.folder, start.task.ranks)


def steps_of_one(start: Start) -> Steps:
    """Read the steps of the whole batch that one process wrote to the run's folder."""
    return Steps.of_ranks(start.folder, 1)


@dataclass(frozen=True, kw_only=True)
class System:
    """A system that trains a job. Without `commands`, torchrun starts its `train` for each rank.

    Attributes:
        name: name of the system in `--systems`.
        title: name of the system in tables.
        documentation: page whose instructions for starting the system are followed.
        train: import path of its script for one rank, in which changed lines are counted; None if it has none.
        commands: returns the commands of a run, which end when all steps are taken.
        steps: reads the steps of a run that has ended.
        refusal: returns the reason why the system cannot train a job; None if it can.
        requirements: files of its pinned packages, installed in this order beside paceline's own; may be empty.
        build_environment: environment variables for their installation.
        apart: True if its environment contains neither paceline nor torch.
        tuned: settings of its own that are also tried, with paceline's settings for memory and data.
        takes_channels_last: True if it can train channels-last weights.
        is_killed: True if benchmarks may kill one of its ranks; False if surviving that needs another script.
        one_machine: the reason why it cannot run on emulated hosts; None if it can.
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
        """The reason why the system cannot train this job here; None if it can."""
        return (self.one_machine if cluster.emulate else None) or self.refusal(job)


@dataclass(frozen=True)
class Task:
    """Task of a run, which every process of it reads.

    Attributes:
        ranks: processes that train; `hosts` on how many hosts.
        steps: that are taken, the warm-up included.
        threads: of torch's operations in each rank.
        settings: of the system's own, beside what its documentation shows.
        tuned: the job is read and laid out as paceline's ranks do it: batches copied at once out of a data set in
            memory, a fused optimizer, images and convolutions with channels last if `channels_last`, and so many loader
            processes.
        parts: a batch is computed in so many parts, as by replicas that normalise each its own part.
        disturbed: the first weights are a rounding apart.
        global_batch: of the job as this run trains it, where it is not the comparison's.
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
        """Lay the task out in a folder."""
        write_whole(folder / TASK, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Task:
        """The task of a folder."""
        return cls(**json.loads((folder / TASK).read_text()))


@dataclass(frozen=True)
class Steps:
    """Steps of one rank, or of all together.

    Attributes:
        losses: of each step, in the mean over a rank's samples.
        ended_s: when each had ended, in Unix seconds.
        wire_bytes: that the busiest link carried, where the system counts them itself.
    """

    losses: list[float]
    ended_s: list[float]
    wire_bytes: float | None = None

    def write(self, folder: Path, rank: int) -> None:
        """Leave the steps of a rank in the task's folder."""
        write_whole(folder / f"rank-{rank}.json", json.dumps(asdict(self)))

    @classmethod
    def of_ranks(cls, folder: Path, ranks: int) -> Steps:
        """Steps of all ranks: losses in their mean, ends of the latest.

        Raises:
            FileNotFoundError: a rank left none.
        """
        each = [cls(**json.loads((folder / f"rank-{rank}.json").read_text())) for rank in range(ranks)]
        losses = [sum(of_ranks) / len(each) for of_ranks in zip(*(steps.losses for steps in each), strict=True)]
        return cls(losses, [max(of_ranks) for of_ranks in zip(*(steps.ended_s for steps in each), strict=True)])


@dataclass(frozen=True)
class SystemInfo:
    """Import path of a system, which is loaded when it is named."""

    path: str

    def load(self) -> System:
        """The system."""
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
