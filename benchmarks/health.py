"""Does the health check before a run name faulty devices and links, and only those?

    python benchmarks/health.py [--json] [--planted 30] [--healthy 100] [--device cpu] [--ranks 4]

Each check is that of `paceline doctor --cluster`, on simulated accelerators or, with `--device cpu`, on cores. In half
of the checks without a fault, another process is busy beside the ranks. A planted fault is on a random device: it loses
a quarter of its rate in matrix products, or now and then flips the lowest bit of one number of a product, or one bit of
its memory keeps its value. A slow link has 45 instead of 100 Mbit/s, on one of three emulated hosts (as root only).

Figures:
- `throttled_found`, `wrong_arithmetic_found`, `wrong_memory_found`, `slow_link_found`: checks that name the faulty
  device or host, and nothing else; `…_planted`: of how many.
- `false_alarms`: healthy checks with a finding; `healthy`: of how many.
- `check_s`: median seconds of a check without findings, `longest_check_s`: of the longest check of all.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from random import Random

# `simulated` is the accelerator's package there, and a script here, which is never imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from health_ranks import Checked, Planted, checks
from measure import environment_line, parser_of, print_figures
from paceline.cluster.cluster import Cluster
from paceline.cluster.host import Emulate
from paceline.elastic.place import on_this_machine
from paceline.elastic.run_on_ranks import run_on_ranks
from paceline.run.health import check_cluster
from simulated.environment import simulated_environment

CODES = {"throttled": "device.slow", "wrong arithmetic": "device.wrong_result", "wrong memory": "device.wrong_memory"}
HOSTS, RATE, SLOW_RATE = 3, "100mbit", "45mbit"
LONGEST_S = 3600.0


def main() -> None:
    """Make all checks, print the table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--planted", type=int, default=30, help="checks with each fault")
    parser.add_argument("--healthy", type=int, default=100, help="checks without one")
    parser.add_argument("--device", choices=("sim", "cpu"), default="sim", help="kind of the devices")
    parser.add_argument("--ranks", type=int, default=4, help="number of devices")
    options, random = parser.parse_args(), Random(48)
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if options.device == "sim":
        os.environ |= simulated_environment(devices=options.ranks, order="eager")
    figures: dict[str, float | None] = {}
    longest_s = 0.0
    for fault in CODES:
        cases = [Planted(fault, random.randrange(options.ranks)) for _ in range(options.planted)]
        done = _checked(cases, options.ranks)
        longest_s = max([longest_s, *(check.seconds for check in done)])
        _count(figures, fault, sum(_is_right(case, check) for case, check in zip(cases, done, strict=True)), len(cases))
    done = _checked([Planted("", 0, noise=number % 2 == 1) for number in range(options.healthy)], options.ranks)
    healthy_s = [check.seconds for check in done if not check.named]
    figures |= {
        "false_alarms": len(done) - len(healthy_s),
        "healthy": len(done),
        "check_s": statistics.median(healthy_s) if healthy_s else None,
        "longest_check_s": max([longest_s, *(check.seconds for check in done)]),
    }
    print(f"{'no fault':20} named {figures['false_alarms']:3} of {len(done)}", flush=True)
    if os.geteuid() == 0:
        found = sum(_slow_link(random.randrange(HOSTS)) for _ in range(options.planted))
        _count(figures, "slow link", found, options.planted)
    print(f"seconds of a check: median {figures['check_s']:.1f}, longest {figures['longest_check_s']:.1f}")
    print(environment_line())
    if options.json:
        print_figures(figures)


def _checked(cases: list[Planted], ranks: int) -> list[Checked]:
    """Make the checks in one launch, and show the checks that did not name exactly the fault."""
    places = on_this_machine(ranks)
    done = run_on_ranks(checks, cases, places=places, deadline_s=120, start_deadline_s=LONGEST_S)[0]
    for case, check in zip(cases, done, strict=True):
        if not _is_right(case, check):
            beside = ", beside a busy process" if case.noise else ""
            print(f"{case.fault or 'no fault'}, rank {case.rank}{beside}: {check.named}", flush=True)
    return done


def _is_right(case: Planted, check: Checked) -> bool:
    return check.named == ([(CODES[case.fault], (case.rank,))] if case.fault else [])


def _count(figures: dict[str, float | None], fault: str, found: int, planted: int) -> None:
    print(f"{fault:20} found {found:3} of {planted}", flush=True)
    name = fault.replace(" ", "_")
    figures |= {f"{name}_found": found, f"{name}_planted": planted}


def _slow_link(slow: int) -> bool:
    """Plant a slow link at a host, and return True if the check names only this host."""
    rates = tuple(SLOW_RATE if host == slow else RATE for host in range(HOSTS))
    checked = check_cluster(Cluster(emulate=Emulate(hosts=HOSTS, rate=rates)), HOSTS)
    named = [(f.code, {checked.host_numbers[rank] for rank in f.ranks}) for f in checked.report.findings]
    if named != [("link.slow", {slow})]:
        print(f"slow link of host {slow}: {named}", flush=True)
    return named == [("link.slow", {slow})]


if __name__ == "__main__":
    main()
