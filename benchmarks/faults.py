"""Ranks and hosts that are lost while a run trains: the gap, the steps lost, and how soon they are back.

    python benchmarks/faults.py [--json] [--faults N] [--transports shm,hosts] [--kinds kill,host] [--rounds N]
                                [--no-goodput] [--torchft PYTHON] [--horovod PYTHON]
    python benchmarks/faults.py --device sim [--json] [--count N] [--plans "dp=2;fsdp=2"]

Four replicas train on shared memory, and, as root, on four emulated hosts. A random rank of theirs is killed (SIGKILL)
again and again, a while after the one before is back. Figures, of each transport (`shm_`, `hosts_`):
- `kill_gap_s`: median over the faults of the longest time between two committed steps around a kill, beyond the run's
  median step; `kill_gap_worst_s` the longest of all.
- `named_s`: median time from the kill until the record names who is lost.
- `healed_s`: median time from the kill to the step after which the rank takes part again.
- `steps_lost`: steps that were taken twice, or are missing from the record.
- `short_steps`: steps that were taken with fewer samples than undisturbed ones; of peers, without a replica.
- `inexact`: steps whose loss differs from that of an undisturbed run by more than 1e-6 of it.
- `hangs`: faults after which no step came within a minute, and runs that did not end within one when asked to.
Other kinds of faults, in runs of their own, have theirs with the kind before (`hosts_cut_gap_s`, `hosts_cut_healed_s`):
- `stop`: SIGSTOP for a rank.
- `host-process`: SIGKILL for the host process of a host but the first; `host`: for all its processes at once.
- `cut`: the link of such a host carries nothing until the run has noted the loss.
- `coordinator`: SIGKILL for the host process that coordinates, where the command is started once per host
  (`faults_hosts.py`); its command is started there again once another coordinates, which `healed_s` contains.
- `notice`: SIGTERM for the host process of a host but the first, which leaves; `notice-coordinator`: for the process
  that coordinates. `left` is how many left without the loss of a rank, and `named_s` the time until they have left.
And once:
- `goodput_15s`, `goodput_60s`: share of the time that the same steps take undisturbed, on shared memory with a kill
  every 15 and 60 s, without the start of the run. A step takes the mean of those of that run which no kill disturbs,
  checkpoints among them.
- `steady_cost`: median step time with recovery / with PACELINE_RECOVERY=off, runs in turn, where nothing fails.
- `mirror_cost`: the same of the mean step time under fsdp=2, whose ranks copy their states to each other.

With `--torchft` or `--horovod`, an interpreter that has paceline and torchft (`pip install torchft-nightly`), or
Horovod, the same kills hit their replicas (`torchft_`, `horovod_`, see `faults_peers.py`): there `inexact` is not
known, as they deal no samples.

With `--device sim`, ranks of runs on simulated accelerators are killed, with plans that divide replicas among them
(`faults_sim.py`). Figures:
- `sim_kills`, `sim_steps_lost`, `sim_hangs`: as above; `sim_wrong` counts losses.
- `sim_moved`: survivors that were another process afterwards.
- `sim_memory_lost`: survivors whose device did not hold their state when they met again.
- `sim_pause_s`, `sim_pause_worst_s`: longest time between two steps around a kill, beyond the median step.
- `sim_net_pause_s`, `sim_net_pause_worst_s`: the same without the simulated time that new process groups take.

Figures of a busy machine say little.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from faults_found import HANG_S, HEAD, REPLICAS, REST_S, SEED, Faults, events, read, wait_for
from faults_hosts import HostCommands, host_commands
from faults_peers import PEERS, measured_on
from faults_runs import PLAN, SETTINGS, command_of, kill, losses, training
from measure import environment_line, parser_of, print_figures
from paceline_lab.chaos.faults import Links

TOLERANCE = 1e-6
NOTICES = "notice", "notice-coordinator"
KINDS = {"shm": ("kill", "stop"), "hosts": ("kill", "stop", "host-process", "host", "cut", "coordinator", *NOTICES)}
WARM_UP, STEADY_STEPS = 20, 200
GOODPUT = {15: 12, 60: 5}  # seconds from kill to kill, and how many
AFTER_S = 2.0  # after a rank is back, steps may still be slower
MIRRORED, MIRRORED_STEPS = "fsdp=2", 600


def main() -> None:
    """Measure, and print a table or the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--faults", type=int, default=100, help="of each transport")
    parser.add_argument("--transports", default="shm,hosts" if os.geteuid() == 0 else "shm")
    parser.add_argument("--kinds", default=",".join(KINDS["hosts"]))
    parser.add_argument("--rounds", type=int, default=5, help="of the runs without faults")
    parser.add_argument("--goodput", action=argparse.BooleanOptionalAction, default=True, help="takes 8 minutes")
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help="an interpreter that has it, to measure it as well")
    parser.add_argument("--device", choices=("cpu", "sim"), default="cpu", help="what the ranks train on")
    parser.add_argument("--count", type=int, default=200, help="kills with --device sim, of all plans together")
    parser.add_argument("--plans", default="", metavar="PLAN;PLAN", help="only these plans with --device sim")
    asked = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; it ends the runs here
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked.device == "sim":
        report(*on_devices(asked), asked.json)
        return
    figures: dict[str, float] = {}
    table = [HEAD]
    with tempfile.TemporaryDirectory(prefix="paceline-faults-") as folder:
        for name in asked.transports.split(","):
            for kind in [kind for kind in KINDS[name] if kind in asked.kinds.split(",")]:
                print(f"{name}: {asked.faults} faults ({kind})", file=sys.stderr, flush=True)
                ours = measured(Path(folder) / f"{name}-{kind}", name, kind, asked.faults)
                table.append(f"{f'{name}, {kind}':24}{ours.row()}")
                print(table[-1], file=sys.stderr, flush=True)
                figures |= ours.figures(name, kind)
        for peer_name, peer in PEERS.items():
            if python := getattr(asked, peer_name):
                print(f"{peer_name}: {asked.faults} faults", file=sys.stderr, flush=True)
                found = measured_on(peer, Path(folder) / peer_name, python, asked.faults)
                table.append(f"{f'{peer_name}, kill':24}{found.row()}")
                figures |= {
                    name: value for name, value in found.figures(peer_name).items() if not name.endswith("inexact")
                }
        for every_s in GOODPUT if asked.goodput else ():
            name = f"goodput_{every_s}s"
            print(f"{name}: {GOODPUT[every_s]} faults", file=sys.stderr, flush=True)
            figures[name] = round(goodput(Path(folder) / name, every_s, GOODPUT[every_s]), 4)
        figures["steady_cost"] = round(steady_cost(Path(folder) / "steady", asked.rounds), 4)
        figures["mirror_cost"] = round(mirror_cost(Path(folder) / "mirror", asked.rounds), 4)
    report(table, figures, asked.json)


