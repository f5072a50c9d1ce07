"""Ask, before ranks are started, whether a plan can divide the job's model: in a process of its own, and once for the same work.

Only a plan that can be started is kept in the user's cache, as code which the job does not name may have changed since a refusal.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import discover
from paceline.errors import LaunchError, PlanError
from paceline.files import scratch_folder
from paceline.job.job import Job
from paceline.launch.look import Launch, launch_to_look
from paceline.plan.history import cache_folder, digests, made_cache_folder
from paceline.plan.plan import Plan

_FOLDER = "preflight"
_ANSWER = "preflight.json"
_WORK = ("model", "data", "loss", "optimizer", "global_batch", "drop_last", "batch_norm", "precision", "partition", "clip_norm")


def refuse_what_cannot_divide(job: Job, plan: Plan, cluster: Cluster, world: int | None = None, *, launch: Launch = launch_to_look) -> None:
    """Return where ranks can be started under the plan, as far as shapes tell. A plan that divides no model is not looked at.

    Args:
        world: the number of ranks that were started already; another plan that is proposed needs exactly these.
        launch: starts the process that divides the model.

    Raises:
        PlanError: the plan cannot divide the job's model; every reason, and the nearest plan that works.
        SystemExit: 130 or 143, when SIGINT or SIGTERM came meanwhile.
    """
    if not plan.splits:
        return
    known = _kept(job, plan)
    if known.is_file():
        return
    reasons = _asked(job, plan, cluster, world, launch)
    if reasons:
        raise PlanError("\n".join(reasons))
    with suppress(OSError):  # a home that cannot be written: then the next start asks again
        made_cache_folder(_FOLDER)
        known.touch(mode=0o600)


def _asked(job: Job, plan: Plan, cluster: Cluster, world: int | None, launch: Launch) -> list[str]:
    """The answer of a process; [] where it could not tell, for then the ranks will."""
    with scratch_folder() as folder:
        (folder / "job.yaml").write_text(job.to_yaml())
        (folder / "cluster.yaml").write_text(cluster.to_yaml())
        (folder / "plan.txt").write_text(str(plan))
        arguments = ["paceline.train.preflight:run_rank", str(folder), *([] if world is None else [str(world)])]
        try:
            launch(arguments, job, discover() if cluster.emulate is not None else cluster, Plan())
        except LaunchError:
            return []
        found: list[str] = json.loads((folder / _ANSWER).read_text())
        return found


def _kept(job: Job, plan: Plan) -> Path:
    """The file that says that the plan can divide the model: named by the work, the plan and all code that is known to bear on it."""
    values = job.model_dump(mode="json", include=set(_WORK))
    key = {"job": values, "files": list(digests(values)), "plan": str(plan), "paceline": _newest_source()}
    key |= {package: _version(package) for package in ("paceline", "torch", "transformers")}
    return cache_folder() / _FOLDER / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def _newest_source() -> int:
    """When paceline itself was last edited, in ns: it may be installed from a working tree."""
    return max(file.stat().st_mtime_ns for file in Path(__file__).parents[1].rglob("*.py"))


def _version(package: str) -> str:
    with suppress(Exception):
        return version(package)
    return ""
