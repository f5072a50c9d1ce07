"""Result of a trial, as ranks report it, and its cache.

The cache has a file for each work, hardware and torch.

Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.files import cache_folder
from paceline.job.job import Job
from paceline.planning.check.plan_errors import plan_errors
from paceline.planning.history import WORK, hardware_of, keep, short_hash, work_facts
from paceline.planning.plan import Plan
from paceline.planning.shortlist import SHARE_OF_RUN, Forecast, Trial, longest_run_s

BEGINNING = "the plan to begin with"


@dataclass
class TuningResult:
    """Result of a trial so far, kept in a file from which another trial continues.

    Attributes:
        default: the plan at the start; `step_s` is the median of its steps, `run_s` the longest run with them.
        best: the fastest plan so far.
        tried: rows of the tried plans and settings; the first is the default plan.
        under_way: the setting that is being tried.
        gain: step time of the best plan divided by that of the default, from the measured ratios of kept changes.
        complete: True if every plan and setting that can help has been tried long enough.
        forecasts: the plans with a predicted step time, the default's first if it is among them; the others are to be
            measured.
        share: largest fraction of the run that measuring may take.
        settings: True if settings are tried as well.
        before_s: longest possible duration of the job's earlier runs, in which nothing was measured.
    """

    default: str
    best: str
    tried: list[Trial] = field(default_factory=list)
    under_way: str | None = None
    step_s: float = 0.0
    steps_per_epoch: int = 0
    run_s: float | None = None
    budget_s: float = 0.0
    spent_s: float = 0.0
    gain: float = 1.0
    complete: bool = True
    forecasts: list[Forecast] = field(default_factory=list)
    share: float = SHARE_OF_RUN
    settings: bool = True
    before_s: float = 0.0

    @property
    def measured(self) -> bool:
        """True if there was a trial; otherwise the plan was chosen without one."""
        return bool(self.tried)

    def forecast_of(self, plan: str) -> Forecast | None:
        """Return the prediction of a plan, or None."""
        return next((forecast for forecast in self.forecasts if forecast.plan == plan), None)


def file_of(job: Job, cluster: Cluster, default: Plan) -> Path:
    """Return the file of a job's cached result.

    Its name has the work, the hardware and the versions.
    """
    key = work_facts(job, WORK) | {"hardware": hardware_of(cluster), "plan": str(default)}
    key |= {package: version(package) for package in ("paceline", "torch")}
    return cache_folder() / "tuning" / f"{job.name}-{short_hash(key)}.json"


def read(file: Path, job: Job, cluster: Cluster) -> TuningResult | None:
    """Read the cached result for this job if its plan can still run."""
    try:
        found = TypeAdapter(TuningResult).validate_python(json.loads(file.read_text()))
        plan = Plan.parse(found.best)
    except (OSError, ValueError, TypeError, KeyError, PlanError):
        # never measured, or by another version
        return None
    return found if not plan_errors(job, plan, cluster=cluster) else None


def enough(found: TuningResult, job: Job) -> bool:
    """Return True if a cached result is sufficient for this run.

    A longer run may justify more measuring than a shorter one.
    """
    run_s = longest_run_s(job, found.step_s, found.steps_per_epoch)
    return found.complete or found.run_s is None or (run_s is not None and run_s <= 2 * found.run_s)


def write(file: Path, found: TuningResult, busy: float = 0.0) -> str:
    """Write a result to the cache; see `cache.keep`."""
    text = json.dumps(TypeAdapter(TuningResult).dump_python(found, mode="json"), indent=1)
    return keep(file, text, busy=busy, hint=" (delete it to measure again)")