def on_devices(asked: argparse.Namespace) -> tuple[list[str], dict[str, float]]:
    """The table and figures of simulated accelerators."""
    from faults_sim import PLANS, measured_on_devices

    with tempfile.TemporaryDirectory(prefix="paceline-faults-") as folder:
        return measured_on_devices(Path(folder), asked.count, asked.plans.split(";") if asked.plans else PLANS)


def report(table: list[str], figures: dict[str, float], as_json: bool) -> None:
    """Print a table and the figures."""
    print(*table, "", sep="\n")
    for name, value in figures.items():
        print(f"{name:24} {value:g}")
    print(environment_line())
    if as_json:
        print_figures(figures)


def measured(folder: Path, transport: str, kind: str, faults: int) -> Faults:
    """A run with faults, and one without that takes as many steps."""
    folder.mkdir()
    found = Faults()
    kills: list[float] = []
    random.seed(SEED)
    started_once_per_host = kind in ("coordinator", "notice-coordinator")
    trains = training_on_hosts(folder) if started_once_per_host else training(folder, transport, "faults", steps=10**7)
    with trains as (process, run):
        wait_for(lambda: len(losses(run)) > WARM_UP, process)
        for _ in range(faults):
            time.sleep(REST_S)
            at, undo = hit(kind, run, process)
            kills.append(at)
            if undo is not None:
                wait_for(lambda: len(events(run, "host_lost")) >= len(kills), process)
                undo()
            if not wait_for(lambda: len(events(run, "healed")) >= len(kills), process):
                found.hangs += 1
                break
        time.sleep(REST_S)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(HANG_S)
        except subprocess.TimeoutExpired as error:
            print(f"{folder.name}: {error}", file=sys.stderr, flush=True)
            found.hangs += 1
    lines = read(run / "steps" / "rank-0.jsonl")
    losses_told = [event["time"] for name in ("lost", "host_lost") for event in events(run, name)]
    left = [event["time"] for event in events(run, "host_left")]
    if kind in NOTICES:
        found.left = len(left) - len(losses_told)
    told = sorted(losses_told + left)
    found.note(kills, [line["time"] for line in lines], [event["time"] for event in events(run, "healed")], told)
    took = losses(run)
    found.steps_lost = len(lines) - len(took) + max(took) - len(took)
    with training(folder, transport, "undisturbed", steps=max(took)) as (process, whole):
        process.wait()
    dealt = {line["step"]: line["samples"] for line in read(whole / "steps" / "rank-0.jsonl")}
    found.short_steps = sum(line["samples"] < dealt[line["step"]] for line in lines)
    alone = losses(whole)
    differ = [abs(took[step] - loss) / abs(loss) for step, loss in alone.items()]
    found.inexact, found.loss_difference = sum(one > TOLERANCE for one in differ), max(differ)
    return found


