"""Invariants of a run under faults: properties that paceline guarantees in every case."""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, PacelineError, PlanError, RunError
from paceline.files import private_folder, write_whole
from paceline.job.job import CheckpointSpec, Job
from paceline.job.stop import StopSpec
from paceline.planning.plan import Plan
from paceline.planning.sync_info import sync_info
from paceline.run.record.recorder import WITNESS
from paceline.run.record.run import Run, read_lines
from paceline.state.manifest import checkpoints
from paceline_lab.chaos.play import STILL_SAVES, Ended, Played

_MOST_TOLD = 3
# parts of the errors with which a command may end after a fault if no restarts are left
_MAY_END = {
    "disk-full": ("No space left",),
    "corrupt": ("is different on rank", "holds other values"),
    "cut": ("is lost", "did not come"),
    "partition": ("is lost", "did not come"),
    "store": ("is lost", "did not come"),
}
_ABOUT_S = 0.005  # largest time difference between records of simultaneous actions of two ranks


@dataclass(frozen=True)
class Invariant:
    """One invariant, with a description of each violation."""

    name: str
    broken: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """True if the invariant was not violated."""
        return not self.broken


def check(played: Played, reference: Reference) -> list[Invariant]:
    """Check a run against every invariant."""
    questions = {
        "the run ends": _ends(played),
        "losses are those of an undisturbed run": _losses(played, reference),
        "every sample once an epoch": _samples(played, reference),
        "no checkpoint lost": _checkpoints(played),
        "nothing left behind": iter(played.left),
        "nothing grows": (str(course) for course in played.grown if course.grows),
    }
    return [Invariant(name, tuple(islice(broken, _MOST_TOLD))) for name, broken in questions.items()]


def _ends(played: Played) -> Iterator[str]:
    if played.hung:
        yield played.hung
    since, was_killed_before = 0.0, False
    for end in played.ends:
        if end.code:
            faults = [injected.fault for injected in played.made if since <= injected.time <= end.time]
            expected = any(word in end.text for fault in faults for word in _MAY_END.get(fault.kind, ()))
            was_killed = any(fault.kind == "kill" and fault.target == "command" for fault in faults)
            if was_killed and end.code < 0:
                was_killed_before = True
            elif was_killed_before and STILL_SAVES in end.text:
                continue  # the command reported that ranks still save, and the next command continues
            elif end.code < 0 or "paceline: " not in end.text:
                yield f"a command ended with code {end.code} and no error of paceline's: {_said(end)}"
            elif not expected:
                yield f"a command ended with an error that no fault explains: {_said(end)}"
        since = end.time
    if not played.hung and (not played.ends or played.ends[-1].code):
        said = _said(played.ends[-1]) if played.ends else "it did not start"
        yield f"it does not go on when it is resumed: {said}"


def _losses(played: Played, reference: Reference) -> Iterator[str]:
    if played.hung or not reference.allowed:
        return
    found, first = losses_of(played.run), reference.losses[min(reference.losses)]
    known = found.keys() | (_committed(played).keys() if _disk_was_full(played) else set())
    for step, loss in sorted(reference.losses.items()):
        if step not in known:
            yield f"step {step} is not in the record"
        elif step in found and step <= _trusted_until(played):
            by = difference(found[step], loss, first)
            if not by <= reference.allowed[step]:
                yield (
                    f"the loss of step {step} is {found[step]:.7g} instead of {loss:.7g}: it differs by {by:.2g}, and "
                    f"may by {reference.allowed[step]:.2g}"
                )


def _samples(played: Played, reference: Reference) -> Iterator[str]:
    if played.hung:
        return
    seen = _committed(played)
    changed = _steps_of_changes(played)
    for step, due in sorted(reference.samples.items()):
        samples = seen.get(step)
        if samples is None:
            continue  # no rank that took the step survived to record it
        if twice := [sample for sample, count in (Counter(samples) - Counter(due)).items() if count > 0]:
            yield f"step {step} had the samples {twice[:5]}, which are not its own or came twice"
        # near a change of ranks, the rank that read some samples may have died right after the step
        elif step not in changed and (missing := list((Counter(due) - Counter(samples)).keys())):
            yield f"step {step} was without the samples {missing[:5]}"


def _checkpoints(played: Played) -> Iterator[str]:
    if not (played.run / "job.yaml").exists():
        return
    from paceline.state.reader import load

    run = Run(played.run)
    folder = run.checkpoints
    saved = {event["path"]: event["time"] for event in run.events() if event["event"] == "checkpoint_saved"}
    damaged = {injected.checkpoint: injected.time for injected in played.made if injected.checkpoint}
    there = {path.name: path for _, path in checkpoints(folder)}
    for name in sorted(saved)[-run.job.checkpoint.keep :]:
        if name not in there and not played.hung:
            yield f"{name} was saved, and is gone"
    for name, path in there.items():
        is_damaged = damaged.get(name, 0.0) > saved.get(name, 0.0)
        try:
            load(path, 0, 1)
        except CheckpointError as error:
            if not is_damaged:
                yield f"{name} does not load: {error}"
        else:
            if is_damaged:
                yield f"{name} loads, though a bit of it was changed"


