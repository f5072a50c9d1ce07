"""Whole runs and loops of users' own for `gpu.py`, held to the same on the CPU by their losses.

A run goes through `paceline.train`: pinned loading by loader processes, evaluation, asynchronous checkpoints, resuming.
Rules that are not exact and codecs have no single process to compare with, so the same plan runs on CPU ranks.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from gpu_checks import JOBS
from gpu_ranks import Loops, OwnLoop, train_own_loop
from gpu_results import CheckRow, Described
from paceline.cluster.discover import discover
from paceline.device import ON_CPU
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run.record.run import Run
from paceline.run.train import train

RUNS, OWN, INEXACT = "Whole runs", "Loops of users' own", "Rules that are not exact, two devices"
KILLED = "Runs that lose a rank"
STEPS, STOPPED_AT = 8, 5
KILLED_STEPS, KILLED_AT = 120, 10
# Relative differences of losses. Codecs round to few bits, and a number between two of them may go either way.
SAME = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
CODED = 2e-2
RULES = ("local:2", "diloco:2", "diloco:4,fragments=2,overlap=1")
CODECS = ("bf16", "fp16", "int8", "int4", "1bit", "topk:0.05", "powersgd:2")


@dataclass(frozen=True)
class LoopCase:
    """A path with the function that gives its losses and those to compare with.

    Attributes:
        first: True for what is worth most.
        ranks: number of devices.
    """

    group: str
    name: str
    plan: str
    tolerance: float
    first: bool
    ranks: int
    losses: Any  # () -> (ours, theirs)

    def row(self) -> CheckRow:
        """Verdict. Raises what starting and running its ranks raises."""
        ours, theirs = self.losses()
        worst = largest_difference(ours, theirs)
        return CheckRow(
            self.group,
            self.name,
            self.plan,
            "holds" if worst <= self.tolerance else "differs",
            f"loss {worst:.1e} of {self.tolerance:.0e}, {len(ours)} steps",
            {"loss": min(worst, 1e308)},
            {"loss": self.tolerance},
        )


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of losses; infinite where a step is missing or not finite."""
    if not ours or len(ours) != len(theirs) or not all(map(math.isfinite, (*ours, *theirs))):
        return math.inf
    return max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours, theirs, strict=True))


