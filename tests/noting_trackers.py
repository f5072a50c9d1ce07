"""A package with trackers for tests: one that writes down all that it is told, and ones that fail, hang or die."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SOURCE = """
import json, os, time
from paceline.run.trackers import TrackerInfo

INFO = TrackerInfo("noting_tracker:Noting")
DIES = TrackerInfo("noting_tracker:Dies")
HANGS = TrackerInfo("noting_tracker:Hangs")


class Noting:
    def __init__(self, run, file, fails_at=None):
        self.id = run.id or "the-run"
        self.file, self.fails_at = file, fails_at
        self.note(begin=run.name, project=run.project, id=run.id, config=run.config, folder=str(run.folder))

    def note(self, **facts):
        with open(self.file, "a") as stream:
            stream.write(json.dumps({**facts, "pid": os.getpid()}) + "\\\\n")

    def log(self, step, values):
        if self.fails_at is not None and step >= self.fails_at:
            raise ConnectionError("no answer")
        self.note(step=step, values=dict(values))

    def close(self, status):
        self.note(end=status)


class Dies(Noting):
    def log(self, step, values):
        os.abort()


class Hangs(Noting):
    def log(self, step, values):
        self.note(hangs=True)
        time.sleep(600)
""".replace("\\\\", "\\")


def installed(folder: Path) -> Path:
    """A folder for PYTHONPATH that holds the package as pip would install it."""
    about = folder / "noting_tracker-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "noting_tracker.py").write_text(SOURCE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: noting-tracker\nVersion: 1.0\n")
    names = ("noting = noting_tracker:INFO", "dies = noting_tracker:DIES", "hangs = noting_tracker:HANGS")
    (about / "entry_points.txt").write_text("[paceline.trackers]\n" + "\n".join(names) + "\n")
    return folder


def noted(file: Path) -> list[dict[str, Any]]:
    """What the tracker has written down, in order."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
