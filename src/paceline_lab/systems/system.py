"""Description of a system: its installation, commands, and steps."""

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
    """A command of a run, in an emulated host if there is one.

    `serves`: it does not end by itself, and is stopped after the others have ended.
    """

    words: Sequence[str]
    host: EmulatedHost | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    serves: bool = False


@dataclass(frozen=True)
class Start:
    """One run that is about to be started.

    Attributes:
        python: interpreter of the system's own environment.
        folder: folder of the task, which its processes read and write.
        hosts: emulated hosts in order; empty if all processes run directly on this machine.
        port: a free port.
        scratch: folder with a short path, for sockets; removed after the run.
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
        """The hosts, or a single entry for this machine."""
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
        """Return the command line that calls the system's `train`, starting with the interpreter."""
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
        documentation: page with the instructions that are followed to start the system.
        train: import path of its script for one rank, in which changed lines are counted; None if it has none.
        commands: returns the commands of a run, which end after all steps.
        steps: reads the steps of a run that has ended.
        refusal: returns the reason why the system cannot train a job; None if it can.
        requirements: files of its pinned packages, installed in this order beside paceline's own; may be empty.
        build_environment: environment variables for their installation.
        apart: True if its environment contains neither paceline nor torch.
        tuned: the system's own settings for its tuned variant, which also has paceline's settings for memory and data.
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
        """Return the reason why the system cannot train this job here; None if it can."""
        return (self.one_machine if cluster.emulate else None) or self.refusal(job)


@dataclass(frozen=True)
class Task:
    """Task of a run, which all its processes read.

    Attributes:
        ranks: number of processes that train; `hosts`: number of hosts.
        steps: number of steps, including the warm-up.
        threads: threads of torch's operations in each rank.
        settings: the system's own settings, beside those in its documentation.
        tuned: the job is read and laid out as by paceline's ranks. Batches are copied at once from a data set in
            memory, the optimizer is fused, the number of loader processes is the same, and images and convolutions are
            channels-last if `channels_last` is set.
        parts: number of parts in which a batch is computed, as by replicas that each normalize their own part.
        disturbed: the first weights are perturbed by a rounding error.
        global_batch: batch size of this run, if it differs from the comparison's.
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
        """Write the task to a folder."""
        write_whole(folder / TASK, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Read the task of a folder."""
        return cls(**json.loads((folder / TASK).read_text()))


@dataclass(frozen=True)
class Steps:
    """Steps of one rank, or of all ranks together.

    Attributes:
        losses: loss of each step, averaged over a rank's samples.
        ended_s: end time of each step, in Unix seconds.
        wire_bytes: bytes on the busiest link, if the system itself counts them.
    """

    losses: list[float]
    ended_s: list[float]
    wire_bytes: float | None = None

    def write(self, folder: Path, rank: int) -> None:
        """Write the steps of a rank to the task's folder."""
        write_whole(folder / f"rank-{rank}.json", json.dumps(asdict(self)))

    @classmethod
    def of_ranks(cls, folder: Path, ranks: int) -> Steps:
        """Combine the steps of all ranks: mean losses, latest end times.

        Raises:
            FileNotFoundError: a rank wrote no steps.
        """
        each = [cls(**json.loads((folder / f"rank-{rank}.json").read_text())) for rank in range(ranks)]
        losses = [sum(of_ranks) / len(each) for of_ranks in zip(*(steps.losses for steps in each), strict=True)]
        return cls(losses, [max(of_ranks) for of_ranks in zip(*(steps.ended_s for steps in each), strict=True)])


@dataclass(frozen=True)
class SystemInfo:
    """Import path of a system, which is loaded on first use."""

    path: str

    def load(self) -> System:
        """Load the system."""
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
