"""Result of a trial, as the ranks report it, and its cache.

The cache has one file per combination of work, hardware and torch version. This module does not import torch.
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
from paceline.planning.shortlist import SHARE_OF_RUN, Comparison, Forecast, Trial, longest_run_s

BEGINNING = "the plan to begin with"


@dataclass
class TuningResult:
    """Result of a trial so far, cached so that another trial can continue.

    Attributes:
        default: default plan, with which the trial begins.
        best: fastest plan so far.
        tried: rows of the tried plans and settings; the first row is the default plan.
        compared: maps the text of each other plan to its comparison with the default plan.
        under_way: plan or setting that is being tried; None between trials.
        step_s: median step time of the default plan.
        run_s: longest possible duration of the run at this step time; None if unknown.
        budget_s: seconds that measuring may take.
        spent_s: seconds that measuring has taken.
        gain: step time of the best plan divided by the default plan's, from the measured ratios of kept changes.
        searched: whether the search over combinations has ended. Then `best` is its choice, possibly with a change.
        complete: whether every promising plan and setting has been tried long enough.
        forecasts: predictions of plans to measure; the default plan is first if it has a prediction.
        share: maximum fraction of the run's duration that measuring may take.
        settings: whether to try settings as well.
        before_s: longest possible duration of the job's earlier runs that started without a measurement.
    """

    default: str
    best: str
    tried: list[Trial] = field(default_factory=list)
    compared: dict[str, Comparison] = field(default_factory=dict)
    under_way: str | None = None
    step_s: float = 0.0
    steps_per_epoch: int = 0
    run_s: float | None = None
    budget_s: float = 0.0
    spent_s: float = 0.0
    gain: float = 1.0
    searched: bool = False
    complete: bool = True
    forecasts: list[Forecast] = field(default_factory=list)
    share: float = SHARE_OF_RUN
    settings: bool = True
    before_s: float = 0.0

    @property
    def measured(self) -> bool:
        """True if a trial has measured plans; False if there was no trial."""
        return bool(self.tried)

    def forecast_of(self, plan: str) -> Forecast | None:
        """Return the prediction of a plan, or None."""
        return next((forecast for forecast in self.forecasts if forecast.plan == plan), None)


def file_of(job: Job, cluster: Cluster, default: Plan) -> Path:
    """Return the file of a job's cached result.

    The file name has a hash of the work, the hardware and the versions.
    """
    key = work_facts(job, WORK) | {"hardware": hardware_of(cluster), "plan": str(default)}
    key |= {package: version(package) for package in ("paceline", "torch")}
    return cache_folder() / "tuning" / f"{job.name}-{short_hash(key)}.json"


def read(file: Path, job: Job, cluster: Cluster) -> TuningResult | None:
    """Read the cached result of a job; None if its plan can no longer run."""
    try:
        found = TypeAdapter(TuningResult).validate_python(json.loads(file.read_text()))
        plan = Plan.parse(found.best)
    except (OSError, ValueError, TypeError, KeyError, PlanError):
        # there is no result, or another version wrote it
        return None
    return found if not plan_errors(job, plan, cluster=cluster) else None


def enough(found: TuningResult, job: Job) -> bool:
    """Return True if a cached result is sufficient for this run.

    A longer run may justify more measuring than a shorter one.
    """
    run_s = longest_run_s(job, found.step_s, found.steps_per_epoch)
    return found.complete or found.run_s is None or (run_s is not None and run_s <= 2 * found.run_s)


def write(file: Path, found: TuningResult, busy: float = 0.0) -> str:
    """Write a result to the cache; return the message of `keep`."""
    text = json.dumps(TypeAdapter(TuningResult).dump_python(found, mode="json"), indent=1)
    return keep(file, text, busy=busy, hint=" (delete it to measure again)")
