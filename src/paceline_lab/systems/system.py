"""Description of a system: its installation, its commands, and its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import EmulatedHost
from paceline.errors import RunError
from paceline.extensions import ExtensionPoint
from paceline.job.job import Job
from paceline_lab.systems.task import Steps, Task


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


@dataclass(frozen=True, kw_only=True)
class System(ABC):
    """A system that trains a job.

    Attributes:
        name: as `--systems` takes it; `title` as tables show it.
        documentation: the page whose way of starting it is followed.
        requirements: files of its pinned packages, installed in this order beside paceline's own; none needs no more.
        build_environment: variables for their installation.
        apart: its environment has nothing of paceline's, nor torch.
        tuned: settings of its own that are tried as well, with paceline's settings for memory and data.
        takes_channels_last: it trains weights that are laid out so.
        is_killed: a rank is killed where that is asked for; False where outliving it needs another script than this.
    """

    name: str
    title: str
    documentation: str
    requirements: Sequence[str] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    tuned: Mapping[str, object] = field(default_factory=dict)
    takes_channels_last: bool = True
    is_killed: bool = True

    @property
    def script(self) -> Path | None:
        """File with its `train`, in which changed lines are counted; None without one."""
        return None

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """The reason why it cannot train this job here; None where it can."""
        return None

    @abstractmethod
    def commands(self, start: Start) -> Sequence[Command]:
        """The commands of a run, which end when all steps are taken."""

    @abstractmethod
    def steps(self, start: Start) -> Steps:
        """The steps of a run that has ended."""


def _built_in() -> dict[str, str]:
    return {
        "paceline": "ours",
        "plain": "plain",
        "ddp": "ddp",
        "fsdp": "fsdp",
        "horovod": "horovod",
        "tf-mirrored": "tf_mirrored",
        "tf-multiworker": "tf_multiworker",
        "tf-server": "tf_server",
        "deepspeed": "deepspeed",
        "accelerate": "accelerate",
        "lightning": "lightning",
        "ray-train": "ray_train",
        "torchft": "torchft",
        "flower": "flower",
    }


@dataclass(frozen=True)
class SystemInfo:
    """Import path of a system, which is loaded when it is named."""

    path: str

    def load(self) -> System:
        """The system."""
        from paceline.job.spec import load_object

        system: System = load_object(self.path)
        return system


SYSTEMS = ExtensionPoint(
    "system",
    "paceline.systems",
    SystemInfo,
    {name: SystemInfo(f"paceline_lab.systems.{module}:SYSTEM") for name, module in _built_in().items()},
    RunError,
)
