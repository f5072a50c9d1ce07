"""Predictions of the plans for a job, made by a process with torch."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.files import scratch_folder
from paceline.job.job import Job
from paceline.launch.probe import launch_to_look
from paceline.planner.check.check_plan import check_plan
from paceline.planner.shortlist import Forecast, recorrected
from paceline.plans.plan import Plan

if TYPE_CHECKING:
    from paceline.planner.calibrate import Calibration

# number of plans with distinct degrees, the best of each
_LOOKED_AT = 12


def forecast(job: Job, cluster: Cluster, default: Plan, calibration: Calibration | None) -> list[Forecast]:
    """The best plans by prediction, with the default and one rank alone. These two are included if they can run.

    Raises:
        LaunchError: the model or the machines are beyond the cost model; with the reason.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.
    """
    with scratch_folder() as folder:
        Path(folder, "job.yaml").write_text(job.to_yaml())
        Path(folder, "cluster.yaml").write_text(cluster.to_yaml())
        Path(folder, "default.txt").write_text(str(default))
        if calibration is not None:
            Path(folder, "calibration.json").write_text(calibration.to_json())
        here = cluster if cluster.emulate is None else discover()
        launch_to_look(["paceline.tuning.forecast:run_rank", str(folder)], job, here, Plan())
        return [Forecast(**row) for row in json.loads(Path(folder, "forecasts.json").read_text())]


def run_rank(arguments: list[str]) -> None:
    """Predict for the folder `arguments[0]`, and write `forecasts.json` there."""
    from paceline.planner.calibrate import Calibration
    from paceline.training.dry_run.preflight import LOOK_S, refused_of

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be saved
    folder = Path(arguments[0])
    job, cluster = Job.load(folder / "job.yaml"), Cluster.load(folder / "cluster.yaml")
    file = folder / "calibration.json"
    calibration = Calibration.from_json(file.read_text()) if file.is_file() else None
    found = predicted(job, cluster, Plan.parse((folder / "default.txt").read_text()), calibration)
    # checked here, where torch and the model's code are loaded already
    refused = refused_of(job, [Plan.parse(row.plan) for row in found], LOOK_S)
    found = [row for row in found if Plan.parse(row.plan) not in refused]
    (folder / "forecasts.json").write_text(json.dumps([asdict(row) for row in found]))


def predicted(job: Job, cluster: Cluster, default: Plan, calibration: Calibration | None) -> list[Forecast]:
    """Predictions in this process. Raises as `search` does."""
    from paceline.planner.predict import modelled
    from paceline.planner.search.search import search
    from paceline.trace.model_info import model_info

    found = search(job, cluster, top=_LOOKED_AT, calibration=calibration)
    predictions = {candidate.plan: candidate.prediction for candidate in found.best}
    for plan in (default, Plan()):
        if plan not in predictions and not check_plan(plan, job, cluster):
            predictions[plan] = modelled(job, cluster, plan, calibration)
    # microbatches would normalise over fewer samples
    if model_info(job.model).batch_norms:
        predictions = {plan: prediction for plan, prediction in predictions.items() if plan.microbatches == 1}
    calibrated = calibration is not None
    rows = [Forecast(str(plan), p.step_time_s, p.step_time_s, calibrated, p.fits) for plan, p in predictions.items()]
    return recorrected(rows, job, cluster)
