"""Cache of `--plan auto`: one file for each work, hardware and torch."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.job.job import Job
from paceline.planner.cache import cache_folder, keep, short_hash, work_facts
from paceline.planner.check.check_plan import check_plan
from paceline.planner.history import hardware_of
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
    key = work_facts(job, _WORK) | {"hardware": hardware_of(cluster), "plan": str(default)}
    key |= {package: version(package) for package in ("paceline", "torch")}
    return cache_folder() / "knobs" / f"{job.name}-{short_hash(key)}.json"


def read(file: Path, job: Job, cluster: Cluster) -> TuningResult | None:
    """Cached result for this job, measured or not, if its plan can still run."""
    try:
        found = TypeAdapter(TuningResult).validate_python(json.loads(file.read_text()))
        plan = Plan.parse(found.best)
    except (OSError, ValueError, TypeError, KeyError, PlanError):
        # never measured, or by another version
        return None
    return found if not check_plan(plan, job, cluster) else None


def enough(found: TuningResult, job: Job) -> bool:
    """True if a cached result holds for this run. A longer run may be worth more measuring than a shorter one."""
    run_s = longest_run_s(job, found.step_s, found.steps_per_epoch)
    return found.complete or found.run_s is None or (run_s is not None and run_s <= 2 * found.run_s)


def write(file: Path, found: TuningResult, busy: float = 0.0) -> str:
    """Write a result to the cache; see `cache.keep`."""
    text = json.dumps(TypeAdapter(TuningResult).dump_python(found, mode="json"), indent=1)
    return keep(file, text, busy=busy, hint=" (delete it to measure again)")
