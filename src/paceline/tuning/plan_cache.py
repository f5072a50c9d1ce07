"""What `--plan auto` found at earlier starts: a file of the user's cache for the same work on the same hardware and torch."""

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
from paceline.tuning.findings import Findings

_WORK = ("model", "data", "loss", "optimizer", "global_batch", "drop_last", "clip_norm", "batch_norm", "precision", "partition")


def file_of(job: Job, cluster: Cluster, default: Plan) -> Path:
    """Named by all that bears on a step's time: the work, the hardware, the versions."""
    values = job.model_dump(mode="json", include=set(_WORK))
    values["optimizer"].pop("lr")
    key = {"job": values, "files": list(digests(values)), "hardware": hardware_of(cluster), "plan": str(default)}
    key |= {package: version(package) for package in ("paceline", "torch")}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return cache_folder() / "knobs" / f"{job.name}-{name}.json"


def read(file: Path, job: Job, cluster: Cluster) -> Findings | None:
    """What was found for this job, measured or not, if its plan can still run."""
    try:
        found = Findings.read(file)
        plan = Plan.parse(found.best)
    except (OSError, ValueError, TypeError, KeyError, PlanError):
        return None  # never measured, or by another version
    return found if not check_plan(plan, job, cluster) else None


def enough(found: Findings, job: Job) -> bool:
    """Whether what was measured holds for this run: a longer one may be worth what a shorter one was not."""
    run_s = longest_run_s(job, found.step_s, found.steps_per_epoch)
    return found.complete or found.run_s is None or (run_s is not None and run_s <= 2 * found.run_s)


def write(file: Path, found: Findings) -> str:
    """Keep it for the next start; returns where, in words."""
    with suppress(OSError):  # a home that cannot be written: then the next start begins anew
        made_cache_folder("knobs")
        found.write(file)
        return f"kept in {file} (delete it to measure again)"
    return f"not kept, as {file.parent} cannot be written"