def goodput(folder: Path, every_s: float, faults: int) -> float:
    """Share of the time that undisturbed steps take, with a kill in the midst of each stretch."""
    folder.mkdir()
    random.seed(SEED)
    kills: list[float] = []
    with training(folder, "shm", "goodput", steps=10**7) as (process, run):
        wait_for(lambda: len(losses(run)) > WARM_UP, process)
        for _ in range(faults):
            time.sleep(every_s / 2)
            kills.append(kill(random.randrange(REPLICAS), run, process))
            time.sleep(every_s / 2)
        process.send_signal(signal.SIGINT)
        process.wait(HANG_S)
    times = [line["time"] for line in read(run / "steps" / "rank-0.jsonl")][WARM_UP:]
    between = list(itertools.pairwise(times))
    disturbed = list(zip(kills, [event["time"] + AFTER_S for event in events(run, "healed")], strict=True))
    undisturbed: list[float] = [b - a for a, b in between if all(b < begin or a > end for begin, end in disturbed)]
    whole_s: float = times[-1] - times[0]
    return len(between) * statistics.fmean(undisturbed) / whole_s


def steady_cost(folder: Path, rounds: int) -> float:
    """Median step time with recovery over that without, where nothing fails."""
    return cost(folder, rounds, PLAN, STEADY_STEPS, lambda steps: statistics.median(line["step_s"] for line in steps))


def mirror_cost(folder: Path, rounds: int) -> float:
    """Mean time from step to step with copies of states over that without, which few steps pay for."""
    return cost(
        folder, rounds, MIRRORED, MIRRORED_STEPS, lambda steps: (steps[-1]["time"] - steps[0]["time"]) / len(steps)
    )


def cost(folder: Path, rounds: int, plan: str, count: int, step_s: Callable[[list[dict[str, Any]]], float]) -> float:
    """A time of a plan's steps with recovery over that without; runs take turns."""
    folder.mkdir()
    found: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(rounds):
        for recovery in sorted(found, reverse=bool(number % 2)):
            name = f"{recovery}-{number}"
            with training(folder, "shm", name, steps=count, recovery=recovery, plan=plan) as (process, run):
                process.wait()
            steps = read(run / "steps" / "rank-0.jsonl")[WARM_UP:]
            found[recovery].append(step_s(steps))
    return statistics.median(on / off for on, off in zip(found["on"], found["off"], strict=True))


def training_on_hosts(folder: Path) -> AbstractContextManager[tuple[HostCommands, Path]]:
    """The same, started once per host."""
    return host_commands(command_of(folder, "faults", 10**7, PLAN), folder, "faults", {**os.environ, **SETTINGS})


def hit(
    kind: str, run: Path, launcher: subprocess.Popen[bytes] | HostCommands
) -> tuple[float, Callable[[], None] | None]:
    """Make a fault of a kind at a random place; returns when, and what takes it back."""
    if isinstance(launcher, HostCommands):
        return launcher.lose_coordinator(signal.SIGKILL if kind == "coordinator" else signal.SIGTERM), None
    if kind in ("kill", "stop"):
        return kill(
            random.randrange(REPLICAS), run, launcher, signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        ), None
    links, host = Links.of(launcher.pid), random.randrange(1, REPLICAS)
    if links is None:
        raise RuntimeError(f"{run}: its hosts are not up")
    if kind == "cut":
        links.cut(host)
        return time.time(), partial(links.mend, [host])
    there = [process for pid in links.processes_in(host) if (process := living(pid)) is not None]
    if kind in ("host-process", "notice"):
        there = [process for process in there if process.cmdline()[:1] == ["paceline host process"]]
    at = time.time()
    for process in there:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM if kind == "notice" else signal.SIGKILL)
    return at, None


def living(pid: int) -> psutil.Process | None:
    """A process; None where it has just ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


if __name__ == "__main__":
    main()
