"""Undisturbed runs of a job, with which a disturbed one is compared, and how exactly."""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import PacelineError, PlanError, RunError
from paceline.files import private_folder, write_whole
from paceline.job.job import CheckpointSpec, Job
from paceline.job.stop import StopSpec
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info
from paceline.run.record.run import Run, read_lines
from paceline.run.record.witness import WITNESS

_PILOT_STEPS = 40
_LEAST_STEPS = 60
_CHECKPOINTS = 8  # in a run, at least, for faults to fall on them
_DEADLINE_S = 30.0
_LEAST = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2}  # relative difference of losses that is always allowed
_TIMES = 20.0  # what another number of replicas differs by, and as much again for each of several changes
_SMALL = 1e-3  # of the first loss: smaller losses are compared as if they were so large


@dataclass(frozen=True)
class Reference:
    """An undisturbed run, and by how much losses may differ from it.

    Attributes:
        losses: by step.
        samples: indices of each step's samples, ascending.
        allowed: largest relative difference by step; empty where losses are not to be compared.
        why: how that was found.
    """

    run: Path
    losses: Mapping[int, float]
    samples: Mapping[int, list[int]]
    allowed: Mapping[int, float]
    why: str


def as_trained(job: Job, steps: int) -> Job:
    """The job for some steps, saved often enough, with short deadlines and no trackers."""
    every = max(1, steps // _CHECKPOINTS)
    given = job.checkpoint.every_steps
    checkpoint = job.checkpoint.model_copy(update={"every_steps": min(given or every, every)})
    changes = {
        "stop": StopSpec(steps=steps),
        "checkpoint": CheckpointSpec.model_validate(checkpoint.model_dump()),
        "deadline_s": min(job.deadline_s, _DEADLINE_S),
        "trackers": (),
    }
    return job.model_copy(update=changes)


def steps_that_take(job: Job, plan: str, minutes: float, cluster: Path | None, folder: Path) -> int:
    """Number of steps that take so long where nothing happens, by a short run."""
    run = undisturbed(as_trained(job, _PILOT_STEPS), plan, cluster, folder)
    times: list[float] = [line["time"] for line in Run(run).steps()][_PILOT_STEPS // 4 :]
    step_s = max((times[-1] - times[0]) / (len(times) - 1), 1e-4)
    return max(_LEAST_STEPS, round(minutes * 60 / step_s))


def reference(job: Job, plan: str, cluster: Path | None, folder: Path, say: Callable[[str], None]) -> Reference:
    """The undisturbed run of a job and plan, made unless it is there."""
    say("undisturbed run")
    run = undisturbed(job, plan, cluster, folder)
    losses = losses_of(run)
    allowed, why = _allowed(job, plan, cluster, folder, losses, say)
    samples = {step: sorted(seen) for step, seen in samples_of(run.parent / "witness").items()}
    return Reference(run, losses, samples, allowed, why)


def losses_of(run: Path) -> dict[int, float]:
    """The newest loss of each step, from the first rank that has it."""
    found: dict[int, float] = {}
    for file in sorted(run.glob("steps/rank-*.jsonl"), key=lambda file: int(file.stem[5:])):
        own = {line["step"]: line["loss"] for line in read_lines(file) if line["loss"] is not None}
        found = own | found
    return found


def samples_of(witness: Path) -> dict[int, list[int]]:
    """Indices of the samples of each step, of all processes."""
    found: dict[int, list[int]] = {}
    for file in witness.glob("*.jsonl"):
        for line in read_lines(file):
            if "samples" in line:
                found.setdefault(line["step"], []).extend(line["samples"])
    return found


def difference(loss: float, other: float, first: float) -> float:
    """Relative difference of two losses of a run whose first loss is `first`."""
    return abs(loss - other) / max(abs(other), _SMALL * abs(first), 1e-30)


def undisturbed(job: Job, plan: str, cluster: Path | None, folder: Path) -> Path:
    """Directory of an undisturbed run, made unless it is there.

    Raises:
        RunError: it does not end well; with what it said.
    """
    what = "\n".join((job.to_yaml(), plan, cluster.read_text() if cluster else ""))
    place = folder / f"undisturbed-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    if _is_whole(place / "run"):
        return place / "run"
    number = 0
    while place.exists():  # one that did not end
        number += 1
        place = place.with_name(f"{place.name.partition('.')[0]}.{number}")
    private_folder(place)
    private_folder(place / "witness")
    write_whole(place / "job.yaml", job.to_yaml())
    words = ["train", str(place / "job.yaml"), "--plan", plan, "--run", str(place / "run")]
    words += ["--cluster", str(cluster)] if cluster else []
    settings = {**os.environ, WITNESS: str(place / "witness")}
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        said = done.stderr[done.stderr.rfind("paceline: ") :]
        raise RunError(f"the job does not train even where nothing is done to it. {said}")
    return place / "run"


def _is_whole(run: Path) -> bool:
    try:
        return Run(run).reason is not None
    except PacelineError:
        return False


def _allowed(
    job: Job, plan: str, cluster: Path | None, folder: Path, losses: Mapping[int, float], say: Callable[[str], None]
) -> tuple[dict[int, float], str]:
    parsed = Plan.parse(plan)
    least = _LEAST[parsed.precision_for(job)]
    info = sync_info(parsed.sync)
    if not info.exact or info.local_steps:
        return {}, f"losses are not compared: sync={parsed.sync} is not exact"
    if parsed.dp == 1:
        return dict.fromkeys(losses, least), f"losses may differ by {least:g}: there is one replica"
    fewer = str(replace(parsed, dp=parsed.dp - 1))
    say(f"undisturbed run on one replica fewer ({fewer})")
    try:
        other = losses_of(undisturbed(job, fewer, cluster, folder))
    except (PlanError, RunError):
        return dict.fromkeys(losses, least), f"losses may differ by {least:g}: plan {fewer} cannot run the job"
    first, most, allowed = losses[min(losses)], 0.0, {}
    for step in sorted(losses):
        most = max(most, difference(other.get(step, losses[step]), losses[step], first))
        allowed[step] = max(least, _TIMES * most)
    typical = statistics.median(allowed.values())
    return allowed, (
        f"losses may differ by {typical:.2g} of themselves in the median ({allowed[max(allowed)]:.2g} at the end): "
        f"{_TIMES:g} times what plan {fewer} differs by where nothing happens, and {least:g} at least"
    )
