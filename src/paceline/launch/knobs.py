"""`--plan auto`: the plan whose knobs were measured to be the fastest for the job on this machine, now or at an earlier start."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.cluster import Cluster
from paceline.errors import LaunchError, PlanError
from paceline.job.job import Job
from paceline.launch.look import launch_to_look
from paceline.plan.auto import auto_plan
from paceline.plan.knobs import HEADING, Knob, Tried, knobs, longest_run_s, steps_are_too_few
from paceline.plan.plan import Plan
from paceline.train.findings import BEGINNING, Findings

Say = Callable[[str], None]
_MOST_FAILURES = 2  # knobs that may fail before the others are left out: each costs another start of the ranks
_LOOK_S = 0.2  # for other work on the cores, before the ranks start
_MOST_OTHER_WORK = 0.25  # of all cores; what is measured beside more must not be taken for true ever after
_WORK = ("model", "data", "loss", "optimizer", "global_batch", "drop_last", "clip_norm", "batch_norm", "precision", "partition")


@dataclass(frozen=True)
class Choice:
    """The plan that `auto` stands for, and why.

    Attributes:
        plan: the fastest that was found, or the one to begin with.
        lines: what was tried and what won, for people.
        gain: step time of the plan over that of the plan to begin with, by the ratios measured in turn; 1 where nothing was better.
        seconds: what measuring took now, the start of the ranks included; 0 where nothing was measured.
        from_cache: whether an earlier start had measured it.
    """

    plan: Plan
    lines: list[str] = field(default_factory=list)
    gain: float = 1.0
    seconds: float = 0.0
    from_cache: bool = False


def choose(job: Job, cluster: Cluster, say: Say | None = None) -> Choice:
    """Choose the plan for a job on this machine; `say` gets the lines as they arise.

    What is found is kept in a file of the user's cache, and holds for the same work on the same hardware and torch.

    Raises:
        PlanError: no plan of `auto` can run the job here.
        SystemExit: 130 or 143, when SIGINT or SIGTERM came meanwhile.
    """
    default = auto_plan(job, cluster)
    lines = _Lines(say)
    candidates = knobs(job, cluster, default)
    nothing = steps_are_too_few(job) or (None if any(not knob.untried for knob in candidates) else "no knob can help here")
    if nothing:
        lines.add(f"plan auto: the knobs are not measured: {nothing}")
        return Choice(default, lines.all)
    file = _cache_file(job, cluster, default)
    known = _read(file, job, cluster)
    if known:
        lines.all += [HEADING, *(row.line() for row in known.tried)]  # said once is enough on a screen; a report wants them
        lines.add(f"plan auto: {_result(known)}, as measured before ({file}; delete it to measure again)")
        return Choice(Plan.parse(known.best), lines.all, known.gain, from_cache=True)
    started = time.monotonic()
    busy = psutil.cpu_percent(_LOOK_S) / 100
    lines.add("plan auto: measuring the knobs of this job, once for all starts")
    try:
        found = _measure(job, cluster, default, candidates, lines)
    except LaunchError as error:
        lines.add(f"the knobs could not be measured ({_reason(error)}); going on with plan {default}")
        return Choice(default, lines.all, seconds=time.monotonic() - started)
    seconds = time.monotonic() - started
    kept = f"not kept, as other work took {busy:.0%} of the cores" if busy > _MOST_OTHER_WORK else _write(file, found)
    lines.add(f"plan auto: {_result(found)}; measured in {seconds:.1f} s, {kept}")
    return Choice(Plan.parse(found.best), lines.all, found.gain, seconds)


class _Lines:
    """The lines so far, each told as it comes."""

    def __init__(self, say: Say | None) -> None:
        self.all: list[str] = []
        self._say = say
        self._rows = 0

    def add(self, line: str) -> None:
        self.all.append(line)
        if self._say:
            self._say(line)

    def rows(self, tried: list[Tried]) -> None:
        """The rows of the table that are new."""
        if tried and not self._rows:
            self.add(HEADING)
        for row in tried[self._rows :]:
            self.add(row.line())
        self._rows = len(tried)


# Measuring


def _measure(job: Job, cluster: Cluster, default: Plan, candidates: list[Knob], lines: _Lines) -> Findings:
    """Have ranks measure; where a knob fails, anew without it.

    Raises:
        LaunchError: the plan to begin with failed.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        file = Path(folder, "findings.json")
        Path(folder, "job.yaml").write_text(job.to_yaml())
        Path(folder, "cluster.yaml").write_text(cluster.to_yaml())
        Findings(default=str(default), best=str(default)).write(file)
        failures = 0
        while True:
            try:
                rank = ["paceline.train.trial:run_rank", folder]
                launch_to_look(rank, job, cluster, default, on_tick=lambda: lines.rows(Findings.read(file).tried))
                found = Findings.read(file)
                lines.rows(found.tried)
                return found
            except LaunchError as error:
                found = Findings.read(file)
                if found.under_way in (None, BEGINNING):
                    raise
                failures += 1
                found.tried.append(Tried(str(found.under_way), f"failed: {_reason(error)}"))
                if failures >= _MOST_FAILURES:
                    known = {row.knob for row in found.tried}
                    found.tried += [Tried(str(k), "not tried: others failed") for k in candidates if str(k) not in known]
                found.under_way = None
                found.write(file)
                lines.rows(found.tried)
                if failures >= _MOST_FAILURES:
                    return found


def _reason(error: LaunchError) -> str:
    """What happened, without which of the ranks it was first."""
    return re.sub(r"^rank \d+ \(.*?\) raised[^:]*: ", "", str(error).partition("\n")[0])


def _result(found: Findings) -> str:
    if found.best == found.default:
        return f"{found.best}, and no knob that was tried makes it faster"
    return f"{found.best}, whose step takes {found.gain:.2f} of that of {found.default}"


# What was found at earlier starts


def _cache_file(job: Job, cluster: Cluster, default: Plan) -> Path:
    """Named by all that bears on a step's time: the work, the hardware, the versions."""
    values = job.model_dump(mode="json", include=set(_WORK))
    values["optimizer"].pop("lr")
    hosts = [(host.cpu, host.cores, host.physical_cores, [(gpu.name, gpu.memory_bytes) for gpu in host.gpus]) for host in cluster.hosts]
    key = {"job": values, "files": list(_digests(values)), "hosts": hosts, "plan": str(default)}
    if cluster.emulate:
        key["emulate"] = cluster.emulate.model_dump(mode="json")
    key |= {package: version(package) for package in ("paceline", "torch")}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "paceline" / "knobs" / f"{job.name}-{name}.json"


def _digests(values: Any) -> Iterator[str]:
    """Of the Python and JSON files that the job names: a model that was edited is another one."""
    if isinstance(values, dict):
        for value in values.values():
            yield from _digests(value)
    elif isinstance(values, str):
        file = Path(values.rpartition(":")[0] or values)
        if file.suffix in (".py", ".json") and file.is_file():
            yield hashlib.sha256(file.read_bytes()).hexdigest()


def _read(file: Path, job: Job, cluster: Cluster) -> Findings | None:
    """What was found for this job, if it still holds; a longer run may be worth what a shorter one was not."""
    try:
        found = Findings.read(file)
        plan = Plan.parse(found.best)
    except (OSError, ValueError, TypeError, KeyError, PlanError):
        return None  # never measured, or by another version
    run_s = longest_run_s(job, found.step_s, found.steps_per_epoch)
    enough = found.complete or found.run_s is None or (run_s is not None and run_s <= 2 * found.run_s)
    return found if enough and not plan.check(job, cluster) else None


def _write(file: Path, found: Findings) -> str:
    """Keep it for the next start; returns where, in words."""
    with suppress(OSError):  # a home that cannot be written: then the next start measures again
        file.parent.mkdir(parents=True, exist_ok=True)
        found.write(file)
        return f"kept in {file} (delete it to measure again)"
    return f"not kept, as {file.parent} cannot be written"
