"""Dry run of a plan in one process, and the preflight check before ranks start.

The preflight checks in a separate process that the plan can divide a job's model and batches. The user's cache records
a success, so the same job is checked only once. A refusal is not recorded, because a later change of the user's code
may remove its cause. Read `dry_run.py` first, then `preflight.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.elastic.run_on_ranks import run_on_plan
from paceline.errors import BatchError, DataError, LaunchError, PlanError, PlanProblem, Problem
from paceline.files import cache_folder, made_cache_folder
from paceline.job.job import Job
from paceline.planning.check.plan_context import loss_is_tried
from paceline.planning.history import WORK, digests, short_hash
from paceline.planning.plan import Plan

_FOLDER = "preflight"


def refuse_what_cannot_divide(job: Job, plan: Plan, cluster: Cluster, world: int | None = None) -> None:
    """Check with shapes and a few samples that the plan can run, before ranks start.

    A plan that does not divide the model is only checked if the user or the model defines the loss, or if a tokenizer
    makes the samples.

    Args:
        world: number of ranks that have already started; the plan that an error proposes uses all of them.

    Raises:
        DataError: the tokenizer has more ids than the model has embeddings.
        PlanError: the plan cannot divide the job's model, or would train another loss. The message lists every reason,
            and the nearest plan that works.
        LaunchError: the model cannot compute a batch under any plan.
        SystemExit: 130 or 143, after SIGINT or SIGTERM.
    """
    if not plan.splits and not loss_is_tried(job, plan) and not job.data.is_tokenized:
        return
    known = kept_file(job, plan)
    if known.is_file():
        return
    if (refusal := _asked(job, plan, cluster, world)) is not None:
        if refusal.of_data:
            raise DataError.of_problems([Problem.of_parts(*parts) for parts in refusal.problems])
        problems = [PlanProblem.of_parts(*parts) for parts in refusal.problems]
        raise PlanError.of_problems(problems, nearest=refusal.nearest)
    with suppress(OSError):  # if the cache cannot be written, the next start checks again
        made_cache_folder(_FOLDER)
        known.touch(mode=0o600)


@dataclass(frozen=True)
class _Refusal:
    """A refusal in the form sent between processes: each problem is (code, template, fields).

    Attributes:
        of_data: True if no plan can train on the data.
    """

    problems: list[tuple[str, str, dict[str, Any]]]
    nearest: Plan | None
    of_data: bool = False


def _asked(job: Job, plan: Plan, cluster: Cluster, world: int | None) -> _Refusal | None:
    """Check the plan in another process, and return its refusal.

    Returns None if the plan can start. If the check itself fails, the result is None as well, and the ranks report the
    problem.
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
    preflight = Preflight(job)
    if found := preflight.reasons_of_data():
        return _Refusal(_parts(found), None, of_data=True)
    if (error := preflight.refusal(plan, cluster, world)) is None:
        return None
    return _Refusal(_parts(error.problems), error.nearest)


def _parts(problems: Sequence[Problem]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(one.code, one.template, one.fields) for one in problems]


def kept_file(job: Job, plan: Plan) -> Path:
    """Return the cache file that records a passed check.

    The file's name is a digest of the job, the plan and the code that affects the result.
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
    """Return the newest modification time of paceline's source files, in ns.

    The time changes when a developer edits paceline.
    """
    return max(file.stat().st_mtime_ns for file in Path(__file__).parents[2].rglob("*.py"))


def _version(package: str) -> str:
    with suppress(Exception):
        return version(package)
    return ""
