"""Systems whose script torchrun starts, once on each host."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.benchmark.systems.system import Command, Start
from paceline.benchmark.systems.task import Steps
from paceline.cluster.cluster import Cluster
from paceline.job.job import Job
from paceline.job.read.imports import load_object

RUN = "paceline.benchmark.systems.run"


@dataclass(frozen=True)
class TorchSystem:
    """A `System` whose `train` function is a script for one rank.

    `train` is its import path; the other attributes are those of `System`.
    """

    name: str
    title: str
    documentation: str
    train: str
    requirements: Sequence[str] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    tuned: Mapping[str, object] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """The file of `train`."""
        return Path(str(sys.modules[load_object(self.train).__module__].__file__))

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """None: every job whose model is a module can be trained."""
        return None

    def commands(self, start: Start) -> Sequence[Command]:
        """torchrun on each host; over several, the first one's serves the rendezvous."""
        return [
            Command(
                [
                    *(str(start.python), "-m", "torch.distributed.run"),
                    *(f"--nnodes={len(start.places)}", f"--node-rank={number}"),
                    f"--nproc-per-node={start.ranks_per_host}",
                    *(f"--master-addr={start.address}", f"--master-port={start.port}"),
                    *("-m", RUN, self.train, str(start.folder)),
                ],
                host,
            )
            for number, host in enumerate(start.places)
        ]

    def steps(self, start: Start) -> Steps:
        """What the ranks left in the folder."""
        return Steps.of_ranks(start.folder, start.task.ranks)
