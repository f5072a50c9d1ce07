"""The protocol of a tracker, and the trackers that can be named."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.errors import JobError
from paceline.extensions import ExtensionPoint
from paceline.job.spec import load_object

Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class TrackedRun:
    """Facts of a run for a tracker. In a loop of a user's own all but the environment are empty.

    Attributes:
        name: the run's.
        project: the name of its job.
        config: JSON values: `job`, `plan` and `environment`, see `told_of`.
        folder: for files that the tracker keeps here.
        id: the tracker's own `id` of this run, where the run goes on after a restart; "" at its first start.
    """

    name: str = ""
    project: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    id: str = ""


def told_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment that trackers are told.

    Variables are not: others need not see them. Nor is the load, which changes.
    """
    return {key: value for key, value in environment.items() if key not in ("variables", "load_average")}


class Tracker(Protocol):
    """A tracker of one run.

    Its calls come from one thread or process of its own, never from a training step.

    Attributes:
        id: identity of its run there, by which it goes on after a restart; "" if there is none.
    """

    id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step. Names have a group: `train/loss`, `val/accuracy`, `speed/samples_per_s`."""

    def close(self, status: Status) -> None:
        """Take the end of the run; everything is to be stored when this returns."""


@dataclass(frozen=True)
class TrackerInfo:
    """Description of a tracker, readable without what it logs to.

    Attributes:
        tracker: import path of a class or function that takes a `TrackedRun` and the tracker's settings, and returns a
            `Tracker`. It is called for the first rank only.
        package: the module that it imports, for the message where that is not installed; "" for none.
    """

    tracker: str
    package: str = ""


_MODULES = "paceline.run.trackers"
TRACKERS = ExtensionPoint(
    "tracker",
    "paceline.trackers",
    TrackerInfo,
    {
        "tensorboard": TrackerInfo(f"{_MODULES}.to_tensorboard:ToTensorBoard", "tensorboard"),
        "wandb": TrackerInfo(f"{_MODULES}.to_wandb:ToWandb", "wandb"),
        "mlflow": TrackerInfo(f"{_MODULES}.to_mlflow:ToMLflow", "mlflow"),
        "opentelemetry": TrackerInfo(f"{_MODULES}.to_opentelemetry:ToOpenTelemetry", "opentelemetry.sdk"),
    },
    JobError,
)


def check(name: str) -> None:
    """Check that a tracker can be made, without importing what it logs to.

    Raises:
        JobError: no such tracker, or its package is not installed.
    """
    info = TRACKERS[name]
    if info.package and not _is_installed(info.package):
        raise JobError(f'the tracker "{name}" needs a package that is not installed: pip install {_pip_name(info)}')


def make(name: str, run: TrackedRun, settings: Mapping[str, Any]) -> Tracker:
    """The tracker of a name.

    Raises:
        JobError: as `check`, or it does not take the settings.
    """
    check(name)
    made: Callable[..., Tracker] = load_object(TRACKERS[name].tracker)
    try:
        return made(run, **settings)
    except TypeError as error:
        raise JobError(f'tracker "{name}" cannot be made: {error}') from error


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent
        return False


def _pip_name(info: TrackerInfo) -> str:
    if info.package.startswith("opentelemetry"):
        return "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
    return info.package.replace("_", "-")
