"""Trainings on simulated accelerators, whose queued work runs as late as it may, held to the same ones on the CPU.

    python benchmarks/simulated.py [--json] [--quick] [--only TEXT]

Each case is a plan, a work (a job, or a loop of a user's own) and an order of the streams: late, random or eager. It
trains some steps on 1 to 8 simulated devices; its losses and final parameters are compared with those of the same
plan on the CPU. The simulated accelerator is that of `tests/simulated`.

Figures:
- `cases`: how many were compared.
- `wrong`, `crashed`, `late`: how many had other numbers, an error, or no end.
- `host_waits_per_step`: how often the host waits for the device in a step of our loop (the more of dp=1 and dp=2).
- `waits_before_update`: how many of these are before the update of the step is queued.
- `extra_launches_per_step`: kernels that our step launches beyond the same step in plain PyTorch (dp=1).

`--quick` takes the cases of `make test`, `--only` those whose name has the text in it.
"""

from __future__ import annotations

import sys
from pathlib import Path

# There `simulated` is the accelerator's package: this file is a script, and never imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import time
from collections import Counter

from measure import environment_line, parser_of, print_figures
from simulated_cases import extensions, quick_table, table
from simulated_sets import Result, device_variables, references, simulated
from simulated_steps import STEPS, counts_of_a_step


@extensions()
def main() -> None:
    """Train every case, print the table, and with --json a last line for machines."""
    parser = parser_of(str(__doc__))
    parser.add_argument("--quick", action="store_true", help="only the cases of make test")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their names")
    arguments = parser.parse_args()
    cases = [case for case in (quick_table() if arguments.quick else table()) if arguments.only in case.name]
    started = time.monotonic()
    device = device_variables()
    expected = references(cases, device)
    print(f"{len(expected)} trainings on the CPU as references: {time.monotonic() - started:.0f} s")
    results = simulated(cases, expected, device, _tell)
    verdicts = Counter(result.verdict for result in results)
    of_one, of_two = counts_of_a_step(device), counts_of_a_step(device, ranks=2)["paceline train"]
    ours, plain = of_one["paceline train"], of_one["plain"]
    print(", ".join(f"{number} {verdict}" for verdict, number in verdicts.items()))
    print(f"one step, dp=1: {ours.launches:g} launches, plain PyTorch {plain.launches:g}")
    for plan, counts in ("dp=1", ours), ("dp=2", of_two):
        where = ", ".join(f"{line} ({times} times)" for line, times in counts.lines.items())
        before = f"{counts.waits_before_update:g} before its update"
        print(f"one step, {plan}: {counts.waits:g} host waits, {before}; in {STEPS} steps: {where}")
    print(f"{time.monotonic() - started:.0f} s; {environment_line()}")
    if arguments.json:
        figures = {
            "cases": len(results),
            "wrong": verdicts["wrong"],
            "crashed": verdicts["crashed"] + verdicts["refused"],
            "late": verdicts["late"],
            "host_waits_per_step": max(ours.waits, of_two.waits),
            "waits_before_update": max(ours.waits_before_update, of_two.waits_before_update),
            "extra_launches_per_step": ours.launches - plain.launches,
        }
        print_figures(figures)
    if verdicts.keys() - {"right"}:
        sys.exit(1)


def _tell(result: Result) -> bool:
    difference = f"{result.difference:6.1%} of what is allowed" if result.verdict == "right" else result.why
    print(f"  {result.verdict:8} {result.case.name:75} {difference}", flush=True)
    return True


if __name__ == "__main__":
    main()
