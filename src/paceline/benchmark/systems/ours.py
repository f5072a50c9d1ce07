"""paceline itself: `paceline train`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.benchmark.systems.system import Command, Start
from paceline.benchmark.systems.task import JOB, Steps
from paceline.cluster.cluster import Cluster
from paceline.files import write_whole
from paceline.job.job import Job
from paceline.training.record.run import Run


class Ours:
    """The command that its documentation shows, with the plan that `auto` stands for."""

    name, title = "paceline", "paceline"
    documentation = "docs/tutorial.md"
    requirements: Sequence[str] = ()
    build_environment: Mapping[str, str] = {}
    apart = False
    tuned: Mapping[str, object] = {}
    script = None  # the job file takes its place

    def refuses(self, job: Job, cluster: Cluster) -> str | None:
        """None: the plan was checked when it was chosen."""
        return None

    def commands(self, start: Start) -> Sequence[Command]:
        """One command, which starts the ranks itself, on emulated hosts too."""
        where = start.folder / "cluster.yaml"
        write_whole(where, start.cluster.to_yaml())
        train = [sys.executable, "-m", "paceline", "train", str(start.folder / JOB), "--cluster", str(where)]
        return [Command([*train, "--plan", str(start.task.settings["plan"]), "--run", str(start.folder / "run")])]

    def steps(self, start: Start) -> Steps:
        """What the run recorded; losses are of the global batch."""
        lines = Run(start.folder / "run").steps(0)
        return Steps([line["loss"] for line in lines], [line["time"] for line in lines])


SYSTEM = Ours()
