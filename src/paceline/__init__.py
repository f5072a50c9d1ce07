"""paceline: train any PyTorch model on your machines, and know how fast it went.

The public API is what this module names, nothing else. Each name is imported when it is first used, so
`import paceline` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import remote
    from paceline.benchmark.protocol import bench
    from paceline.cluster.cluster import Cluster
    from paceline.errors import PacelineError
    from paceline.job.job import Job
    from paceline.parity.check import check
    from paceline.planner.check.check_plan import check_plan
    from paceline.planner.predict import predict
    from paceline.planner.search.search import plan
    from paceline.plans.plan import Plan
    from paceline.runner.train import train
    from paceline.training.own_loop.setup import setup
    from paceline.training.record.run import Run
    from paceline.tuning.measured_runs.calibrate_on import calibrate_on

    __version__: str

__all__ = [
    "Cluster",
    "Job",
    "PacelineError",
    "Plan",
    "Run",
    "bench",
    "calibrate_on",
    "check",
    "check_plan",
    "plan",
    "predict",
    "remote",
    "setup",
    "train",
]

_HOMES = {
    "Cluster": "paceline.cluster.cluster",
    "Job": "paceline.job.job",
    "PacelineError": "paceline.errors",
    "Plan": "paceline.plans.plan",
    "Run": "paceline.training.record.run",
    "bench": "paceline.benchmark.protocol",
    "calibrate_on": "paceline.tuning.measured_runs.calibrate_on",
    "check": "paceline.parity.check",
    "check_plan": "paceline.planner.check.check_plan",
    "plan": "paceline.planner.search.search",
    "predict": "paceline.planner.predict",
    "setup": "paceline.training.own_loop.setup",
    "train": "paceline.runner.train",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("paceline")
    if name == "remote":
        return importlib.import_module("paceline.remote")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