def _committed(played: Played) -> dict[int, list[int]]:
    """Return the indices of each step's samples. For a repeated step, only the last attempt counts."""
    files = _witnessed(played)
    again = _starts(files)
    found: dict[int, list[int]] = {}
    for lines in files:
        own: dict[int, list[int]] = {}
        for line in lines:
            if "samples" not in line:
                continue
            step, time = line["step"], line["time"]
            if not any(at > time + _ABOUT_S and went_on_from < step for at, went_on_from in again):
                own[step] = line["samples"]
        for step, samples in own.items():
            found.setdefault(step, []).extend(samples)
    return found


def _steps_of_changes(played: Played) -> set[int]:
    """Return the steps at or near which ranks were lost or joined."""
    changes = {step for _, step in _starts(_witnessed(played))}
    changes |= {injected.step for injected in played.made}
    return {step + near for step in changes for near in (-1, 0, 1, 2)}


def _starts(files: list[list[dict[str, Any]]]) -> list[tuple[float, int]]:
    return [(line["time"], line["from"]) for lines in files for line in lines if "from" in line]


def _witnessed(played: Played) -> list[list[dict[str, Any]]]:
    """Return the lines that each process wrote as a witness.

    The record of the run may lack lines if the disk was full.
    """
    return [list(read_lines(file)) for file in played.witness.glob("*.jsonl")]


def _trusted_until(played: Played) -> float:
    """Return the last step before a fault changed the weights of a rank.

    Until the change is detected, the results of this rank affect all ranks.
    """
    return min((i.step for i in played.made if i.fault.target == "weights"), default=float("inf"))


def _disk_was_full(played: Played) -> bool:
    return any(injected.fault.kind == "disk-full" for injected in played.made)


def _said(end: Ended) -> str:
    text = end.text[end.text.rfind("paceline: ") :] if "paceline: " in end.text else end.text[-400:]
    return re.sub(r"\s+", " ", text)[:400]


_PILOT_STEPS = 40
_LEAST_STEPS = 60
_CHECKPOINTS = 8  # minimum number of checkpoints in a run, so that faults can occur during checkpoints
_DEADLINE_S = 30.0
# relative difference of losses that is always allowed, by precision
_LEAST = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2, "fp8": 2e-2}
_TIMES = 20.0  # allowed difference of losses, as a multiple of the difference that one replica fewer causes
_SMALL = 1e-3  # fraction of the first loss; smaller losses are compared as if they had this size


@dataclass(frozen=True)
class Reference:
    """An undisturbed run, and how far the losses of another run may differ.

    Attributes:
        losses: loss of each step.
        samples: indices of the samples of each step, in ascending order.
        allowed: largest allowed relative difference of the loss, by step; empty if losses are not compared.
        why: sentence that explains how `allowed` was determined.
    """

    run: Path
    losses: Mapping[int, float]
    samples: Mapping[int, list[int]]
    allowed: Mapping[int, float]
    why: str


def as_trained(job: Job, steps: int) -> Job:
    """Return the job with few steps, frequent checkpoints, short deadlines and no trackers."""
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
    """Estimate from a short run how many steps fit into the given minutes without faults."""
    run = undisturbed(as_trained(job, _PILOT_STEPS), plan, cluster, folder)
    times: list[float] = [line["time"] for line in Run(run).steps()][_PILOT_STEPS // 4 :]
    step_s = max((times[-1] - times[0]) / (len(times) - 1), 1e-4)
    return max(_LEAST_STEPS, round(minutes * 60 / step_s))


def reference(job: Job, plan: str, cluster: Path | None, folder: Path, say: Callable[[str], None]) -> Reference:
    """Return the undisturbed run of a job and plan. Train it first if it does not exist."""
    say("undisturbed run")
    run = undisturbed(job, plan, cluster, folder)
    losses = losses_of(run)
    allowed, why = _allowed(job, plan, cluster, folder, losses, say)
    samples = {step: sorted(seen) for step, seen in samples_of(run.parent / "witness").items()}
    return Reference(run, losses, samples, allowed, why)


def losses_of(run: Path) -> dict[int, float]:
    """Read the latest loss of each step, from the lowest rank that recorded the step."""
    found: dict[int, float] = {}
    for file in sorted(run.glob("steps/rank-*.jsonl"), key=lambda file: int(file.stem[5:])):
        own = {line["step"]: line["loss"] for line in read_lines(file) if line["loss"] is not None}
        found = own | found
    return found


def samples_of(witness: Path) -> dict[int, list[int]]:
    """Read the indices of the samples of each step, over all processes."""
    found: dict[int, list[int]] = {}
    for file in witness.glob("*.jsonl"):
        for line in read_lines(file):
            if "samples" in line:
                found.setdefault(line["step"], []).extend(line["samples"])
    return found


def difference(loss: float, other: float, first: float) -> float:
    """Return the relative difference of two losses.

    Losses that are small compared with `first`, the first loss of the run, are treated as larger.
    """
    return abs(loss - other) / max(abs(other), _SMALL * abs(first), 1e-30)


def undisturbed(job: Job, plan: str, cluster: Path | None, folder: Path) -> Path:
    """Return the directory of an undisturbed run. Train the run first if it does not exist.

    Raises:
        RunError: the run fails. The error includes the run's output.
    """
    what = "\n".join((job.to_yaml(), plan, cluster.read_text() if cluster else ""))
    place = folder / f"undisturbed-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    if _is_whole(place / "run"):
        return place / "run"
    number = 0
    while place.exists():  # the folder has an unfinished run
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
        raise RunError("chaos.reference_failed", "the job fails to train even without faults. {reason}", reason=said)
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
