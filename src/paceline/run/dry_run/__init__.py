"""The dry run of a plan in one process, and the preflight before ranks start.

The preflight checks in a separate process that the plan can split a job's model and batches. A success is kept in the
user's cache, so that the same job is checked only once. A refusal is not kept, because code that the job does not name
may have changed since. Read `dry_run.py` first, then `preflight.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.elastic.run_on_ranks import run_on_plan
from paceline.errors import BatchError, LaunchError, PlanError, PlanProblem
from paceline.files import cache_folder, made_cache_folder
from paceline.job.job import Job
from paceline.planning.check.plan_context import loss_is_tried
from paceline.planning.history import WORK, digests, short_hash
from paceline.planning.plan import Plan

_FOLDER = "preflight"


def refuse_what_cannot_divide(job: Job, plan: Plan, cluster: Cluster, world: int | None = None) -> None:
    """Return if shapes and a few samples show no reason against starting ranks.

    A plan that does not divide the model is not checked, except for losses that users or models define.

    Args:
        world: number of ranks that have already started; a proposed plan must use all of them.

    Raises:
        PlanError: the plan cannot divide the job's model, or would train another loss; every reason, and the nearest
            plan that works.
        LaunchError: the model cannot compute a batch, whatever the plan.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.
    """
    if not plan.splits and not loss_is_tried(job, plan):
        return
    known = kept_file(job, plan)
    if known.is_file():
        return
    if (refusal := _asked(job, plan, cluster, world)) is not None:
        problems = [PlanProblem.of_parts(*parts) for parts in refusal.problems]
        raise PlanError.of_problems(problems, nearest=refusal.nearest)
    with suppress(OSError):  # the cache cannot be written: the next start checks again
        made_cache_folder(_FOLDER)
        known.touch(mode=0o600)


@dataclass(frozen=True)
class _Refusal:
    """A refusal as sent between processes; each problem is a code, template and fields."""

    problems: list[tuple[str, str, dict[str, Any]]]
    nearest: Plan | None


def _asked(job: Job, plan: Plan, cluster: Cluster, world: int | None) -> _Refusal | None:
    """Return the result of the checking process.

    None if the plan can start, or the process could not decide; then the ranks will report.
    """
    here = discover() if cluster.emulate is not None else cluster
    try:
        return run_on_plan(_refusal, (job, plan, cluster, world), job=job, cluster=here, plan=Plan())[0]
    except LaunchError as error:
        if error.rank_error == BatchError.__name__:
            raise
        return None


def _refusal(question: tuple[Job, Plan, Cluster, int | None]) -> _Refusal | None:
    from paceline.run.dry_run.preflight import Preflight

    job, plan, cluster, world = question
    if (error := Preflight(job).refusal(plan, cluster, world)) is None:
        return None
    return _Refusal([(one.code, one.template, one.fields) for one in error.problems], error.nearest)


def kept_file(job: Job, plan: Plan) -> Path:
    """Return the file whose presence means that the plan can start.

    Its name is a digest of the work, the plan and all code that is known to affect them.
    """
    values = job.model_dump(mode="json", include=set(WORK))
    key = {
        "job": values,
        "files": list(digests(values)),
        "plan": str(plan) if plan.splits else "whole",
        "source": _newest_source(),
    }
    key |= {package: _version(package) for package in ("paceline", "torch", "transformers")}
    return cache_folder() / _FOLDER / short_hash(key)


def _newest_source() -> int:
    """Return the time of paceline's last edit in ns, for installs from a working tree."""
    return max(file.stat().st_mtime_ns for file in Path(__file__).parents[2].rglob("*.py"))


def _version(package: str) -> str:
    with suppress(Exception):
        return version(package)
    return ""
