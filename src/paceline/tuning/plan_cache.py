"""Cache of `--plan auto`: one file for each work, hardware and torch."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planner.check.check_plan import check_plan
from paceline.planner.history import cache_folder, digests, hardware_of, made_cache_folder
from paceline.planner.knobs import longest_run_s
from paceline.plans.plan import Plan
from paceline.tuning.result import TuningResult

_WORK = (
    "model",
    "data",
    "loss",
    "optimizer",
    "global_batch",
    "drop_last",
    "clip_norm",
    "batch_norm",
    "precision",
    "partition",
)


def file_of(job: Job, cluster: Cluster, default: Plan) -> Path:
    """File of a job's cached result, named by the work, the hardware and the versions."""
    values = job.model_dump(mode="json", include=set(_WORK))
    values["optimizer"].pop("lr")
    key = {"job": values, "files": list(digests(values)), "hardware": hardware_of(cluster), "plan": str(default)}
    key |= {package: version(package) for package in ("paceline", "torch")}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return cache_folder() / "knobs" / f"{job.name}-{name}.json"


def read(file: Path, job: Job, cluster: Cluster) -> TuningResult | None:
    """Cached result for this job, measured or not, if its plan can still run."""
    try:
        found = TuningResult.read(file)
        plan = Plan.parse(found.best)
    except (OSError, ValueError, TypeError, KeyError, PlanError):
        # never measured, or by another version
        return None
    return found if not check_plan(plan, job, cluster) else None


def enough(found: TuningResult, job: Job) -> bool:
    """True if a cached result holds for this run. A longer run may be worth more measuring than a shorter one."""
    run_s = longest_run_s(job, found.step_s, found.steps_per_epoch)
    return found.complete or found.run_s is None or (run_s is not None and run_s <= 2 * found.run_s)


def write(file: Path, found: TuningResult) -> str:
    """Write a result to the cache; returns a phrase that tells where."""
    # a home that cannot be written: the next start begins anew
    with suppress(OSError):
        made_cache_folder("knobs")
        found.write(file)
        return f"kept in {file} (delete it to measure again)"
    return f"not kept, as {file.parent} cannot be written"
