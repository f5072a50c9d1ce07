"""Systems whose script torchrun starts, once on each host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.job.spec import load_object
from paceline_lab.systems.system import Command, Start, System
from paceline_lab.systems.task import Steps

RUN = "paceline_lab.systems.run"


@dataclass(frozen=True, kw_only=True)
class TorchSystem(System):
    """A `System` whose function `train`, an import path, is a script for one rank."""

    train: str

    @property
    def script(self) -> Path:
        """The file of `train`."""
        return Path(str(sys.modules[load_object(self.train).__module__].__file__))

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
        """Steps that the ranks left in the folder."""
        return Steps.of_ranks(start.folder, start.task.ranks)
