"""One run of a system: its task, and the steps that its processes leave."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.files import write_whole

JOB, TASK = "job.yaml", "task.json"


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
