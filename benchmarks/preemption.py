"""Hosts of a run that are told to leave (SIGTERM), one after another: the steps lost, and how soon they are back.

    python benchmarks/preemption.py [--json] [--notices N]

Needs root. Four replicas train on four emulated hosts, where the command is started once per host. A random host
receives SIGTERM, the coordinator among them; once its command has ended, it is started there again. Once the rank of
the host is back, the next host is told. Figures:
- `notices`: hosts that were told; `coordinators`: how many of them coordinated.
- `left`: notices after which the command ended with exit code 143 and no rank was lost.
- `steps_lost`: steps that were taken twice, or are missing from the record.
- `short_steps`: steps that were taken with fewer samples than undisturbed ones.
- `inexact`: steps whose loss differs from that of an undisturbed run by more than 1e-6 of it.
- `hangs`: notices after which no rank was back within a minute.
- `gap_s`: median over the notices of the longest time between two committed steps around one, beyond the run's median
  step; `gap_worst_s` the longest of all.
- `left_s`: median time from the notice to the end of the command, of which one second gathers notices of other hosts.
- `healed_s`: median time from the notice to the step after which the rank takes part again.

Figures of a busy machine say little.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import PLAN, SETTINGS, TOLERANCE, WARM_UP, command_of, losses, training
from faults_found import HANG_S, REPLICAS, REST_S, SEED, Faults, events, read, wait_for
from faults_hosts import host_commands
from measure import environment_line, parser_of, print_figures

_LOSSES = ("lost", "host_lost", "resume", "restart")


def main() -> None:
    """Measure, and print the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--notices", type=int, default=50)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-preemption-") as folder:
        figures = measured(Path(folder), asked.notices)
    for name, value in figures.items():
        print(f"{name:24} {value:g}")
    print(environment_line())
    if asked.json:
        print_figures(figures)


def measured(folder: Path, notices: int) -> dict[str, float]:
    """A run with notices, and one without that takes as many steps."""
    random.seed(SEED)
    found, left, coordinators = Faults(), 0, 0
    told: list[float] = []
    left_s: list[float] = []
    command = command_of(folder, "notices", 10**7, PLAN)
    with host_commands(command, folder, "notices", {**os.environ, **SETTINGS}) as (hosts, run):
        wait_for(lambda: len(losses(run)) > WARM_UP, hosts)
        for number in range(notices):
            time.sleep(REST_S)
            host = random.randrange(REPLICAS)
            coordinators += host == hosts.coordinator
            before = sum(len(events(run, kind)) for kind in _LOSSES)
            told.append(time.time())
            code = hosts.leave(host)
            left_s.append(time.time() - told[-1])
            is_back = wait_for(lambda: len(events(run, "healed")) > number, hosts)  # noqa: B023
            left += code == 128 + signal.SIGTERM and before == sum(len(events(run, kind)) for kind in _LOSSES)
            print(f"notice {number + 1}: host {host}, exit code {code}", file=sys.stderr, flush=True)
            if not is_back:
                found.hangs += 1
                break
        time.sleep(REST_S)
        hosts.send_signal(signal.SIGINT)
        try:
            hosts.wait(HANG_S)
        except subprocess.TimeoutExpired as error:
            print(error, file=sys.stderr, flush=True)
            found.hangs += 1
    lines, took = read(run / "steps" / "rank-0.jsonl"), losses(run)
    found.note(told, [line["time"] for line in lines], [event["time"] for event in events(run, "healed")])
    with training(folder, "shm", "undisturbed", steps=max(took)) as (process, whole):
        process.wait()
    dealt = {line["step"]: line["samples"] for line in read(whole / "steps" / "rank-0.jsonl")}
    differ = [abs(took[step] - loss) / abs(loss) for step, loss in losses(whole).items() if step in took]
    return {
        "notices": len(told),
        "coordinators": coordinators,
        "left": left,
        "steps_lost": len(lines) - len(took) + max(took) - len(took),
        "short_steps": sum(line["samples"] < dealt[line["step"]] for line in lines),
        "inexact": sum(one > TOLERANCE for one in differ),
        "loss_difference": max(differ),
        "hangs": found.hangs,
        "gap_s": round(statistics.median(found.gaps_s), 3),
        "gap_worst_s": round(max(found.gaps_s), 3),
        "left_s": round(statistics.median(left_s), 3),
        "healed_s": round(statistics.median(found.healed_s), 3),
    }


if __name__ == "__main__":
    main()
