"""The search for the best plan of a GPT of a trillion parameters on 4,096 GPUs, over the whole space.

    python benchmarks/search.py [--json] [--runs N]

A process of its own for each run, so that none finds another's memory or what it worked out, held to one core where the
system can do that. Figures, the median of the runs:
- `trillion_seconds`: from the job and the cluster in memory to the answer. `trillion_cpu_seconds`: of these, those on
  the core; on a machine that does other work as well, the rest is waiting for it.
- `trillion_mb`: the most memory that the process had, Python and all modules included (`ru_maxrss`), in 10^6 bytes.
- `trillion_gap`: by what part of its time the best plan may miss the optimum of the model: 0 where all else was
  predicted or bounded away.
- `trillion_considered`, `trillion_evaluated`: plans in the space, and those predicted in full.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paceline.cluster.named import named_cluster
from paceline.job.job import Job
from paceline.planner.search.search import search

JOB = Path(__file__).parents[1] / "examples" / "plan" / "gpt_1t.yaml"
CLUSTER = "512x8xH100-SXM, 400gbit"
RUNS = 5


def measured() -> dict[str, Any]:
    """One search in this process."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    job, cluster = Job.load(JOB), named_cluster(CLUSTER)
    started, cpu_started = time.perf_counter(), time.process_time()
    found = search(job, cluster)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6,
        "gap": found.gap,
        "considered": found.considered,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "torch": "torch" in sys.modules,
        "best": [
            (str(one.plan), one.prediction.step_time_s, one.prediction.memory_bytes, one.why) for one in found.best
        ],
        "excluded": [(one.what, one.reason) for one in found.excluded],
    }


def run_once() -> dict[str, Any]:
    """One search in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--one"], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(run: dict[str, Any]) -> str:
    """What was found, for people."""
    lines = [f"{JOB.name} on {CLUSTER}"]
    lines.append(
        f"{run['considered']:,} plans considered, {run['evaluated']:,} predicted, {run['pruned']:,} bounded "
        f"away; gap {run['gap']:.2%}"
    )
    lines += [
        f"  {plan}\n    {seconds:.3f} s a step, {memory / 2**30:.0f} GiB: {why}"
        for plan, seconds, memory, why in run["best"]
    ]
    lines += [f"  excluded, {what}: {reason}" for what, reason in run["excluded"]]
    return "\n".join(lines)


def figures(runs: list[dict[str, Any]]) -> dict[str, float]:
    """By name, medians."""
    names = ("seconds", "cpu_seconds", "mb", "gap", "considered", "evaluated")
    return {f"trillion_{name}": statistics.median(run[name] for run in runs) for name in names}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of figures")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured()))
        return
    runs = [run_once() for _ in range(arguments.runs)]
    found = figures(runs)
    print(table(runs[0]))
    seconds, cpu_seconds, megabytes = (found[f"trillion_{name}"] for name in ("seconds", "cpu_seconds", "mb"))
    print(f"\n{seconds:.2f} s ({cpu_seconds:.2f} s on the core), {megabytes:.0f} MB")
    from measure import environment_line  # with torch, which must not count as memory of the search
    from paceline.cluster.discover import environment

    print(environment_line())
    if arguments.json:
        print(json.dumps({"figures": found, "environment": environment()}))


if __name__ == "__main__":
    main()
