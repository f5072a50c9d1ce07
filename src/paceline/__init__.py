"""paceline: train any PyTorch model on the machines you have, and know how fast it went and why.

The public API is what this module names, nothing else. Each name is imported when it is first used, so `import paceline` is instant.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.bench.protocol import bench
    from paceline.cluster.cluster import Cluster
    from paceline.errors import PacelineError
    from paceline.job.job import Job
    from paceline.launch.check import check
    from paceline.launch.train import train
    from paceline.plan.choose import plan
    from paceline.plan.plan import Plan
    from paceline.plan.predict import predict
    from paceline.train.run import Run
    from paceline.train.setup import setup

__all__ = ["Cluster", "Job", "PacelineError", "Plan", "Run", "bench", "check", "plan", "predict", "setup", "train"]

_HOMES = {
    "Cluster": "paceline.cluster.cluster",
    "Job": "paceline.job.job",
    "PacelineError": "paceline.errors",
    "Plan": "paceline.plan.plan",
    "Run": "paceline.train.run",
    "bench": "paceline.bench.protocol",
    "check": "paceline.launch.check",
    "plan": "paceline.plan.choose",
    "predict": "paceline.plan.predict",
    "setup": "paceline.train.setup",
    "train": "paceline.launch.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


class _Folder(ModuleType):
    """A folder of this package that has the name of a verb, such as `train`: to call it is to call the verb."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        verb = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(_HOMES[verb]), verb)(*args, **keywords)


class _Package(ModuleType):
    """This package: once `paceline.train.loop`, say, is imported, the import system binds the folder `train` here, over the verb."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value.__class__ = _Folder
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
