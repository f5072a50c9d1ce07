"""Every system of the field on the same works, on one host and on emulated hosts.

    python benchmarks/systems.py [--json] [--works cnn,gpt] [--settings one-host,1gbit] [--systems all] [--repeat 3]
                                 [--out DIR]

Each comparison is `paceline bench compare`: the same job, weights, order of batches, threads and precision; losses
are compared with those of one process before anything is timed; runs are interleaved. paceline trains by the plan that
`--plan auto` finds. Each other system runs as its documentation shows, and once more tuned. Emulated hosts need root.
In the setting `weak` every rank has the work's global batch; in all others they share it. In `slow-host` one of four
emulated hosts has half of the others' cores.

Figures:
- `ratio_WORK_SETTING`: step time of the fastest other system that computes the same / paceline's, by exact plans alone;
  `…_low` and `…_high`: its 95 % interval.
- `worst_ratio`: the least of them; `median_ratio_one_host`, `median_ratio_1gbit`: medians of a setting.
- `median_ratio_25mbit`: time of the fastest other system to the target loss / that of paceline's fastest plan that
  reached it, by rules that send less.
- `systems_run`: systems, paceline among them, that ran and whose losses were compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import environment_line, parser_of, print_figures
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Emulate
from paceline.console import Console
from paceline.job.job import Job
from paceline_lab.report.systems_view import write_systems_page
from paceline_lab.systems.compare import Compare
from paceline_lab.systems.compared import Comparison, show
from paceline_lab.systems.system import SYSTEMS
from systems_works import works

OVER_HOSTS = ["ddp", "fsdp", "deepspeed", "accelerate", "lightning", "tf-multiworker"]


@dataclass(frozen=True)
class Setting:
    """Hosts that a work is trained on, the works, steps and systems that are worth their time there, and our plans.

    `weak`: every rank has the work's global batch.
    """

    emulate: dict[str, Any] | None
    works: tuple[str, ...]
    steps: int
    systems: tuple[str, ...] = ("all",)
    plans: tuple[str, ...] = ()
    weak: bool = False


SETTINGS = {
    "one-host": Setting(
        None, ("cnn", "gpt", "recommendation", "bert", "moe", "graph", "simclr", "averaged", "resnet50"), 70
    ),
    "1gbit": Setting({"hosts": 2, "rate": "1gbit"}, ("cnn", "gpt", "bert"), 40, tuple(OVER_HOSTS)),
    "25mbit": Setting(
        {"hosts": 4, "rate": "25mbit"},
        ("cnn",),
        90,
        ("ddp", "accelerate", "tf-multiworker"),
        ("dp=4 threads=1 compress=powersgd:2", "dp=4 threads=1 sync=diloco:10 compress=int8"),
    ),
    "weak": Setting(
        None,
        ("cnn", "gpt"),
        70,
        ("ddp", "accelerate", "horovod", "tf-mirrored", "tf-multiworker", "deepspeed"),
        weak=True,
    ),
    # 1.75 cores in all: with more than the machine has, hosts would share cores, and the slow one be as fast as others
    "slow-host": Setting(
        {"hosts": 4, "rate": "1gbit", "cpu": (0.5, 0.5, 0.5, 0.25)},
        ("cnn",),
        40,
        ("ddp", "accelerate", "tf-multiworker"),
    ),
}
FEW_STEPS = {"resnet50": 16}


def main() -> None:
    """Compare, print every table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--works", default="", help="of these works alone")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="in these settings alone")
    parser.add_argument("--systems", default="", help="these systems instead of those of the setting")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the pages")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-systems-") as scratch:
        found = dict(comparisons(arguments, arguments.out or Path(scratch)))
    print(environment_line())
    if arguments.json:
        print_figures(figures(found))


def comparisons(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[tuple[str, str], Comparison]]:
    """Each work in each setting, compared and shown."""
    jobs, named = works(), arguments.works.split(",") if arguments.works else None
    for name in arguments.settings.split(","):
        setting = SETTINGS[name]
        for work in setting.works:
            if named is not None and work not in named:
                continue
            if work not in jobs:
                print(f"{work} is left out: PyTorch Geometric is not installed")
                continue
            print(f"\n{work}, {name}", flush=True)
            compared = compare(jobs[work], setting, arguments, folder / f"{work}-{name}")
            if compared is not None:
                show(compared, Console())
                yield (work, name), compared


def compare(job: dict[str, Any], setting: Setting, arguments: argparse.Namespace, path: Path) -> Comparison | None:
    """One work in one setting, with its page."""
    cluster = Cluster(emulate=Emulate(**setting.emulate)) if setting.emulate else None
    systems = arguments.systems.split(",") if arguments.systems else setting.systems
    made = Compare(
        Job.model_validate(job),
        cluster,
        SYSTEMS.names if list(systems) == ["all"] else systems,
        plans=setting.plans,
        repeat=arguments.repeat,
        steps=FEW_STEPS.get(job["name"], setting.steps),
        weak=setting.weak,
        out=path,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        command="benchmarks/systems.py",
    )
    found = made.run()
    if found is not None:
        print(f"report {write_systems_page(found, path)}")
    return found


def figures(found: dict[tuple[str, str], Comparison]) -> dict[str, float]:
    """The figures that the head of this file defines."""
    named: dict[str, float] = {}
    ratios: dict[str, list[float]] = {}
    for (work, setting), compared in found.items():
        best = next((way for way in compared.ways if way.way == compared.best_other), None)
        if best is not None and best.ratio is not None:
            key = f"ratio_{work}_{setting}".replace("-", "_")
            named |= {key: best.ratio.middle, f"{key}_low": best.ratio.low, f"{key}_high": best.ratio.high}
            ratios.setdefault(setting, []).append(best.ratio.middle)
    if ratios:
        named["worst_ratio"] = min(min(values) for values in ratios.values())
    for setting in ("one-host", "1gbit"):
        if setting in ratios:
            named[f"median_ratio_{setting}".replace("-", "_")] = statistics.median(ratios[setting])
    slow = [ratio for (_, setting), compared in found.items() if setting == "25mbit" for ratio in to_target(compared)]
    if slow:
        named["median_ratio_25mbit"] = statistics.median(slow)
    run = {way.system for compared in found.values() for way in compared.ways} - {"plain"}
    return named | {"systems_run": float(len(run))}


def to_target(compared: Comparison) -> list[float]:
    """Time to the target of the fastest other system / that of our fastest plan, where both reached it."""
    reached = [(way.system, way.to_target_s.middle) for way in compared.ways if way.to_target_s is not None]
    ours = min((time_s for system, time_s in reached if system == "paceline"), default=None)
    others = min((time_s for system, time_s in reached if system not in ("paceline", "plain")), default=None)
    return [others / ours] if ours and others else []


if __name__ == "__main__":
    main()
