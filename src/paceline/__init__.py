"""paceline: train any PyTorch model on your machines, and know how fast it went.

The public API consists of the names in this module. Each name is imported when it is first used, so `import paceline`
is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.engine.engine import StepResult
    from paceline.errors import (
        BatchError,
        ChannelError,
        CheckpointError,
        ClusterError,
        DataError,
        DeadlineError,
        FederateError,
        JobError,
        LaunchError,
        LoaderProcessError,
        NonFiniteError,
        PacelineError,
        PlanError,
        PlanProblem,
        RemoteError,
        RunError,
        ServerLost,
        ServerRefused,
        StorageError,
        SyncError,
    )
    from paceline.job.job import Job
    from paceline.job.loss import Loss, Metric
    from paceline.planning.check.plan_errors import plan_errors
    from paceline.planning.cost.layout import Prediction
    from paceline.planning.plan import Plan
    from paceline.planning.prediction import estimate
    from paceline.planning.search.search import plan
    from paceline.run.own_loop.engine import Engine
    from paceline.run.own_loop.setup import setup
    from paceline.run.parity.check import check
    from paceline.run.record.run import Run
    from paceline.run.trackers import tracker
    from paceline.run.train import train
    from paceline.run.tuning.calibrate import calibrate_on

    __version__: str

__all__ = [
    "BatchError",
    "ChannelError",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "DataError",
    "DeadlineError",
    "Engine",
    "FederateError",
    "Job",
    "JobError",
    "LaunchError",
    "LoaderProcessError",
    "Loss",
    "Metric",
    "NonFiniteError",
    "PacelineError",
    "Plan",
    "PlanError",
    "PlanProblem",
    "Prediction",
    "RemoteError",
    "Run",
    "RunError",
    "ServerLost",
    "ServerRefused",
    "StepResult",
    "StorageError",
    "SyncError",
    "calibrate_on",
    "check",
    "estimate",
    "plan",
    "plan_errors",
    "setup",
    "tracker",
    "train",
]

_HOMES = {
    "Cluster": "paceline.cluster.cluster",
    "Engine": "paceline.run.own_loop.engine",
    "Job": "paceline.job.job",
    "Loss": "paceline.job.loss",
    "Metric": "paceline.job.loss",
    "Plan": "paceline.planning.plan",
    "Prediction": "paceline.planning.cost.layout",
    "Run": "paceline.run.record.run",
    "StepResult": "paceline.engine.engine",
    "calibrate_on": "paceline.run.tuning.calibrate",
    "check": "paceline.run.parity.check",
    "estimate": "paceline.planning.prediction",
    "plan": "paceline.planning.search.search",
    "plan_errors": "paceline.planning.check.plan_errors",
    "setup": "paceline.run.own_loop.setup",
    "tracker": "paceline.run.trackers",
    "train": "paceline.run.train",
}

# type checkers would accept every name if they saw `__getattr__`
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("paceline")
        if name not in __all__:
            raise AttributeError(f"module 'paceline' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES.get(name, "paceline.errors")), name)


def __dir__() -> list[str]:
    return __all__
