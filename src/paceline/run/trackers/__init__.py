"""Trackers: where the numbers of a training are logged beside its record.

Read `tracker.py` first. `own_loop.py` is for loops of users' own, `processes.py` and `follow.py` for `paceline train`.
"""

from paceline.run.trackers.own_loop import mlflow, tensorboard, tracker, wandb
from paceline.run.trackers.tracker import TRACKERS, Status, TrackedRun, Tracker, TrackerInfo

__all__ = [
    "TRACKERS",
    "Status",
    "TrackedRun",
    "Tracker",
    "TrackerInfo",
    "mlflow",
    "tensorboard",
    "tracker",
    "wandb",
]
