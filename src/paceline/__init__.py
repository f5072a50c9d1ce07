"""paceline: train any PyTorch model on your machines, and know how fast it went.

The public API is what this module names, nothing else. Each name is imported when it is first used, so
`import paceline` is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.errors import PacelineError
    from paceline.job.job import Job
    from paceline.planning.check.check_plan import check_plan
    from paceline.planning.plan import Plan
    from paceline.planning.predict import predict
    from paceline.planning.search.search import plan
    from paceline.run.own_loop.setup import setup
    from paceline.run.parity.check import check
    from paceline.run.record.run import Run
    from paceline.run.train import train
    from paceline.run.tuning.calibrate import calibrate_on

    __version__: str

__all__ = [
    "Cluster",
    "Job",
    "PacelineError",
    "Plan",
    "Run",
    "calibrate_on",
    "check",
    "check_plan",
    "plan",
    "predict",
    "setup",
    "train",
]

_HOMES = {
    "Cluster": "paceline.cluster.cluster",
    "Job": "paceline.job.job",
    "PacelineError": "paceline.errors",
    "Plan": "paceline.planning.plan",
    "Run": "paceline.run.record.run",
    "calibrate_on": "paceline.run.tuning.calibrate",
    "check": "paceline.run.parity.check",
    "check_plan": "paceline.planning.check.check_plan",
    "plan": "paceline.planning.search.search",
    "predict": "paceline.planning.predict",
    "setup": "paceline.run.own_loop.setup",
    "train": "paceline.run.train",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("paceline")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
