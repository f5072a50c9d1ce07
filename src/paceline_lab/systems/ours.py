"""paceline itself: `paceline train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.files import write_whole
from paceline.run.record.run import Run
from paceline_lab.systems.system import Command, Start, System
from paceline_lab.systems.task import JOB, Steps


class Ours(System):
    """The command that its documentation shows; the job file takes the place of a script."""

    def commands(self, start: Start) -> Sequence[Command]:
        """One command, which starts the ranks itself, on emulated hosts too."""
        where = start.folder / "cluster.yaml"
        write_whole(where, start.cluster.to_yaml())
        train = [sys.executable, "-m", "paceline", "train", str(start.folder / JOB), "--cluster", str(where)]
        return [Command([*train, "--plan", str(start.task.settings["plan"]), "--run", str(start.folder / "run")])]

    def steps(self, start: Start) -> Steps:
        """Steps that the run recorded, with losses of the global batch."""
        run = Run(start.folder / "run")
        lines = run.steps(0)
        links = [event["links"].values() for event in run.events() if event["event"] == "links"]
        wire = [max(link["sent_bytes"], link["received_bytes"]) for each in links for link in each]
        return Steps(run.losses, [line["time"] for line in lines], max(wire, default=None))


SYSTEM = Ours(name="paceline", title="paceline", documentation="docs/tutorial.md")
