"""Kills of `faults.py` in runs on simulated accelerators, with whole and with divided replicas.

A random rank is killed (SIGKILL) repeatedly, at random moments. Then the same job is trained without kills.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# There `simulated` is the accelerator's package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import double_gpt
from faults_found import HANG_S, SEED, events, read, wait_for
from faults_runs import JOB, kill, losses, processes_of_ranks, training
from paceline.planning.plan import Plan
from simulated.environment import simulated_environment

PLANS = ("dp=2", "dp=3", "dp=4", "fsdp=2", "dp=2 fsdp=2", "dp=2 tp=2", "dp=2 pp=2 microbatches=2")
HEAD = f"{'plan':28}kills  lost  hangs  wrong  moved  memory lost  pause (the worst)  without new groups"
INIT_MS = 50.0  # that the creation of each process group takes
REST_S = 0.3, 1.5  # the shortest and longest time from a return to the next kill
WARM_UP, AFTER_S, TOLERANCE = 20, 1.0, 1e-6
STATES = 3  # a weight, and the two moments of AdamW
GPT_JOB = {
    **JOB,
    "model": f"{double_gpt.__file__}:build",
    "data": {"kind": "synthetic", "samples": 4096, "shape": [double_gpt.TOKENS], "vocab": double_gpt.VOCAB},
    "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-3},
    "global_batch": 12,  # whichever replicas are left share it evenly
    "checkpoint": {"every_steps": 500, "memory_every_steps": 1},
}


@dataclass
class Found:
    """Results of the kills in one or several runs.

    Attributes:
        steps_lost: steps that were taken twice, or are missing from the record.
        hangs: kills after which no rank came back within a minute, and runs that did not end when asked to.
        wrong: steps whose loss differs from that of the undisturbed run.
        moved: survivors that were another process after a kill.
        memory_lost: survivors whose device did not hold their state when they met again.
        pauses_s: longest time between two steps around each kill, beyond the median step.
        net_pauses_s: the same without the simulated creation of process groups.
    """

    kills: int = 0
    steps_lost: int = 0
    hangs: int = 0
    wrong: int = 0
    moved: int = 0
    memory_lost: int = 0
    pauses_s: list[float] = field(default_factory=list)
    net_pauses_s: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        """Return a line of the table whose head is `HEAD`."""
        numbers = (self.kills, self.steps_lost, self.hangs, self.wrong, self.moved, self.memory_lost)
        widths = (5, 6, 7, 7, 7, 13)
        counts = "".join(f"{number:>{width}}" for number, width in zip(numbers, widths, strict=True))
        pauses = [
            f"{statistics.median(times):.2f} s ({max(times):.2f})" if times else "none"
            for times in (self.pauses_s, self.net_pauses_s)
        ]
        return f"{name:28}{counts}{pauses[0]:>19}{pauses[1]:>20}"

    def figures(self) -> dict[str, float]:
        """Return the figures by name."""
        counts = ("kills", "steps_lost", "hangs", "wrong", "moved", "memory_lost")
        found: dict[str, float] = {f"sim_{name}": getattr(self, name) for name in counts}
        for name, times in (("sim_pause", self.pauses_s), ("sim_net_pause", self.net_pauses_s)):
            if times:
                found |= {f"{name}_s": round(statistics.median(times), 3), f"{name}_worst_s": round(max(times), 3)}
        return found


def together(several: Iterable[Found]) -> Found:
    """Return the sums of the results, and all pauses."""
    whole = Found()
    for one in several:
        for name, value in vars(one).items():
            setattr(whole, name, getattr(whole, name) + value)
    return whole


def measured_on_devices(folder: Path, kills: int, plans: Iterable[str]) -> tuple[list[str], dict[str, float]]:
    """Kill ranks in runs of each plan.

    Args:
        kills: of all plans together.

    Returns:
        A table, and figures.
    """
    found: dict[str, Found] = {}
    plans = list(plans)
    for number, plan in enumerate(plans):
        share = kills // len(plans) + (number < kills % len(plans))
        print(f"sim, {plan}: {share} kills", file=sys.stderr, flush=True)
        found[plan] = of_plan(folder / str(number), plan, share)
        print(found[plan].row(plan), file=sys.stderr, flush=True)
    whole = together(found.values())
    return [HEAD, *(one.row(plan) for plan, one in found.items()), whole.row("all")], whole.figures()


def of_plan(folder: Path, plan: str, kills: int) -> Found:
    """Compare a run whose ranks are killed with an undisturbed run of the same number of steps."""
    folder.mkdir()
    (log := folder / "log").mkdir()
    found, dice, parsed = Found(), random.Random(f"{SEED} {plan}"), Plan.parse(plan)
    devices = simulated_environment(devices=parsed.ranks, init_ms=INIT_MS, log=str(log))
    at: list[tuple[float, float]] = []  # of kills, and of returns
    with training(folder, "sim", "faults", steps=10**7, plan=plan, job=GPT_JOB, settings=devices) as (process, run):
        if not wait_for(lambda: len(losses(run)) > WARM_UP, process, 2 * HANG_S):
            raise RuntimeError(f"{plan} does not train: {(folder / 'faults.log').read_text()[-2000:]}")
        while len(at) < kills and not found.hangs:
            time.sleep(dice.uniform(*REST_S))
            before, victim = processes_of_ranks(process), dice.randrange(parsed.ranks)
            killed_at = kill(victim, run, process)
            found.kills += 1
            if not wait_for(lambda: len(events(run, "healed")) > len(at), process):
                print(f"{plan}: rank {victim} is not back after kill {found.kills}", file=sys.stderr, flush=True)
                found.hangs += 1
                break
            healed_at = time.time()
            wait_for(lambda: newest_step_at(run) > healed_at + AFTER_S / 2, process)  # noqa: B023 - called in this turn
            at.append((killed_at, healed_at))
            after, survivors = processes_of_ranks(process), before.keys() - {victim}
            found.moved += sum(after.get(rank) != before[rank] for rank in survivors)
            found.memory_lost += sum(not held(log / f"{before[rank]}.jsonl", killed_at, parsed) for rank in survivors)
        ended(process, found)
    took = losses(run)
    lines = read(run / "steps" / "rank-0.jsonl")
    found.steps_lost = len(lines) - len(took) + max(took) - len(took)
    note_pauses(found, at, [line["time"] for line in lines], log)
    with training(folder, "sim", "undisturbed", steps=max(took), plan=plan, job=GPT_JOB, settings=devices) as (
        process,
        whole,
    ):
        process.wait()
    alone = losses(whole)
    found.wrong = sum(abs(took.get(step, 0.0) - loss) > TOLERANCE * abs(loss) for step, loss in alone.items())
    return found


def ended(process: subprocess.Popen[bytes], found: Found) -> None:
    """Ask a run to end; a run that does not end counts as a hang."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(HANG_S)
    except subprocess.TimeoutExpired as error:
        print(error, file=sys.stderr, flush=True)
        found.hangs += 1