class LoopChecks:
    """Runs and loops of a folder, each reference trained once.

    Args:
        folder: for the runs.
    """

    def __init__(self, described: Described, devices: int, folder: Path) -> None:
        self.precision, self.bf16 = "fp64" if described.float64 else "fp32", bool(described.capabilities.get("bf16"))
        self.devices, self.folder = devices, folder
        self._trained: dict[tuple[str, str, bool], Run] = {}

    def cases(self) -> Iterator[LoopCase]:
        """All cases that the devices are enough for."""
        for plan in ("dp=1", "dp=2", "fsdp=2") if self.devices > 1 else ("dp=1",):
            text, within, first = f"{plan} precision={self.precision}", SAME[self.precision], plan != "fsdp=2"
            loaded, resumed = partial(self._run_to_cpu, text), partial(self._resumed, text)
            ranks = Plan.parse(plan).ranks
            yield LoopCase(RUNS, f"pinned loader processes, evaluation, {plan}", text, within, first, ranks, loaded)
            yield LoopCase(RUNS, f"asynchronous checkpoint, resumed, {plan}", text, within, first, ranks, resumed)
        if self.bf16:  # one of its gradients differs by 10 %, of which `paceline check` could tell nothing
            images = partial(self._same_on_cpu, "precision=bf16", "cnn")
            yield LoopCase(RUNS, "CNN, bf16, beside bf16 on the CPU", "precision=bf16", SAME["bf16"], True, 1, images)
        own: tuple[tuple[Loops, str, str], ...] = (
            ("setup", f"setup, {self.precision}", self.precision),
            ("setup fp16", "setup, fp16 with its loss scale", "fp16"),
            ("GradScaler", "setup, fp16 with torch's GradScaler", "fp16"),
        )
        for kind, name, precision in own:
            for ranks in {1, min(2, self.devices)}:
                losses = partial(self._own, kind, ranks)
                yield LoopCase(OWN, f"{name}, dp={ranks}", f"dp={ranks}", SAME[precision], True, ranks, losses)
        for plan in ("dp=2", "fsdp=2", "dp=2 fsdp=2", "dp=2 tp=2", "dp=2 pp=2 microbatches=2"):
            if (ranks := Plan.parse(plan).ranks) <= self.devices:
                text, within = f"{plan} precision={self.precision}", SAME[self.precision]
                yield LoopCase(KILLED, f"SIGKILL, {plan}", text, within, True, ranks, partial(self._killed, text))
        for words in (*(f"sync={rule}" for rule in RULES), *(f"compress={codec}" for codec in CODECS)):
            exactly = words.startswith("sync")
            text = f"dp=2 {words} precision={self.precision if exactly else 'fp32'}"
            if self.devices > 1:
                within = SAME[self.precision] if exactly else CODED
                yield LoopCase(INEXACT, words, text, within, False, 2, partial(self._same_on_cpu, text))

    def _case(
        self, plan: str, within: float, group: str, name: str, ranks: int, losses: Any, *, first: bool
    ) -> LoopCase:
        return LoopCase(group, f"{name}, {plan.rpartition(' ')[0]}", plan, within, first, ranks, losses)

    def _run_to_cpu(self, plan: str) -> tuple[list[float], list[float]]:
        """A run and its evaluation beside one process on the CPU."""
        alone = str(Plan(precision=Plan.parse(plan).precision))
        return _losses(self._run("loaded", plan)), _losses(self._run("loaded", alone, on_cpu=True))

    def _resumed(self, plan: str) -> tuple[list[float], list[float]]:
        """A run that stops and resumes beside one that does not stop."""
        whole = _losses(self._run("loaded", plan))
        stopped = self._train("loaded", plan, "stopped", {"stop": {"steps": STOPPED_AT}})
        resumed = self._train("loaded", plan, stopped.path.name, {}, resume=True)
        return _losses(resumed), whole

    def _same_on_cpu(self, plan: str, job: str = "gpt") -> tuple[list[float], list[float]]:
        """The same plan on the devices and on ranks of the CPU."""
        return self._run(job, plan).losses, self._run(job, plan, on_cpu=True).losses

    def _killed(self, plan: str) -> tuple[list[float], list[float]]:
        """A run whose last rank is killed beside one that nothing disturbs.

        Raises:
            RuntimeError: not exactly one rank was lost, or the run read a checkpoint.
        """
        long = {"stop": {"steps": KILLED_STEPS}}
        whole, path = self._train("gpt", plan, "whole", long), self.folder / "killed"
        shutil.rmtree(path, ignore_errors=True)
        killing = threading.Thread(target=_kill_last_rank, args=(path, Plan.parse(plan).ranks), daemon=True)
        killing.start()
        run = self._train("gpt", plan, "killed", long, path=path)
        killing.join(1.0)
        events = [event["event"] for event in run.events()]
        lost = [event["rank"] for event in run.events() if event["event"] == "lost"]
        if len(lost) != 1 or "generation" not in events or "resume" in events:
            raise RuntimeError(f"it lost ranks {lost}, and its events were {sorted(set(events))}")
        return run.losses, whole.losses

    def _own(self, kind: Loops, ranks: int) -> tuple[list[float], list[float]]:
        """A script's losses beside those of plain PyTorch on the CPU."""
        precision = self.precision if kind == "setup" else "fp32"
        plain = OwnLoop("plain PyTorch", precision)
        return _asked(OwnLoop(kind, precision), ranks), _asked(plain, 1, ON_CPU)

    def _run(self, job: str, plan: str, *, on_cpu: bool = False) -> Run:
        if (job, plan, on_cpu) not in self._trained:
            with _on_cpu() if on_cpu else _as_it_is():
                self._trained[job, plan, on_cpu] = self._train(job, plan, "run", {})
        return self._trained[job, plan, on_cpu]

    def _train(
        self,
        job: str,
        plan: str,
        name: str,
        changes: Mapping[str, Any],
        *,
        resume: bool = False,
        path: Path | None = None,
    ) -> Run:
        path = path or self.folder / (name if resume else f"{name}-{len(list(self.folder.iterdir()))}")
        quiet = Console(file=io.StringIO())
        run = train(
            Job(**{**_jobs()[job], **changes}), plan, cluster=discover(), run=path, resume=resume, console=quiet
        )
        if run.reason in ("SIGINT", "SIGTERM"):
            raise KeyboardInterrupt
        return run


def _kill_last_rank(run: Path, ranks: int) -> None:
    """Kill the last rank of a run of this process once it has taken some steps."""
    steps = run / "steps" / "rank-0.jsonl"
    while not (steps.exists() and steps.read_bytes().count(b"\n") >= KILLED_AT):
        time.sleep(0.01)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.environ().get("RANK") == str(ranks - 1) or " ".join(process.cmdline()).startswith(
                f"paceline rank {ranks - 1} "
            ):
                process.kill()
                return


def _jobs() -> dict[str, dict[str, Any]]:
    """Runs of a GPT, and of the CNN with loader processes, evaluations and checkpoints."""
    stop = {"stop": {"steps": STEPS}}
    loaded = {
        "data": {"kind": "synthetic", "samples": 40, "held_out": 0.2, "num_workers": 2},
        "metrics": ("accuracy",),
        "evaluate": {"every_steps": 4},
        "checkpoint": {"every_steps": 3},
    }
    return {"gpt": JOBS["gpt"] | stop, "cnn": JOBS["cnn"] | stop, "loaded": JOBS["cnn"] | loaded | stop}


def _losses(run: Run) -> list[float]:
    """Training losses, then the newest evaluated figures."""
    return run.losses + [value for _, value in sorted(run.metrics.items())]


def _asked(request: OwnLoop, ranks: int, env: Mapping[str, str] = {}) -> list[float]:
    places = on_this_machine(ranks)
    return run_on_ranks(train_own_loop, request, places=places, env=env, deadline_s=60.0, start_deadline_s=90.0)[0]


@contextmanager
def _on_cpu() -> Iterator[None]:
    """This process and its ranks leave the accelerators alone."""
    before = {name: os.environ.get(name) for name in ON_CPU}
    os.environ.update(ON_CPU)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield
