"""Predictions of the plans for a job, made by a process with torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.elastic.run_on_ranks import run_on_plan
from paceline.job.job import Job
from paceline.planning.calibrate import Calibration
from paceline.planning.check.check_plan import check_plan
from paceline.planning.plan import Plan
from paceline.planning.shortlist import ONE_CORE, Forecast, recorrected

# number of plans with distinct degrees, the best of each
_LOOKED_AT = 12


@dataclass(frozen=True)
class _Request:
    """A job to predict; the calibration is None where the catalogue is to serve."""

    job: Job
    cluster: Cluster
    default: Plan
    calibration: Calibration | None


def forecast(job: Job, cluster: Cluster, default: Plan, calibration: Calibration | None) -> list[Forecast]:
    """The best plans by prediction, with the default and one rank alone.

    On CPUs there is one rank on one core as well. These are included if they can run.

    Raises:
        LaunchError: the model or the machines are beyond the cost model; with the reason.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.
    """
    here = cluster if cluster.emulate is None else discover()
    request = _Request(job, cluster, default, calibration)
    return run_on_plan(_forecasts, request, job=job, cluster=here, plan=Plan())[0]


def _forecasts(request: _Request) -> list[Forecast]:
    """Predictions of the plans that can divide the model, in the process with torch."""
    from paceline.run.dry_run.preflight import LOOK_S, refused_of
    from paceline.run.tuning.candidate import ignore_views

    ignore_views()
    found = predicted(request.job, request.cluster, request.default, request.calibration)
    # checked here, where torch and the model's code are loaded already
    refused = refused_of(request.job, [Plan.parse(row.plan) for row in found], LOOK_S)
    return [row for row in found if Plan.parse(row.plan) not in refused]


def predicted(job: Job, cluster: Cluster, default: Plan, calibration: Calibration | None) -> list[Forecast]:
    """Predictions in this process. Raises as `search` does."""
    from paceline.planning.model.model_info import model_info
    from paceline.planning.predict import modelled
    from paceline.planning.search.search import search

    found = search(job, cluster, top=_LOOKED_AT, calibration=calibration)
    predictions = {candidate.plan: candidate.prediction for candidate in found.best}
    for plan in (default, Plan(), *([] if cluster.has_accelerators else [ONE_CORE])):
        if plan not in predictions and not check_plan(plan, job, cluster):
            predictions[plan] = modelled(job, cluster, plan, calibration)
    # microbatches would normalise over fewer samples
    if model_info(job.model).batch_norms:
        predictions = {plan: prediction for plan, prediction in predictions.items() if plan.microbatches == 1}
    calibrated = calibration is not None
    rows = [Forecast(str(plan), p.step_time_s, p.step_time_s, calibrated, p.fits) for plan, p in predictions.items()]
    return recorrected(rows, job, cluster)