def held(log: Path, since: float, plan: Plan) -> bool:
    """Return True if a process had its state on its device at each meeting after a kill.

    The memory of a whole replica was allocated before the kill. A divided one is copied from there to the new engine.
    """
    parts = plan.ranks // plan.dp
    # stages and shards differ in size
    least = STATES * 8 * sum(p.numel() for p in double_gpt.build().parameters()) / parts / (1 if parts == 1 else 2)
    kind = "kept_bytes" if parts == 1 else "held_bytes"
    met = [line for line in read(log) if line["time"] > since]
    return bool(met) and all(line[kind] >= least for line in met)


def note_pauses(found: Found, at: Iterable[tuple[float, float]], steps: list[float], log: Path) -> None:
    """Compute the pauses around kills from the times of steps and of the creation of process groups."""
    groups = [read(file) for file in log.iterdir()]
    between = list(itertools.pairwise(steps))
    typical_s = statistics.median(b - a for a, b in between)
    for killed_at, back_at in at:
        near = [(a, b) for a, b in between if b > killed_at and a < back_at + AFTER_S]
        if not near:
            continue
        found.pauses_s.append(max(b - a for a, b in near) - typical_s)
        found.net_pauses_s.append(max(b - a - creation_s(groups, a, b) for a, b in near) - typical_s)


def creation_s(groups: Iterable[list[dict[str, Any]]], begin: float, end: float) -> float:
    """Return the longest simulated time of any process for creating process groups between two steps."""
    return max((sum(line["init_s"] for line in of if begin < line["time"] < end) for of in groups), default=0.0)


def newest_step_at(run: Path) -> float:
    """Return the time of the newest step; 0 before the first step."""
    return float(max((line["time"] for line in read(run / "steps" / "rank-0.jsonl")[-1:]), default=0.0))
