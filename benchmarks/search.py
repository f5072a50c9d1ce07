"""The search for the best plan of large models on thousands of devices, over the whole space.

    python benchmarks/search.py [--json] [--runs N] [--cases trillion,llama_405b,…]

A process of its own for each run, so that none finds another's memory or what it worked out, held to one core where the
system can do that. Figures of each case, such as `trillion_seconds`, the median of the runs:
- `seconds`: from the job and the cluster in memory to the answer. `cpu_seconds`: of these, those on the core; on a
  machine that does other work as well, the rest is waiting for it.
- `mb`: the most memory that the process had, Python and all modules included (`ru_maxrss`), in 10^6 bytes.
- `gap`: by what part of its time the best plan may miss the optimum of the model: 0 where all else was predicted or
  bounded away.
- `considered`, `evaluated`: plans in the space, and those predicted in full.
`slowest_search_s` and `largest_gap` are the largest `cpu_seconds` and `gap` of the cases.
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
from typing import Any, NamedTuple

from paceline.cluster.cluster import cluster_from
from paceline.job.job import Job
from paceline.planning.search.search import search

RUNS = 3
_GATED = {"gated": True, "tied": False, "positions": False, "dropout": False}


class Case(NamedTuple):
    """A model by its dimensions, and where it is trained."""

    batch: int
    cluster: str
    dimensions: dict[str, Any]

    def job(self, name: str) -> Job:
        """The job that trains it in bf16 with AdamW."""
        return Job(
            name=name,
            model={"transformer": self.dimensions},
            data="synthetic",
            loss="cross_entropy",
            optimizer="adamw",
            global_batch=self.batch,
            precision="bf16",
            stop={"steps": 1000},
        )


# Dimensions, batches in samples and numbers of devices as in the models' papers; the devices themselves are those of
# the catalogue that come nearest.
CASES = {
    # Narayanan et al. (2021, arXiv:2104.04473), table 1, and section 5.1 for 175B
    "trillion": Case(
        3072, "512x8xH100-SXM, 400gbit", {"layers": 128, "hidden": 25600, "heads": 160, "seq": 2048, "vocab": 51200}
    ),
    "gpt3_175b": Case(
        1536, "128x8xA100-SXM-80, 1600gbit", {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048, "vocab": 51200}
    ),
    # Llama Team (2024, arXiv:2407.21783), tables 3 and 4
    "llama_405b": Case(
        2048,
        "2048x8xH100-SXM, 3200gbit",
        {"layers": 126, "hidden": 16384, "ffn": 53248, "heads": 128, "kv_heads": 8, "seq": 8192, "vocab": 128256}
        | _GATED,
    ),
    # DeepSeek-AI (2024, arXiv:2412.19437), section 4.2, as if all of its layers were mixtures and its attention plain
    "deepseek_v3": Case(
        15360,
        "256x8xH100-SXM, 3200gbit",
        {"layers": 61, "hidden": 7168, "ffn": 2048, "heads": 128, "seq": 4096, "vocab": 129280}
        | {"experts": 256, "top_k": 8}
        | _GATED,
    ),
    # Jiang et al. (2024, arXiv:2401.04088); 8x22B by its published configuration
    "mixtral_8x22b": Case(
        1024,
        "64x8xH100-SXM, 3200gbit",
        {"layers": 56, "hidden": 6144, "ffn": 16384, "heads": 48, "kv_heads": 8, "seq": 4096, "vocab": 32768}
        | {"experts": 8, "top_k": 2}
        | _GATED,
    ),
    # Chowdhery et al. (2022, arXiv:2204.02311), table 1; 6,144 TPU v4 there
    "palm_540b": Case(
        2048,
        "6144xTPU-v5p",
        {"layers": 118, "hidden": 18432, "heads": 48, "kv_heads": 1, "seq": 2048, "vocab": 256000}
        | _GATED
        | {"tied": True},
    ),
    # Nvidia (2024, arXiv:2406.11704), tables 1 and 2
    "nemotron_340b": Case(
        2304,
        "768x8xH100-SXM, 3200gbit",
        {"layers": 96, "hidden": 18432, "heads": 96, "kv_heads": 8, "seq": 4096, "vocab": 256000}
        | {"tied": False, "positions": False, "dropout": False},
    ),
}


def measured(name: str) -> dict[str, Any]:
    """One search in this process."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    job, cluster = CASES[name].job(name), cluster_from(CASES[name].cluster)
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


def run_once(name: str) -> dict[str, Any]:
    """One search in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--one", name], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(name: str, run: dict[str, Any]) -> str:
    """What was found, for people."""
    lines = [f"{name} on {CASES[name].cluster}"]
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


def figures(name: str, runs: list[dict[str, Any]]) -> dict[str, float]:
    """By name, medians."""
    names = ("seconds", "cpu_seconds", "mb", "gap", "considered", "evaluated")
    return {f"{name}_{figure}": statistics.median(run[figure] for run in runs) for figure in names}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of figures")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one)))
        return
    names = arguments.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}. There are {', '.join(CASES)}")
    found: dict[str, float] = {}
    for name in names:
        runs = [run_once(name) for _ in range(arguments.runs)]
        found |= figures(name, runs)
        print(table(name, runs[0]))
        seconds, cpu_seconds, megabytes = (found[f"{name}_{figure}"] for figure in ("seconds", "cpu_seconds", "mb"))
        print(f"{seconds:.2f} s ({cpu_seconds:.2f} s on the core), {megabytes:.0f} MB\n", flush=True)
    found["slowest_search_s"] = max(found[f"{name}_cpu_seconds"] for name in names)
    found["largest_gap"] = max(found[f"{name}_gap"] for name in names)
    from measure import environment_line  # with torch, which must not count as memory of the search
    from paceline.cluster.discover import environment

    print(environment_line())
    if arguments.json:
        print(json.dumps({"figures": found, "environment": environment()}))


if __name__ == "__main__":
    main()
